"""Input of estimators: a feature table of kernels with roofline, kind, platform and graphs.

Graphs are built on first use, once for equal kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import KINDS, Kernel

if TYPE_CHECKING:
    from ...features.table.kernel_graph import KernelGraph

#: Kernel texts parsed at a time. Parsed kernels take far more memory than their graphs, the only
#: part that is kept. Engineering estimate.
_CHUNK = 512
#: Platforms with separate cells, in the order of the cells, which saved models list by name.
PLATFORMS = ("cpu", "gpu", "tpu")
#: Names of the cells (platform × kind), which have separate intervals and domains; the last one is
#: for all other kernels.
CELLS = (*(f"{platform}/{kind}" for platform in PLATFORMS for kind in KINDS), "other")
_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}
#: Shortest time of a kernel in seconds: keeps logarithms finite for any device description.
#: One nanosecond is a few clock cycles, less than any launch.
SMALLEST = 1e-9
#: Fields of :class:`KernelTable` with a value per kernel.
_COLUMNS = ("X", "base_s", "bound", "cell")


@dataclass(frozen=True, slots=True)
class PackedGraphs:
    """``g`` concatenated graphs with ``n`` nodes and ``m`` edges in total.

    Attributes:
        opcode: As :attr:`KernelGraph.node_opcode`, int32, shape ``(n,)``.
        features: As :attr:`KernelGraph.node_features`, float32, shape ``(n, f)``.
        edges: Producer and user of every use by position among all nodes, int32, ``(2, m)``.
        nodes: Number of nodes of each graph, int64, shape ``(g,)``.
        uses: Number of edges of each graph, int64, shape ``(g,)``.
    """

    opcode: np.ndarray
    features: np.ndarray
    edges: np.ndarray
    nodes: np.ndarray
    uses: np.ndarray

    @classmethod
    def pack(cls, graphs: Iterable[KernelGraph]) -> PackedGraphs:
        """Pack at least one graph."""
        parts = list(graphs)
        nodes = np.array([len(g.node_opcode) for g in parts], np.int64)
        uses = np.array([g.edges.shape[1] for g in parts], np.int64)
        edges = np.concatenate([g.edges for g in parts], axis=1)
        return cls(
            opcode=np.concatenate([g.node_opcode for g in parts]),
            features=np.concatenate([g.node_features for g in parts]),
            edges=(edges + np.repeat(_starts(nodes), uses)).astype(np.int32),
            nodes=nodes,
            uses=uses,
        )

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self.nodes)

    def take(self, which: np.ndarray) -> PackedGraphs:
        """The given graphs by position, in that order."""
        nodes, uses = self.nodes[which], self.uses[which]
        node_at = _ranges(_starts(self.nodes)[which], nodes)
        edge_at = _ranges(_starts(self.uses)[which], uses)
        # Edges refer to positions among all nodes, so they move with their graph.
        moved = _starts(nodes) - _starts(self.nodes)[which]
        return PackedGraphs(
            opcode=self.opcode[node_at],
            features=self.features[node_at],
            edges=(self.edges[:, edge_at] + np.repeat(moved, uses)).astype(np.int32),
            nodes=nodes,
            uses=uses,
        )

    @property
    def graph_of_node(self) -> np.ndarray:
        """Graph of every node by position, int64, shape ``(n,)``."""
        return np.repeat(np.arange(len(self)), self.nodes)


class GraphStore:
    """Graphs of distinct kernels, built from their sources on first use.

    Args:
        sources: By kernel hash: the kernel, its text, or its graph.
    """

    def __init__(self, sources: Mapping[str, Kernel | str | KernelGraph]) -> None:
        self.sources = sources

    @cached_property
    def packed(self) -> PackedGraphs:
        """The graphs, in the order of :attr:`sources`."""
        return PackedGraphs.pack(_graphs(self.sources.values()))


@dataclass(frozen=True, slots=True)
class KernelGraphs:
    """Graphs of the rows of a table, stored once per distinct kernel.

    Attributes:
        store: The graphs.
        index: Position of every row's graph in the store, int64, shape ``(rows,)``.
    """

    store: GraphStore
    index: np.ndarray

    @classmethod
    def of(
        cls, hashes: Sequence[str], sources: Sequence[Kernel | str | KernelGraph]
    ) -> KernelGraphs:
        """Graphs of rows given by kernel hash and source; they are built later."""
        by_hash = dict(zip(hashes, sources, strict=True))
        place = {digest: at for at, digest in enumerate(by_hash)}
        return cls(GraphStore(by_hash), np.array([place[digest] for digest in hashes], np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.index)

    @property
    def packed(self) -> PackedGraphs:
        """The graphs that :attr:`index` refers to."""
        return self.store.packed

    def take(self, rows: np.ndarray) -> KernelGraphs:
        """Select rows by position or mask; the store is shared."""
        return KernelGraphs(self.store, self.index[rows])

    @staticmethod
    def concatenate(parts: Sequence[KernelGraphs]) -> KernelGraphs:
        """The rows of all parts, in order."""
        first = parts[0]
        # Parts of one table: nothing to merge, and graphs that were already built are kept.
        if all(part.store is first.store for part in parts):
            return KernelGraphs(first.store, np.concatenate([part.index for part in parts]))
        sources = {h: s for part in parts for h, s in part.store.sources.items()}
        place = {digest: at for at, digest in enumerate(sources)}
        moved = [np.array([place[h] for h in part.store.sources], np.int64) for part in parts]
        index = [to[part.index] for to, part in zip(moved, parts, strict=True)]
        return KernelGraphs(GraphStore(sources), np.concatenate(index))


def _graphs(sources: Iterable[Kernel | str | KernelGraph]) -> Iterator[KernelGraph]:
    from ...features.kernels.extract import kernels_from_irs
    from ...features.table.kernel_graph import kernel_graph

    waiting = list(sources)
    for start in range(0, len(waiting), _CHUNK):
        chunk = waiting[start : start + _CHUNK]
        read = iter(kernels_from_irs([source for source in chunk if isinstance(source, str)]))
        for source in chunk:
            item = next(read) if isinstance(source, str) else source
            yield kernel_graph(item) if isinstance(item, Kernel) else item


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.asarray(np.cumsum(lengths) - lengths)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[i], starts[i] + 1, …`` with ``lengths[i]`` values each, concatenated."""
    first = np.repeat(starts - _starts(lengths), lengths)
    return np.asarray(first + np.arange(lengths.sum()))


