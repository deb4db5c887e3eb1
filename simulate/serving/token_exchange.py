"""Experts on many ranks: how evenly tokens load them, and times of sending tokens there and back.

A batch waits for the rank that gets most of it. Loads of experts are log-normal; a balancer copies
the busiest and packs the copies so that ranks have about equal loads (DeepSeek's EPLB,
github.com/deepseek-ai/EPLB).

Of DeepEP's kernels those of high throughput send a token once to each box that it has experts in,
where it is forwarded over the links inside; those of low latency send each token to each of
its experts. Fitted to the bandwidths and latencies that DeepEP publishes of H800
(github.com/deepseek-ai/DeepEP, docs/legacy.md: 8 to 64 and 8 to 256 ranks), which they give within
12 %.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log, sqrt
from typing import NamedTuple

import numpy as np

#: Deviation of the logarithms of experts' loads. Those of DeepSeek-R1 deviate by 1.28 of their mean
#: and the busiest of 256 is 11.9 times it (TensorRT-LLM's blog, Scaling Expert Parallelism, 2025,
#: table 1); 1.0 gives 1.29 and 11.7.
EXPERT_SKEW = 1.0
#: Copies that a balancer adds by default, as a share of the experts: 32 of 256 in that blog, in
#: DeepSeek's own deployment and in LMSYS's.
COPIES = 1 / 8
#: Draws of a layer's loads that are averaged; their mean then errs by 2 %.
_DRAWS = 16


def slots_of(experts: int, ranks: int, redundant: int | None) -> int:
    """Experts that a rank holds, copies included.

    Args:
        experts: Of a layer.
        ranks: That they are spread over.
        redundant: Copies over all ranks; ``None`` for about :data:`COPIES` of the experts, as many
            as fill the ranks evenly.
    """
    least = -(-experts // ranks)
    if redundant is None:
        return max(least, ceil((1.0 + COPIES) * experts / ranks))
    return -(-(experts + redundant) // ranks)


def busiest(rows: float, experts: int, ranks: int, redundant: int | None, skew: float) -> float:
    """Rows of the busiest rank over the mean, 1 at least.

    Args:
        rows: Mean rows of a rank.
        experts: Of a layer.
        ranks: That they are spread over.
        redundant: Copies that a balancer places; ``None`` for its default, 0 for no balancer.
        skew: Deviation of the logarithms of the experts' loads; 0 for an even draw.
    """
    if ranks == 1:
        return 1.0
    share, balanced = 1.0, redundant != 0
    if skew:
        slots = slots_of(experts, ranks, redundant)
        share = _placed(experts, ranks, slots, balanced, skew)
    # Ranks with equal expectations draw their rows: of n normal deviates the largest is about
    # sqrt(2 ln n).
    even = balanced or not skew
    chance = sqrt(2.0 * log(ranks) / max(rows, 1.0)) if even else 0.0
    return min(share * (1.0 + chance), float(ranks))


@lru_cache(maxsize=256)
def _placed(experts: int, ranks: int, slots: int, balanced: bool, skew: float) -> float:
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(_DRAWS):
        loads = np.exp(skew * rng.standard_normal(experts))
        loads /= loads.sum()
        if balanced:
            shares.append(_packed(loads, ranks, slots).max())
        else:
            shares.append(max(part.sum() for part in np.array_split(loads, ranks)))
    return float(np.mean(shares)) * ranks


def _packed(loads: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Loads of ranks after copying the busiest experts and packing the copies, shape ``(ranks,)``.

    Both greedy, as EPLB: a copy goes to the expert with most load for each, and the largest part to
    the rank with the least load and a free slot.
    """
    copies = np.ones(len(loads))
    for _ in range(ranks * slots - len(loads)):
        copies[np.argmax(loads / copies)] += 1
    parts = np.sort(np.repeat(loads / copies, copies.astype(int)))[::-1]
    held, free = np.zeros(ranks), np.full(ranks, slots)
    for part in parts:
        rank = int(np.argmin(np.where(free > 0, held, np.inf)))
        held[rank] += part
        free[rank] -= 1
    return held


#: Fixed seconds of a kernel.
_START_S = 40e-6
#: Share of the links that a kernel of low latency reaches, inside a box as between boxes.
_DIRECT = 0.95
#: Of one of high throughput: of the network, and of the links inside a box.
_BETWEEN, _INSIDE = 0.88, 0.77
#: Multiprocessors that kernels of high throughput take away from others; those of low latency take
#: none while tokens are on their way (DeepEP's ``set_num_sms(24)``).
EXCHANGE_CORES = 24
#: Shares of an exchange that the kernels of another half of the batch hide, of those of high
#: throughput and of low latency, whose sending and receiving keep all cores busy: two-batch overlap
#: brings 27 to 35 % of throughput in prefill and 25 % in decode of 256 sequences a rank (LMSYS,
#: Large-scale Expert Parallelism on 96 H100, 2025), which these give.
HIDDEN, HIDDEN_DIRECT = 0.77, 0.55
#: Bytes of a scale for each element of a row in 8 bits or fewer: one of 32 bits for 128.
_SCALE = 4.0 / 128.0


class Links(NamedTuple):
    """What ranks send tokens over.

    Attributes:
        box: Ranks that the links inside a box join.
        inside: Bytes a second of a rank to others of its box, one way.
        between: To those of other boxes.
    """

    box: int
    inside: float
    between: float


def row_bytes(width: int, activation_bits: float) -> tuple[float, float]:
    """Bytes of a token on its way to an expert, and back, where results stay in 16 bits.

    Args:
        width: Of the model.
        activation_bits: Of what experts multiply; operands of 4 bits are sent in 8.
    """
    sent = 1.0 + _SCALE if activation_bits <= 8 else 2.0
    return width * sent, width * 2.0


def exchange_seconds(
    links: Links, ranks: int, sent: float, top_k: int, most_boxes: int, *, direct: bool
) -> float:
    """Seconds of one dispatch or combine.

    Args:
        links: Of the cluster.
        ranks: Of expert parallelism.
        sent: Bytes of a rank's tokens, each once.
        top_k: Experts of a token.
        most_boxes: Boxes that the experts of a token lie in at most; 0 for no limit.
        direct: Whether by the kernels of low latency.
    """
    boxes = -(-ranks // links.box)
    away = 1.0 - 1.0 / boxes
    if direct:
        over, inside = sent * top_k * away, sent * top_k / boxes
        return _START_S + max(over / links.between, inside / links.inside) / _DIRECT
    reached = _distinct(boxes, top_k)
    reached = min(reached, most_boxes) if most_boxes else reached
    over, inside = sent * reached * away, sent * _distinct(ranks, top_k)
    return _START_S + max(over / (_BETWEEN * links.between), inside / (_INSIDE * links.inside))


def _distinct(places: int, draws: int) -> float:
    """Expected number of places that as many even draws reach."""
    return float(places * (1.0 - (1.0 - 1.0 / places) ** draws))
