"""Inputs of networks: standardized, in batches of few sizes so that compiled code is reused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from ..core.kernel_table import PackedGraphs

#: Most nodes of a batch of several graphs, which bounds the memory of its activations (4 MB per
#: layer at 64 floats per node). Engineering estimate.
MAX_NODES = 16_384

#: Largest range of a column in standard units, so that a rare flag does not become a value in the
#: hundreds. Engineering estimate: a normal column spans about as much.
SPAN = 8.0
#: Distance in standard units beyond the training range at which values are clipped: far outside,
#: a prediction keeps its value at the edge (docs/models.md). Engineering estimate.
MARGIN = 0.5
#: Numbers of columns are rounded up to a multiple of this, so that the folds of a dataset, in which
#: different columns vary, have equal widths and share compiled functions.
ALIGN = 32


@dataclass(frozen=True, slots=True)
class Scaling:
    """Standardizes the columns that vary, and clips values near the training range.

    Attributes:
        columns: Columns that vary in training, int32, shape ``(c,)``; the others are dropped.
        centre: Their means, float32, shape ``(c,)``.
        scale: Their standard deviations, or their range over :data:`SPAN` if that is larger.
        low: Lower clipping limit.
        high: Upper clipping limit.
    """

    columns: np.ndarray
    centre: np.ndarray
    scale: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> Self:
        """Learn from training values, shape ``(n, d)`` with ``n`` and ``d`` at least 1."""
        low, high = values.min(axis=0), values.max(axis=0)
        varying = low < high
        columns = np.flatnonzero(varying) if varying.any() else np.zeros(1, np.int64)
        own = values[:, columns].astype(np.float64)
        low, high = low[columns].astype(np.float64), high[columns].astype(np.float64)
        scale = np.maximum(own.std(axis=0), (high - low) / SPAN)
        low, high = low - MARGIN * scale, high + MARGIN * scale
        parts = own.mean(axis=0), np.where(scale > 0, scale, 1.0), low, high
        return cls(columns.astype(np.int32), *(part.astype(np.float32) for part in parts))

    @property
    def width(self) -> int:
        """Number of output columns: ``c``, rounded up."""
        return -(-len(self.columns) // ALIGN) * ALIGN

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Standardized values, float32, shape ``(n, width)``; added columns are zero.

        NaN counts as the mean.
        """
        own = np.take(values, self.columns, axis=1)
        scaled = (np.clip(own, self.low, self.high) - self.centre) / self.scale
        standardised = np.zeros((len(values), self.width), np.float32)
        standardised[:, : len(self.columns)] = np.nan_to_num(scaled, copy=False)
        return standardised

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """The fields as named arrays."""
        return {f"{prefix}/{name}": getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> Self:
        """Restore from the arrays of :meth:`to_arrays`.

        Raises:
            KeyError: An array is missing.
        """
        return cls(*(arrays[f"{prefix}/{name}"] for name in cls.__slots__))


class GraphBatch(NamedTuple):
    """``rows`` kernels with their graphs, padded to ``n`` nodes and as many edges.

    Padding edges run from the last node, which is padding, to itself; padding nodes and rows belong
    to the last graph, which is padding as well.

    Attributes:
        opcode: int32, shape ``(n,)``.
        features: Standardized node features, float32, shape ``(n, f)``.
        source: Producers, int32, shape ``(n,)``.
        target: Users, int32, shape ``(n,)``.
        graph: Graph of every node, int32, shape ``(n,)``.
        graph_of_row: int32, shape ``(rows,)``; rows with the same kernel share a graph.
        x: Standardized features of the kernels, float32, shape ``(rows, c)``.
        y: Log-ratios, float32, shape ``(rows,)``; zero if there are none.
        weight: 1 for a kernel and 0 for padding, float32, shape ``(rows,)``.
    """

    opcode: np.ndarray
    features: np.ndarray
    source: np.ndarray
    target: np.ndarray
    graph: np.ndarray
    graph_of_row: np.ndarray
    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray


class TableBatch(NamedTuple):
    """``rows`` kernels, padded.

    Attributes:
        x: Standardized features, float32, shape ``(rows, c)``.
        y: Log-ratios, float32, shape ``(rows,)``; zero if there are none.
        weight: 1 for a kernel and 0 for padding, float32, shape ``(rows,)``.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray


class TableRows(NamedTuple):
    """Kernels before batching: ``x`` and ``y`` of :class:`TableBatch`."""

    x: np.ndarray
    y: np.ndarray

    def take(self, rows: np.ndarray) -> TableRows:
        """The given rows, by position or mask."""
        return TableRows(self.x[rows], self.y[rows])

    def batches(self, most: int) -> Iterator[TableBatch]:
        """All rows in order, at most ``most`` per batch."""
        for start in range(0, len(self.y), most):
            x, y = self.x[start : start + most], self.y[start : start + most]
            # A power of two of rows: a handful of compiled shapes for any number.
            columns = (x, y, np.ones(len(y), np.float32))
            yield TableBatch(*(_padded(own, row_bucket(len(y), most), 0) for own in columns))

    def training_batches(self, order: np.ndarray) -> Iterator[tuple[int, TableBatch]]:
        """Batches of the rows of every step, with the number of the step."""
        for step, at in enumerate(order):
            yield step, TableBatch(self.x[at], self.y[at], np.ones(len(at), np.float32))


class GraphRows(NamedTuple):
    """Kernels before batching.

    Attributes:
        packed: Distinct graphs.
        graph: Graph of every row, shape ``(rows,)``.
        x: Standardized features, float32, shape ``(rows, c)``.
        y: Log-ratios, float32, shape ``(rows,)``.
        nodes: Scaling of the node features.
    """

    packed: PackedGraphs
    graph: np.ndarray
    x: np.ndarray
    y: np.ndarray
    nodes: Scaling

    def take(self, rows: np.ndarray) -> GraphRows:
        """The given rows, by position or mask."""
        return self._replace(graph=self.graph[rows], x=self.x[rows], y=self.y[rows])

    def batches(self, most: int) -> Iterator[GraphBatch]:
        """All rows in order, at most ``most`` per batch."""
        for start, stop in cuts(self.packed.nodes[self.graph], most):
            part = self.take(np.arange(start, stop))
            yield assemble(part, row_bucket(stop - start, most))

    def training_batches(self, order: np.ndarray) -> Iterator[tuple[int, GraphBatch]]:
        """Batches of equal size, so that one compiled step serves nearly all of them.

        Args:
            order: Rows of every step, shape ``(steps, rows)``.

        Yields:
            Number of the step, and its batch; several batches if the graphs are very large.
        """
        nodes = self.packed.nodes[self.graph]
        rows = order.shape[1]
        # Mean plus two standard deviations of a batch's nodes: nearly all batches fit, and larger
        # ones are padded further.
        usual = min(MAX_NODES, int(nodes.mean() * rows + 2 * nodes.std() * rows**0.5))
        for step, at in enumerate(order):
            for start, stop in cuts(nodes[at], rows):
                yield step, assemble(self.take(at[start:stop]), rows, usual)


def node_bucket(size: int) -> int:
    """The size, rounded up by at most a quarter to one of four sizes per octave."""
    # Steps of an eighth of the next power of two.
    step = max(8, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def row_bucket(rows: int, most: int) -> int:
    """The number of rows, rounded up to a power of two, but not past ``most``."""
    return min(most, 1 << max(3, (rows - 1).bit_length()))


def cuts(nodes: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows into batches of at most ``most`` rows and :data:`MAX_NODES` nodes.

    Args:
        nodes: Nodes of each row's graph, shape ``(rows,)``.
        most: Rows per batch.

    Yields:
        First row, and the row after the last. A larger graph is a separate batch.
    """
    start, held = 0, 0
    for row, size in enumerate(nodes.tolist()):
        if row > start and (row - start >= most or held + size > MAX_NODES):
            yield start, row
            start, held = row, 0
        held += size
    if start < len(nodes):
        yield start, len(nodes)


def assemble(part: GraphRows, rows: int, least: int = 0) -> GraphBatch:
    """Assemble one batch, padded to ``rows`` rows and to a size of :func:`node_bucket` nodes.

    Args:
        part: The rows of the batch.
        rows: Number of rows after padding.
        least: Least number of nodes after padding.
    """
    # Rows with the same kernel (on other devices, or measured again) share one graph.
    unique, graph_of_row = np.unique(part.graph, return_inverse=True)
    graphs = part.packed.take(unique)
    n, m, real = len(graphs.opcode), graphs.edges.shape[1], len(part.graph)
    # One extra node: padding edges need a node outside all real graphs.
    size = node_bucket(max(n + 1, m, least))
    features = part.nodes(graphs.features)
    return GraphBatch(
        opcode=_padded(graphs.opcode, size, 0),
        features=_padded(features, size, 0),
        source=_padded(graphs.edges[0], size, size - 1),
        target=_padded(graphs.edges[1], size, size - 1),
        graph=_padded(graphs.graph_of_node, size, rows),
        graph_of_row=_padded(graph_of_row, rows, rows),
        x=_padded(part.x, rows, 0),
        y=_padded(part.y, rows, 0),
        weight=_padded(np.ones(real, np.float32), rows, 0),
    )


def _padded(values: np.ndarray, size: int, value: int) -> np.ndarray:
    """Values padded at the end to ``size`` rows, as float32 or int32."""
    kind = np.float32 if values.dtype.kind == "f" else np.int32
    padded = np.full((size, *values.shape[1:]), value, kind)
    padded[: len(values)] = values
    return padded