@dataclass(slots=True)
class KernelTable:
    """Features of ``n`` kernels, each on its device.

    Attributes:
        X: Features, float32, shape ``(n, d)``.
        names: Names of the features, length ``d``.
        base_s: Reference of the learned ratio in seconds, shape ``(n,)``, positive: roofline plus
            floor, on a TPU the sum of parts of :func:`~opcast.features.table.tpu.tpu_parts`.
        bound: Limiting term of the roofline, shape ``(n,)``.
        cell: Index into :data:`CELLS`, shape ``(n,)``.
        schema: Digest of the feature schema.
        graphs: Computation graphs of the kernels, for estimators that use them; they are built on
            first use.
        line_s: Roofline plus floor in seconds, shape ``(n,)``, if it differs from the base.
    """

    X: np.ndarray
    names: tuple[str, ...]
    base_s: np.ndarray
    bound: np.ndarray
    cell: np.ndarray
    schema: str
    graphs: KernelGraphs | None = None
    line_s: np.ndarray | None = None

    @property
    def roofline_s(self) -> np.ndarray:
        """Roofline plus floor in seconds, shape ``(n,)``."""
        return self.base_s if self.line_s is None else self.line_s

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.X)

    def take(self, rows: np.ndarray) -> KernelTable:
        """The given rows, by position or mask."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        graphs = None if self.graphs is None else self.graphs.take(rows)
        line_s = None if self.line_s is None else self.line_s[rows]
        return replace(self, graphs=graphs, line_s=line_s, **columns)

    def with_names(self, names: tuple[str, ...]) -> KernelTable:
        """The table with the features of a model that was trained on another platform.

        TPU features are appended to the common ones, so that one list is a prefix of the other.

        Args:
            names: Names of the features. Missing ones at the end are zero, additional ones are
                dropped. Unrelated names leave the table unchanged.
        """
        n, width = self.X.shape
        shared = min(width, len(names))
        if width == len(names) or not names or self.names[:shared] != names[:shared]:
            return self
        X = np.zeros((n, len(names)), np.float32)
        X[:, :shared] = self.X[:, :shared]
        return replace(self, X=X, names=names)


def kernel_table(
    kernels: Sequence[Kernel], device: DeviceSpec, *, graphs: bool = False
) -> KernelTable:
    """Feature table of kernels on one device, with their graphs if wanted."""
    from ...features.table.table import feature_table, schema_hash
    from ...features.table.tpu import tpu_feature_table

    is_tpu = device.platform == "tpu"
    features = (tpu_feature_table if is_tpu else feature_table)(kernels, device)
    return KernelTable(
        X=np.ascontiguousarray(features.X, np.float32),
        names=tuple(features.names),
        base_s=np.maximum(features.base_s, SMALLEST),
        bound=np.asarray(features.bound, dtype=object),
        cell=cells([k.kind for k in kernels], device.platform),
        schema=schema_hash(features.names),
        graphs=KernelGraphs.of([k.hash for k in kernels], kernels) if graphs else None,
        line_s=np.maximum(features.roofline_s + device.floor, SMALLEST) if is_tpu else None,
    )


def concatenate(tables: Sequence[KernelTable]) -> KernelTable:
    """Concatenate tables; graphs are kept if all tables have them.

    The widest feature set is used: TPU features are zero for other platforms.
    """
    first = max(tables, key=lambda table: len(table.names))
    tables = [table.with_names(first.names) for table in tables]
    graphs = [t.graphs for t in tables if t.graphs is not None]
    plain = all(t.line_s is None for t in tables)
    joined = replace(
        first,
        graphs=KernelGraphs.concatenate(graphs) if len(graphs) == len(tables) else None,
        line_s=None if plain else np.concatenate([t.roofline_s for t in tables]),
    )
    for name in _COLUMNS:
        setattr(joined, name, np.concatenate([getattr(t, name) for t in tables]))
    return joined


def by_cell(names: Iterable[object], values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Reorder a saved model's rows of cells to the current cells, which grow with new kinds."""
    stored = {str(name): index for index, name in enumerate(names)}
    return np.stack([values[stored[c]] if c in stored else missing for c in CELLS])


def check_cells(names: Iterable[object]) -> None:
    """Check that a saved model has the current cells.

    Raises:
        ValueError: The cells differ.
    """
    if [str(name) for name in names] != list(CELLS):
        raise ValueError("cells of the saved model differ from this version's")


def cells(kinds: Sequence[str], platform: str) -> np.ndarray:
    """Cell of each kernel, int16, shape ``(n,)``."""
    other = len(CELLS) - 1
    if platform not in PLATFORMS:
        return np.full(len(kinds), other, np.int16)
    start = PLATFORMS.index(platform) * len(KINDS)
    known = {kind: start + index for kind, index in _KIND_INDEX.items()}
    return np.fromiter((known.get(k, other) for k in kinds), np.int16, len(kinds))
