"""What training has in common, whatever library computes the gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

#: Share of the steps in which the learning rate rises.
WARM_UP = 0.05
#: Gradients with a larger norm are scaled down to it.
CLIP_NORM = 1.0


def learning_rates(steps: int, peak: float) -> np.ndarray:
    """Learning rate of every step: a linear rise, then half a cosine down to nothing.

    Args:
        steps: How many.
        peak: The largest.

    Returns:
        float32, shape ``(steps,)``.
    """
    rising = max(1, round(WARM_UP * steps))
    at = np.arange(steps)
    falling = 0.5 * (1.0 + np.cos(np.pi * np.clip((at - rising) / max(1, steps - rising), 0, 1)))
    return np.asarray(peak * np.minimum((at + 1) / rising, falling), np.float32)


def shuffled(rows: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Rows in random order, cut into full batches: shape ``(steps, min(batch, rows))``.

    What is left over after the last full batch is left out; it is other rows every time.
    """
    size = min(batch, rows)
    steps = rows // size
    return rng.permutation(rows)[: steps * size].reshape(steps, size)


def best_epoch(epochs: Iterator[Any], error: Callable[[Any], float] | None, patience: int) -> Any:
    """Weights of the epoch with the least error on held-back rows.

    Args:
        epochs: Gives the weights after every epoch; at least once.
        error: Error of weights on the rows held back; without, the last weights are taken.
        patience: Epochs without improvement before stopping.
    """
    best, least, since = None, np.inf, 0
    for number, weights in enumerate(epochs):
        found = error(weights) if error else -float(number)
        logger.debug("epoch %d: error %.4f", number, found)
        if found < least or best is None:
            best, least, since = weights, found, 0
            continue
        since += 1
        if since >= patience:
            break
    return best
