"""Distribution of experts' rows over the ranks that hold the experts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

#: Largest fraction of the tokens that the most loaded expert of a skewed draw receives.
MOST_LOADED = 0.8
#: Draws solved at a time, which bounds the memory of the expert loads.
_TOGETHER = 2048


@lru_cache(maxsize=4096)
def routed(tokens: int, topk: int, experts: int, ep: int, skew: float) -> tuple[float, float]:
    """Return the rows of the busiest rank, and how many of its experts receive any (cached)."""
    rows, touched = busy_rank(*(np.array([float(n)]) for n in (tokens, topk, experts, ep, skew)))
    return float(rows[0]), float(touched[0])


def busy_rank(
    tokens: np.ndarray, topk: np.ndarray, experts: np.ndarray, ep: np.ndarray, skew: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the busiest rank, and how many of its experts receive any, ``(n,)`` each.

    A balanced draw gives each rank ``tokens × topk / ep`` rows and each expert one row as long as
    there are any. In a skewed draw the density of expert loads is ``∝ x^-skew`` between one row and
    0.8 of the tokens; the busiest rank has the most loaded expert and average ones, and an expert
    with load ``x`` receives a row with probability ``1 - exp(-x)``.

    Args:
        tokens: Tokens before routing.
        topk: Experts per token.
        experts: Experts of the layer.
        ep: Ranks that the experts are divided over.
        skew: Exponent of the density; 0 is balanced.
    """
    rows, local = tokens * topk / ep, experts / ep
    active = np.minimum(local, rows)
    skewed = np.flatnonzero(skew > 0)
    # Tables contain few distinct draws: each is solved once.
    keys = np.stack([tokens, topk, experts, ep, skew], axis=1)[skewed]
    unique, place = np.unique(keys, axis=0, return_inverse=True)
    busiest = np.empty((len(unique), 2))
    # Draws with the same number of experts are solved together, since their loads form a matrix.
    for count in np.unique(unique[:, 2]):
        same = np.flatnonzero(unique[:, 2] == count)
        for some in np.array_split(same, -(-len(same) // _TOGETHER)):
            busiest[some] = _busiest(*unique[some].T)
    rows[skewed], active[skewed] = busiest[place.ravel()].T
    return rows, np.clip(active, 1, np.maximum(local, 1))


def _busiest(
    tokens: np.ndarray, topk: np.ndarray, experts: np.ndarray, ep: np.ndarray, skew: np.ndarray
) -> np.ndarray:
    """Return rows and active experts of draws with the same number of experts, ``(n, 2)``."""
    count, total = max(round(float(experts[0])), 1), tokens * topk
    # Quantiles of the density x^-skew on [1, most] in closed form (inverse of its distribution
    # function), at the midpoints of `count` equal parts.
    place = (np.arange(count) + 0.5) / count
    most = np.maximum(MOST_LOADED * tokens, 1.5)
    flat = (1 - skew)[:, None]
    load = (1 + place * (most[:, None] ** flat - 1)) ** (1 / flat)
    # An expert receives a token at most once; the excess over that cap goes to the others. Three
    # rounds of rescaling suffice because the cap binds for a few experts only.
    for _ in range(3):
        load = np.minimum(load * (total / load.sum(axis=1))[:, None], tokens[:, None])
    local = np.maximum(count / ep, 1.0)
    others = (load.sum(axis=1) - load[:, -1]) / max(count - 1, 1)
    rows = np.clip(load[:, -1] + (local - 1) * others, total / ep, total)
    # Poisson: an expert with expected load x receives no row with probability exp(-x).
    active = np.maximum(1.0, local * (1 - np.exp(-load)).mean(axis=1))
    return np.stack([rows, active], axis=1)
