"""A perceptron on the feature table, in Flax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..core.base import own_params
from ..core.kernel_table import KernelTable
from .base import NeuralEstimator, best_epoch, learning_rates, shuffled
from .batches import row_bucket

if TYPE_CHECKING:
    from .flax_nets import CompiledNetwork, Perceptron, Weights

#: Most rows predicted at a time: bounds the memory of activations, and the number of shapes to
#: compile for.
_CHUNK = 1024


class MLPEstimator(NeuralEstimator):
    """Dense layers on the standardised features, with a bounded log-ratio.

    Args:
        hidden: Width of the hidden layers.
        layers: Number of hidden layers.
        epochs: Most passes over the rows; early stopping may end sooner.
        batch: Rows of a step.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of AdamW.
        delta: Errors of the log-ratio below this count quadratically.
        stop_epochs: Epochs without improvement before stopping.
        seed: Seed of weights, order and held-back groups.
    """

    name = "mlp"

    def __init__(
        self,
        hidden: int = 256,
        layers: int = 3,
        epochs: int = 30,
        batch: int = 256,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        delta: float = 0.1,
        stop_epochs: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(**own_params(locals()))

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        from .flax_nets import to_arrays

        p, functions, bound = self.params, self._functions(), self.bound.to_array()
        values = self._scaled(table)
        x, y = values[~stop], target[~stop]
        rng = np.random.default_rng(p["seed"])
        rates = learning_rates(
            p["epochs"] * len(shuffled(len(y), p["batch"], rng)), p["learning_rate"]
        )

        def epochs() -> Iterator[Weights]:
            state = functions.init(p["seed"], values[:1])
            # All epochs have the same number of steps, so the schedule divides evenly among them.
            for part in np.split(rates, p["epochs"]):
                rows = shuffled(len(y), p["batch"], rng)
                state = functions.epoch(state, x, y, rows, part, bound)
                yield state.weights

        def error(weights: Weights) -> float:
            ratio = np.asarray(functions.ratio(weights, values[stop], bound))
            return float(np.abs(ratio - target[stop]).mean())

        best = best_epoch(epochs(), error if stop.any() else None, p["stop_epochs"])
        return to_arrays(best)

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        from .flax_nets import from_arrays

        functions, weights = self._functions(), from_arrays(self.weights)
        values, bound = self._scaled(table), self.bound.to_array()
        parts = []
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            # A power of two of rows: a handful of compiled shapes serve any number.
            padded = np.zeros((row_bucket(len(part), _CHUNK), values.shape[1]), np.float32)
            padded[: len(part)] = part
            parts.append(np.asarray(functions.ratio(weights, padded, bound))[: len(part)])
        return np.concatenate(parts)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        from .flax_nets import shapes

        example = np.zeros((1, self._known(self.inputs).width), np.float32)
        return shapes(self._network(), example)

    def _network(self) -> Perceptron:
        from .flax_nets import Perceptron

        return Perceptron(self.params["hidden"], self.params["layers"])

    def _functions(self) -> CompiledNetwork:
        from .flax_nets import compiled

        return compiled(self._network(), self.params["delta"], self.params["weight_decay"])
