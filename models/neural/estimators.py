"""The neural estimators by name; their layers are in modules for each library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from ...common.errors import ModelError
from ...common.plugins import extra_hint
from ...features.table.kernel_graph import graph_schema_hash
from ..core.kernel_table import KernelGraphs, KernelTable
from ..core.store import check_schema
from .base import Network, NetworkParams, NeuralEstimator, Weights
from .batches import GraphRows, Scaling, TableRows


class MLPEstimator(NeuralEstimator):
    """Dense layers on the standardized features, in Flax."""

    name = "mlp"

    def _rows(self, table: KernelTable, target: np.ndarray | None = None) -> TableRows:
        y = np.zeros(len(table), np.float32) if target is None else target
        return TableRows(self._scaled(table), y)

    def _network(self, weights: Weights | None = None) -> Network:
        from .flax_nets import FlaxNetwork, Perceptron

        p = self.params
        example = np.zeros((1, self._known(self.inputs).width), np.float32)
        return FlaxNetwork(Perceptron(p.hidden, p.layers), example, p, self.bound, weights)


@dataclass(frozen=True)
class GraphParams(NetworkParams):
    """Parameters of a graph network.

    Attributes:
        rounds: Rounds of message passing, the number of edges that information travels.
        head: Width of the perceptron after it.
    """

    hidden: int = 64
    rounds: int = 2
    head: int = 192
    stop_epochs: int = 8


class GraphEstimator(NeuralEstimator):
    """A network on the kernel's computation graph and its row of the feature table.

    The graph is the same on every device; the row describes the device and the kernel as a whole.
    Therefore the graph is embedded once, and a perceptron combines the two.
    """

    keywords = GraphParams
    params: GraphParams
    needs_graphs: ClassVar[bool] = True

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self.nodes: Scaling | None = None

    def _look_at(self, table: KernelTable) -> None:
        super()._look_at(table)
        graphs = self._graphs(table)
        # Each graph once, however many rows have it; graphs of other rows do not count.
        self.nodes = Scaling.fit(graphs.packed.take(np.unique(graphs.index)).features)

    def _rows(self, table: KernelTable, target: np.ndarray | None = None) -> GraphRows:
        """The table in the form of a network's input; missing targets are zero."""
        graphs = self._graphs(table)
        y = np.zeros(len(table), np.float32) if target is None else target
        nodes = self._known(self.nodes)
        return GraphRows(graphs.packed, graphs.index, self._scaled(table), y, nodes)

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
    functions.
    """

    name = "gnn-flax"

    def _network(self, weights: Weights | None = None) -> Network:
        from .flax_nets import FlaxGraphNet, FlaxNetwork, example_batch

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        layers = FlaxGraphNet(p.hidden, p.rounds, p.head, p.layers)
        return FlaxNetwork(layers, example_batch(inputs.width, nodes.width), p, self.bound, weights)


@dataclass(frozen=True)
class PygParams(GraphParams):
    """Parameters of the graph network in PyTorch.

    Attributes:
        n_jobs: Threads.
    """

    n_jobs: int = 1


class PygGraphEstimator(GraphEstimator):
    """Message passing in PyTorch Geometric, for users of PyTorch.

    Network, batches, target and loss are the same as in ``gnn-flax``, which trains faster on a CPU
    (docs/models.md).

    Args:
        params: Fields of :class:`PygParams`.

    Raises:
        ModelError: PyTorch or PyTorch Geometric is not installed.
    """

    name = "gnn-pyg"

    keywords = PygParams
    params: PygParams

    def __init__(self, **params: object) -> None:
        # Checked without importing, which takes seconds.
        missing = [name for name in ("torch", "torch_geometric") if find_spec(name) is None]
        if missing:
            raise ModelError(
                f"estimator 'gnn-pyg' needs {' and '.join(missing)}",
                hint=f"{extra_hint('gnn')}, or take gnn-flax",
            )
        super().__init__(**params)

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        with self._threads():
            super()._fit(table, target, groups)

    def _ratio(self, table: KernelTable) -> np.ndarray:
        with self._threads():
            return super()._ratio(table)

    def _network(self, weights: Weights | None = None) -> Network:
        from .pyg_net import PygGraphNet, PygNetwork, seeded

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        with seeded(p.seed):
            layers = PygGraphNet(inputs.width, nodes.width, p.hidden, p.rounds, p.head, p.layers)
        return PygNetwork(layers, self.bound, p.delta, p.weight_decay, weights)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use :attr:`n_jobs` threads, and restore the number afterwards."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.params.n_jobs)
        try:
            yield
        finally:
            torch.set_num_threads(before)
