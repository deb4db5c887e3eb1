"""The graph network in Flax, on padded batches with compiled segment sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..core.kernel_table import KernelTable
from .batches import GraphBatch, GraphRows
from .fitting import best_epoch, learning_rates, shuffled
from .gnn import GraphEstimator

if TYPE_CHECKING:
    from .flax_nets import CompiledNetwork, FlaxGraphNet, Weights


class FlaxGraphEstimator(GraphEstimator):
    """Message passing in Flax on padded batches.

    Batches are padded to few different sizes (:mod:`.batches`), so that XLA compiles a handful of
    functions, and rows with the same kernel share their graph within a batch. The parameters are
    the same as :class:`.gnn.GraphEstimator`'s.
    """

    name = "gnn-flax"

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        from .flax_nets import to_arrays

        rows = self._rows(table, target)
        held = list(rows.take(stop).batches(self.params["batch"]))
        best = best_epoch(
            self._epochs(rows.take(~stop)),
            (lambda weights: self._error(weights, held)) if held else None,
            self.params["stop_epochs"],
        )
        return to_arrays(best)

    def _epochs(self, rows: GraphRows) -> Iterator[Weights]:
        """Weights after every epoch over the rows."""
        p, functions, bound = self.params, self._functions(), self.bound.to_array()
        rng = np.random.default_rng(p["seed"])
        state = None
        for epoch in range(p["epochs"]):
            order = shuffled(len(rows.y), p["batch"], rng)
            rates = learning_rates(p["epochs"] * len(order), p["learning_rate"])
            for step, batch in rows.training_batches(order):
                # Weights are made for the first batch, whose shapes tell the sizes of the inputs.
                state = state or functions.init(p["seed"], batch)
                rate = rates[epoch * len(order) + step]
                state = functions.step(state, batch, batch.y, batch.weight, rate, bound)
            assert state is not None
            yield state.weights

    def _error(self, weights: Weights, held: list[GraphBatch]) -> float:
        """Mean absolute error of the log-ratio."""
        bound = self.bound.to_array()
        total, count = 0.0, 0.0
        for batch in held:
            ratio = np.asarray(self._functions().ratio(weights, batch, bound))
            total += float((np.abs(ratio - batch.y) * batch.weight).sum())
            count += float(batch.weight.sum())
        return total / count

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        from .flax_nets import from_arrays

        weights, bound = from_arrays(self.weights), self.bound.to_array()
        parts = []
        for batch in self._rows(table).batches(self.params["batch"]):
            ratio = np.asarray(self._functions().ratio(weights, batch, bound))
            parts.append(ratio[batch.weight > 0])
        return np.concatenate(parts)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        from .flax_nets import example_batch, shapes

        inputs, nodes = self._known(self.inputs), self._known(self.nodes)
        example = example_batch(inputs.width, nodes.width)
        return shapes(self._network(), example)

    def _network(self) -> FlaxGraphNet:
        from .flax_nets import FlaxGraphNet

        p = self.params
        return FlaxGraphNet(p["hidden"], p["rounds"], p["head"], p["layers"])

    def _functions(self) -> CompiledNetwork:
        from .flax_nets import compiled

        return compiled(self._network(), self.params["delta"], self.params["weight_decay"])
