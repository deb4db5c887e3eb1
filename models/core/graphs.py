"""Graphs that accompany a feature table: built on first use, and once for equal kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...features.kernels.kernel import Kernel

if TYPE_CHECKING:
    from ...features.table.kernel_graph import KernelGraph

#: Kernel texts parsed at a time. Parsed kernels take far more memory than their graphs, which alone
#: are kept. Engineering estimate.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class PackedGraphs:
    """``g`` graphs one after the other, ``n`` nodes and ``m`` edges in all.

    Attributes:
        opcode: As :attr:`KernelGraph.node_opcode`, int32, shape ``(n,)``.
        features: As :attr:`KernelGraph.node_features`, float32, shape ``(n, f)``.
        edges: Producer and user of every use by position among all nodes, int32, ``(2, m)``.
        nodes: Nodes of each graph, int64, shape ``(g,)``.
        uses: Edges of each graph, int64, shape ``(g,)``.
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
        # Edges hold positions among all nodes, so they move with their graph.
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
    """Graphs of the rows of a table, each kept once however many rows have its kernel.

    Attributes:
        store: The graphs.
        index: Position in the store of every row, int64, shape ``(rows,)``.
    """

    store: GraphStore
    index: np.ndarray

    @classmethod
    def of(
        cls, hashes: Sequence[str], sources: Sequence[Kernel | str | KernelGraph]
    ) -> KernelGraphs:
        """Graphs of rows given by kernel hash and source; nothing is read yet."""
        by_hash = dict(zip(hashes, sources, strict=True))
        place = {digest: at for at, digest in enumerate(by_hash)}
        return cls(GraphStore(by_hash), np.array([place[digest] for digest in hashes], np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.index)

    @property
    def packed(self) -> PackedGraphs:
        """The graphs that :attr:`index` points into."""
        return self.store.packed

    def take(self, rows: np.ndarray) -> KernelGraphs:
        """The given rows, by position or mask, from the same store."""
        return KernelGraphs(self.store, self.index[rows])

    @staticmethod
    def concatenate(parts: Sequence[KernelGraphs]) -> KernelGraphs:
        """The rows of all parts, one after the other."""
        first = parts[0]
        # Parts of one table: nothing to merge, and graphs that were built already are kept.
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
    """``starts[i], starts[i] + 1, …`` for ``lengths[i]`` values each, one after the other."""
    first = np.repeat(starts - _starts(lengths), lengths)
    return np.asarray(first + np.arange(lengths.sum()))
