"""Load balance of expert parallelism, and times of dispatching tokens to experts and back.

A batch waits for the rank with the most rows. Expert loads are log-normal; a balancer copies the
busiest experts and packs the copies so that ranks have about equal loads (DeepSeek's EPLB,
github.com/deepseek-ai/EPLB).

DeepEP's high-throughput kernels send a token once to each box that has one of its experts, and
forward it over the links inside the box; the low-latency kernels send a token to each of its
experts directly. Constants are fitted to the bandwidths and latencies that DeepEP publishes for
H800 (github.com/deepseek-ai/DeepEP, docs/legacy.md: 8 to 64 and 8 to 256 ranks) and reproduce them
within 12 %.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log, sqrt
from typing import NamedTuple

import numpy as np

#: Standard deviation of the logarithms of expert loads. Loads of DeepSeek-R1 have a coefficient of
#: variation of 1.28, and the busiest of 256 has 11.9 times the mean (TensorRT-LLM's blog, Scaling
#: Expert Parallelism, 2025, table 1); 1.0 gives 1.29 and 11.7.
EXPERT_SKEW = 1.0
#: Default number of expert copies as a fraction of the experts: 32 of 256 in that blog, in
#: DeepSeek's own deployment and in LMSYS's.
COPIES = 1 / 8
#: Random draws of a layer's loads to average; the standard error of their mean is 2 %.
_DRAWS = 16


def slots_of(experts: int, ranks: int, redundant: int | None) -> int:
    """Experts that a rank holds, including copies.

    Args:
        experts: Experts of a layer.
        ranks: Ranks over which they are distributed.
        redundant: Copies over all ranks; ``None`` for about :data:`COPIES` of the experts, rounded
            so that they fill the ranks evenly.
    """
    least = -(-experts // ranks)
    if redundant is None:
        return max(least, ceil((1.0 + COPIES) * experts / ranks))
    return -(-(experts + redundant) // ranks)


def busiest(rows: float, experts: int, ranks: int, redundant: int | None, skew: float) -> float:
    """Rows of the busiest rank relative to the mean, at least 1.

    Args:
        rows: Mean rows per rank.
        experts: Experts of a layer.
        ranks: Ranks over which they are distributed.
        redundant: Copies placed by a balancer; ``None`` for the default, 0 for no balancer.
        skew: Standard deviation of the logarithms of expert loads; 0 for uniform loads.
    """
    if ranks == 1:
        return 1.0
    share, balanced = 1.0, redundant != 0
    if skew:
        slots = slots_of(experts, ranks, redundant)
        share = _placed(experts, ranks, slots, balanced, skew)
    # Rows of ranks with equal expectations vary randomly: the largest of n normal deviates is about
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

    Both steps are greedy, as in EPLB: a copy goes to the expert with the highest load per copy, and
    the largest remaining load to the least loaded rank with a free slot.
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


#: Fixed time of a kernel in seconds.
_START_S = 40e-6
#: Fraction of link bandwidth that low-latency kernels reach, inside a box and between boxes.
_DIRECT = 0.95
#: The same for high-throughput kernels: between boxes, and inside a box.
_BETWEEN, _INSIDE = 0.88, 0.77
#: Multiprocessors that high-throughput kernels occupy (DeepEP's ``set_num_sms(24)``); low-latency
#: kernels occupy none while tokens are in transit.
EXCHANGE_CORES = 24
#: Fraction of an exchange hidden behind the kernels of the other half of the batch, for
#: high-throughput and for low-latency kernels, whose send and receive phases occupy all cores.
#: Reproduces the gains of two-batch overlap: 27 to 35 % of throughput in prefill, 25 % in decode at
#: 256 sequences per rank (LMSYS, Large-scale Expert Parallelism on 96 H100, 2025).
HIDDEN, HIDDEN_DIRECT = 0.77, 0.55
#: Bytes of scales per element of rows in 8 bits or fewer: 32 bits for 128 elements.
_SCALE = 4.0 / 128.0


class Links(NamedTuple):
    """Links over which ranks send tokens.

    Attributes:
        box: Ranks joined by the links inside a box.
        inside: Bandwidth of a rank to others of its box in bytes per second, one way.
        between: The same to ranks of other boxes.
    """

    box: int
    inside: float
    between: float


def row_bytes(width: int, activation_bits: float) -> tuple[float, float]:
    """Bytes of a token on its way to an expert and on its way back, which is in 16 bits.

    Args:
        width: Hidden size of the model.
        activation_bits: Bits of the experts' activations; 4-bit operands are sent in 8 bits.
    """
    sent = 1.0 + _SCALE if activation_bits <= 8 else 2.0
    return width * sent, width * 2.0


def exchange_seconds(
    links: Links, ranks: int, sent: float, top_k: int, most_boxes: int, *, direct: bool
) -> float:
    """Seconds of one dispatch or combine.

    Args:
        links: Links of the cluster.
        ranks: Expert-parallel ranks.
        sent: Bytes of a rank's tokens, each counted once.
        top_k: Experts per token.
        most_boxes: Maximum number of boxes that hold the experts of one token; 0 for no limit.
        direct: Whether low-latency kernels are used.
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
    """Expected number of distinct places reached by ``draws`` uniform draws."""
    return float(places * (1.0 - (1.0 - 1.0 / places) ** draws))
