"""Graph networks but for their layers, which a library computes: graphs, training, prediction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np

from ...common.errors import ModelError
from ...features.table.kernel_graph import graph_schema_hash
from ..core.graphs import KernelGraphs
from ..core.kernel_table import KernelTable
from ..core.store import check_schema
from .base import NeuralEstimator
from .batches import GraphBatch, GraphRows
from .fitting import best_epoch, learning_rates, shuffled
from .scaling import Scaling

Weights = Mapping[str, np.ndarray]


class GraphNetwork(Protocol):
    """The layers in one library, with their weights."""

    def step(self, batch: GraphBatch, rate: np.float32) -> None:
        """Move the weights against the gradient of the loss, by AdamW at a learning rate."""

    def ratio(self, batch: GraphBatch) -> np.ndarray:
        """Log-ratios of the batch's rows, padding included, shape ``(rows,)``."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the weights by name."""


class GraphEstimator(NeuralEstimator):
    """A network on the kernel's computation graph and its row of the feature table.

    The graph is the same on every device; the row describes the device and the kernel as a whole.
    So the graph is embedded once, and a perceptron combines the two.

    Args:
        hidden: Width of a node.
        rounds: Rounds of message passing, the number of edges that information travels.
        head: Width of the perceptron behind it.
        layers: Hidden layers of the perceptron.
        epochs: Most passes over the rows; early stopping may end sooner.
        batch: Rows of a step.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of AdamW.
        delta: Errors of the log-ratio below this count quadratically.
        stop_epochs: Epochs without improvement before stopping.
        seed: Seed of weights, order and held-back groups.
    """

    needs_graphs: ClassVar[bool] = True

    def __init__(
        self,
        hidden: int = 64,
        rounds: int = 2,
        head: int = 192,
        layers: int = 3,
        epochs: int = 30,
        batch: int = 256,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        delta: float = 0.1,
        stop_epochs: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(
            hidden=hidden,
            rounds=rounds,
            head=head,
            layers=layers,
            epochs=epochs,
            batch=batch,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            delta=delta,
            stop_epochs=stop_epochs,
            seed=seed,
        )
        self.nodes: Scaling | None = None

    def _look_at(self, table: KernelTable) -> None:
        super()._look_at(table)
        graphs = self._graphs(table)
        # Each graph once, however many rows have it; graphs of rows outside the table do not count.
        self.nodes = Scaling.fit(graphs.packed.take(np.unique(graphs.index)).features)

    def _rows(self, table: KernelTable, target: np.ndarray | None = None) -> GraphRows:
        """The table in the form of a network's input; missing targets are zero."""
        graphs = self._graphs(table)
        y = np.zeros(len(table), np.float32) if target is None else target
        nodes = self._known(self.nodes)
        return GraphRows(graphs.packed, graphs.index, self._scaled(table), y, nodes)

    @abstractmethod
    def _network(self, weights: Weights | None = None) -> GraphNetwork:
        """A network with the given weights, or with new ones that are drawn by the seed."""

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        rows = self._rows(table, target)
        held = list(rows.take(stop).batches(self.params["batch"]))
        return best_epoch(
            self._epochs(rows.take(~stop)),
            (lambda weights: self._error(weights, held)) if held else None,
            self.params["stop_epochs"],
        )

    def _epochs(self, rows: GraphRows) -> Iterator[dict[str, np.ndarray]]:
        """Weights after every epoch over the rows."""
        p, network = self.params, self._network()
        rng = np.random.default_rng(p["seed"])
        for epoch in range(p["epochs"]):
            order = shuffled(len(rows.y), p["batch"], rng)
            rates = learning_rates(p["epochs"] * len(order), p["learning_rate"])
            for step, batch in rows.training_batches(order):
                network.step(batch, rates[epoch * len(order) + step])
            yield network.arrays()

    def _error(self, weights: Weights, held: list[GraphBatch]) -> float:
        """Mean absolute error of the log-ratio."""
        network = self._network(weights)
        total, count = 0.0, 0.0
        for batch in held:
            total += float((np.abs(network.ratio(batch) - batch.y) * batch.weight).sum())
            count += float(batch.weight.sum())
        return total / count

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        network = self._network(self.weights)
        batches = self._rows(table).batches(self.params["batch"])
        return np.concatenate([network.ratio(batch)[batch.weight > 0] for batch in batches])

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._network().arrays().items()}

    def _graphs(self, table: KernelTable) -> KernelGraphs:
        if table.graphs is None:
            raise ModelError(
                f"estimator {self.name!r} needs the kernels' graphs, and the table has none",
                hint="make it with kernel_table(kernels, device, graphs=True)",
            )
        return table.graphs

    def _arrays(self) -> dict[str, np.ndarray]:
        return {**super()._arrays(), **self._known(self.nodes).to_arrays("nodes")}

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.nodes = Scaling.from_arrays(arrays, "nodes")
        super()._take(arrays)

    def _manifest(self) -> dict[str, object]:
        return {**super()._manifest(), "graph_schema_hash": graph_schema_hash()}

    @classmethod
    def _from_parts(
        cls, path: Path, manifest: Mapping[str, object], files: dict[str, bytes], schema: str | None
    ) -> Self:
        check_schema(path, manifest, graph_schema_hash(), kind="graph")
        return super()._from_parts(path, manifest, files, schema)
