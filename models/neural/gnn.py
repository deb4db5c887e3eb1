"""Graph networks but for their layers, which a library computes: graphs, training, prediction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from ...common.errors import ModelError
from ...common.extras import extra_hint
from ...features.table.kernel_graph import graph_schema_hash
from ..core.base import own_params
from ..core.kernel_table import KernelGraphs, KernelTable
from ..core.store import check_schema
from .base import NeuralEstimator, Scaling, best_epoch, learning_rates, shuffled
from .batches import GraphBatch, GraphRows

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
        super().__init__(**own_params(locals()))
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


class FlaxGraphEstimator(GraphEstimator):
    """Message passing in Flax.

    Batches are padded to few different sizes (:mod:`.batches`), so that XLA compiles a handful of
    functions. The parameters are the same as :class:`.gnn.GraphEstimator`'s.
    """

    name = "gnn-flax"

    def _network(self, weights: Weights | None = None) -> GraphNetwork:
        from .flax_nets import FlaxGraphNet, TrainedNetwork, compiled, example_batch

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        layers = FlaxGraphNet(p["hidden"], p["rounds"], p["head"], p["layers"])
        functions = compiled(layers, p["delta"], p["weight_decay"])
        bound = self.bound.to_array()
        if weights is not None:
            return TrainedNetwork.restored(functions, weights, bound)
        example = example_batch(inputs.width, nodes.width)
        return TrainedNetwork(functions, functions.init(p["seed"], example), bound)


class PygGraphEstimator(GraphEstimator):
    """Message passing in PyTorch Geometric, for those who build on PyTorch.

    Network, batches, target and loss are ``gnn-flax``'s, which trains faster on a CPU
    (docs/models.md).

    Args:
        seed: Seed of weights, order and held-back groups.
        n_jobs: Threads.
        params: The others of :class:`.gnn.GraphEstimator`.

    Raises:
        ModelError: PyTorch or PyTorch Geometric is not installed.
    """

    name = "gnn-pyg"

    def __init__(self, *, seed: int = 0, n_jobs: int = 1, **params: Any) -> None:
        # Asked for without importing, which takes seconds.
        missing = [name for name in ("torch", "torch_geometric") if find_spec(name) is None]
        if missing:
            raise ModelError(
                f"estimator 'gnn-pyg' needs {' and '.join(missing)}",
                hint=f"{extra_hint('gnn')}, or take gnn-flax",
            )
        super().__init__(seed=seed, **params)
        self.params["n_jobs"] = n_jobs

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        with self._threads():
            return super()._train(table, target, stop)

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        with self._threads():
            return super()._network_ratio(table)

    def _network(self, weights: Weights | None = None) -> GraphNetwork:
        from .pyg_net import PygGraphNet, TrainedNetwork, seeded

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        with seeded(p["seed"]):
            layers = PygGraphNet(
                inputs.width, nodes.width, p["hidden"], p["rounds"], p["head"], p["layers"]
            )
        return TrainedNetwork(layers, self.bound, p["delta"], p["weight_decay"], weights)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use :attr:`n_jobs` threads, and as many as before afterwards."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.params["n_jobs"])
        try:
            yield
        finally:
            torch.set_num_threads(before)
