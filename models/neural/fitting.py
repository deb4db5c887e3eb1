"""Training utilities that do not depend on the library which computes the gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

logger = logging.getLogger(__name__)

Weights = TypeVar("Weights")

#: Share of the steps in which the learning rate rises: Adam's estimates of the second moment vary
#: too much in the first ones (Liu et al., On the Variance of the Adaptive Learning Rate and Beyond,
#: ICLR 2020). The value is an engineering estimate.
WARM_UP = 0.05
#: Gradients with a larger norm are scaled down to it (Pascanu et al., ICML 2013), so that a batch
#: with outliers does not undo what was learned.
CLIP_NORM = 1.0


def learning_rates(steps: int, peak: float) -> np.ndarray:
    """Learning rate of every step: linear warm-up, then cosine decay to zero.

    Args:
        steps: Number of steps.
        peak: Largest learning rate.

    Returns:
        float32, shape ``(steps,)``.
    """
    rising = max(1, round(WARM_UP * steps))
    at = np.arange(steps)
    falling = 0.5 * (1.0 + np.cos(np.pi * np.clip((at - rising) / max(1, steps - rising), 0, 1)))
    return np.asarray(peak * np.minimum((at + 1) / rising, falling), np.float32)


def shuffled(rows: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Rows in random order, cut into full batches: shape ``(steps, min(batch, rows))``.

    The remainder after the last full batch is left out; it consists of other rows every time.
    """
    size = min(batch, rows)
    steps = rows // size
    return rng.permutation(rows)[: steps * size].reshape(steps, size)


def best_epoch(
    epochs: Iterator[Weights], error: Callable[[Weights], float] | None, patience: int
) -> Weights:
    """Weights of the epoch with the least error on held-back rows.

    Args:
        epochs: Yields the weights after every epoch; at least once.
        error: Error of weights on the held-back rows; ``None`` takes the last weights.
        patience: Epochs without improvement before stopping.
    """
    best: Weights | None = None
    least, since = np.inf, 0
    for number, weights in enumerate(epochs):
        # Falls with every epoch, so that the last one wins and nothing stops early.
        current = error(weights) if error else -float(number)
        logger.debug("epoch %d: error %.4f", number, current)
        if current < least or best is None:
            best, least, since = weights, current, 0
            continue
        since += 1
        if since >= patience:
            break
    assert best is not None
    return best
