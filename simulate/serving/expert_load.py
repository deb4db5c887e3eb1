"""How evenly the tokens of a batch load the ranks that experts are spread over.

A batch waits for the rank that gets most of it. Loads of experts are log-normal; a balancer copies
the busiest and packs the copies so that ranks have about equal loads (DeepSeek's EPLB,
github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log, sqrt

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
