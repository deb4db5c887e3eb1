"""Clusters: sets of nodes that one kernel computes, and the rules for fusing nodes into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import NamedTuple

from ...ir.op_table import PLACED, UPDATES, named
from .folding import is_elementwise
from .graph import Graph, Node
from .layouts import MOVES, is_strided, keeps_lanes

#: Ops that run on the matrix units.
PRODUCTS = frozenset(("dot", "convolution"))
#: Ops that combine elements with a binary computation, starting from an initial value.
FOLDS = frozenset(("reduce", "reduce-window"))
#: Maximum number of operands and results of a kernel (XLA's MaxOperandsAndOutputsPerFusion).
MAX_OPERANDS = 96
#: Ops that need no kernel.
FREE = named("no_fused_kernel")
_VIEWS = frozenset(("reshape", "bitcast"))
#: Threads per warp, and shortest column that XLA's column emitter accepts; both limits come from
#: IsUnnestedReductionFasterThanElemental in XLA's reduction_utils.cc (which also keeps columns of
#: up to 256 elements in loops if there are very few adjacent columns).
_WARP = 32
_SMALL_COLUMN = 32


class Shape(Enum):
    """Memory access pattern of a reduction."""

    ROW = "row"
    """Sums contiguous elements."""
    COLUMN = "column"
    """Sums strided elements and keeps the dimensions inside them."""
    SCATTERED = "scattered"
    """Neither of the two: kept and summed dimensions alternate."""


class Reduction(NamedTuple):
    """A reduction, with adjacent dimensions that are all kept or all summed collapsed into one.

    Attributes:
        shape: Memory access pattern.
        major: Number of kept elements outside the summed ones; for rows, of outer summed batches.
        length: Number of elements summed contiguously (rows) or at one stride (columns).
        minor: Number of kept elements inside the summed ones; 1 for rows.
    """

    shape: Shape
    major: int
    length: int
    minor: int


def is_free(node: Node) -> bool:
    """Return whether a node needs no kernel."""
    return node.opcode in FREE and MOVES not in node.attrs


def reduction(node: Node) -> Reduction:
    """Describe the order in which a ``reduce`` accesses its elements in memory."""
    shape = node.operands[0].type.shape
    dims = frozenset(node.attrs.get("dimensions", ()))
    # Collapse adjacent dimensions with the same role; dimensions of size one take no memory.
    groups: list[tuple[bool, int]] = []
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if groups and groups[-1][0] == (d in dims):
            groups[-1] = (groups[-1][0], groups[-1][1] * size)
        else:
            groups.append((d in dims, size))
    kinds = [summed for summed, _ in groups]
    sizes = [size for _, size in groups]
    if kinds in ([], [False]):
        return Reduction(Shape.ROW, prod(sizes), 1, 1)
    if kinds in ([True], [False, True], [True, False, True]):
        major = sizes[0] if len(sizes) == 3 else 1
        return Reduction(Shape.ROW, major, sizes[-1], 1)
    if kinds in ([True, False], [False, True, False]):
        major = sizes[0] if len(sizes) == 3 else 1
        return Reduction(Shape.COLUMN, major, sizes[-2], sizes[-1])
    return Reduction(Shape.SCATTERED, 1, prod(s for k, s in groups if k), 1)


def is_loop_reduction(node: Node) -> bool:
    """Return whether a reduction is short enough for one thread per result to run in a loop."""
    reduced = reduction(node)
    if reduced.shape is Shape.ROW:
        # Short rows whose length is a power of two share a warp in the row emitter. Others run as a
        # loop, and so does an empty sum, which only writes its initial value.
        return reduced.length < _WARP and (reduced.length == 0 or _WARP % reduced.length != 0)
    return reduced.shape is Shape.SCATTERED or reduced.length < _SMALL_COLUMN


def is_loop(node: Node) -> bool:
    """Return whether each thread computes one element, so that the op can be fused anywhere."""
    # Ops with several results would need a multi-output kernel. An update of a slice whose result
    # is only read selects the new or the old value for each element.
    if node.opcode in PLACED or node.opcode == "dynamic-update-slice" or is_elementwise(node):
        return not node.is_tuple
    if node.opcode == "copy":
        return node.type.layout != node.operands[0].type.layout and keeps_lanes(node)
    if node.opcode == "reduce":
        return not node.is_tuple and is_loop_reduction(node)
    return node.opcode == "reduce-window" and not node.is_tuple


def is_consumer(node: Node) -> bool:
    """Return whether producers can be fused into the kernel of this node."""
    return is_loop(node) or node.opcode in UPDATES or node.opcode in FOLDS


def written(node: Node) -> range:
    """Return the indices of the operands that an op updates in place."""
    if node.opcode not in UPDATES:
        return range(0)
    return range((len(node.operands) - 1) // 2 if node.opcode == "scatter" else 1)


def source_of(node: Node) -> Node:
    """Look through reshapes to the node that owns the memory of a value."""
    while node.opcode in _VIEWS and MOVES not in node.attrs:
        node = node.operands[0]
    return node


def is_view(node: Node) -> bool:
    """Return whether a value is an alias of its operand's memory."""
    return source_of(node) is not node


@dataclass(slots=True, eq=False)
class Cluster:
    """The nodes that one kernel computes.

    Attributes:
        roots: Nodes whose values the kernel writes, in topological order.
        members: All nodes that the kernel computes, keyed by their position in the graph.
        library: Whether its kernel is fixed (e.g. a library call) and accepts no further fusions.
        rows: Whether it normalises rows in one pass; it fuses only into readers that work by rows.
        nodes: Its members, operands before users.
        opcodes: Opcodes of its members.
        inputs: Outside nodes whose values it reads, except constants.
        reads: Positions of the inputs.
        makers: Nodes whose kernels compute the inputs.
        last: Position of the last root.
        loops: Whether every member can be computed inside another kernel.
        consumes: Whether producers can be fused into it.
        version: Incremented at every change.
    """

    roots: list[Node]
    members: dict[float, Node] = field(default_factory=dict)
    library: bool = False
    rows: bool = False
    nodes: list[Node] = field(default_factory=list)
    opcodes: frozenset[str] = frozenset()
    inputs: list[Node] = field(default_factory=list)
    reads: frozenset[float] = frozenset()
    makers: list[Node] = field(default_factory=list)
    last: float = 0.0
    loops: bool = False
    consumes: bool = False
    version: int = 0

    @property
    def root(self) -> Node:
        """The first root."""
        return self.roots[0]

    @property
    def multiplies(self) -> bool:
        """Whether it computes a matrix product or convolution."""
        return not PRODUCTS.isdisjoint(self.opcodes)


class Clusters:
    """All kernels of a graph and the reads between them.

    Args:
        graph: The graph; its nodes stay unchanged while clusters are merged.
        fused_products: Whether producers of the operands of a product can be fused into its kernel.
    """

    def __init__(self, graph: Graph, *, fused_products: bool = False) -> None:
        self.graph = graph
        self.fused_products = fused_products
        self.nodes = graph.nodes()
        self.inserted: list[Node] = []
        # Floats, so that `insert` can put a copy between two nodes without renumbering.
        self.position = {id(node): float(i) for i, node in enumerate(self.nodes)}
        self.by_root: dict[int, Cluster] = {}
        # Results of the graph must be written even if other kernels compute them again.
        self.kept: set[int] = {id(source_of(node)) for node in graph.outputs}
        #: Clusters that read the value of a node, keyed by the node's id.
        self.readers: dict[int, dict[int, Cluster]] = {}
        for node in self.nodes:
            if not is_free(node):
                self.add(Cluster([node], {self.position[id(node)]: node}))
            # Elements are views of their tuple: the cluster that makes the tuple must write it.
            elif node.opcode == "get-tuple-element":
                self.kept.add(id(source_of(node.operands[0])))

    def all(self) -> list[Cluster]:
        """List every cluster once, by the position of its last root."""
        distinct = {id(c): c for c in self.by_root.values()}
        return sorted(distinct.values(), key=lambda c: c.last)

    def insert(self, node: Node, before: Node) -> Cluster:
        """Make a cluster for a new node placed just before another node in the order."""
        self.position[id(node)] = self.position[id(before)] - 0.5
        self.inserted.append(node)
        made = Cluster([node], {self.position[id(node)]: node})
        self.add(made)
        return made

    def append(self, node: Node) -> None:
        """Make a cluster for a new node placed after all others."""
        self.position[id(node)] = place = float(len(self.nodes) + len(self.inserted))
        self.inserted.append(node)
        self.add(Cluster([node], {place: node}))

    def add(self, cluster: Cluster) -> None:
        """Register a cluster."""
        self._describe(cluster)
        self._register(cluster)

    def _register(self, cluster: Cluster) -> None:
        for root in cluster.roots:
            self.by_root[id(root)] = cluster
        for node in cluster.inputs:
            self.readers.setdefault(id(node), {})[id(cluster)] = cluster

    def _describe(self, cluster: Cluster) -> None:
        nodes, position = cluster.members.values(), self.position
        cluster.opcodes = frozenset([node.opcode for node in nodes])
        inside = set(nodes)
        inputs: dict[Node, None] = {}
        for node in nodes:
            for operand in node.operands:
                source = source_of(operand)
                # Each kernel that uses a constant embeds it.
                if source not in inside and source.opcode != "constant":
                    inputs[source] = None
        self._read(cluster, inputs)
        # Clusters are ordered by their last root: no reader can be placed before it.
        cluster.last = max([position[id(root)] for root in cluster.roots])
        cluster.loops = not (cluster.library or cluster.rows) and all(map(is_loop, nodes))
        # The TPU compiler computes windows and reads gathered rows only once.
        if self.fused_products and not cluster.opcodes.isdisjoint(("reduce-window", "gather")):
            cluster.loops = False
        cluster.consumes = cluster.loops or (not cluster.library and all(map(self._takes, nodes)))
        # It does not fuse ops that select lanes or rows within tiles, or that reverse them.
        if self.fused_products and any(n.opcode == "reverse" or is_strided(n) for n in nodes):
            cluster.loops = cluster.consumes = False

    def _read(self, cluster: Cluster, inputs: Iterable[Node]) -> None:
        """Set the inputs of a cluster, whose members are already set."""
        position = self.position
        cluster.nodes = [cluster.members[i] for i in sorted(cluster.members)]
        cluster.inputs = list(inputs)
        cluster.reads = frozenset([position[id(node)] for node in cluster.inputs])
        makers = {id(maker): maker for maker in map(owner, cluster.inputs)}
        cluster.makers = [maker for maker in makers.values() if not is_free(maker)]
        cluster.version += 1

    def _takes(self, node: Node) -> bool:
        return is_consumer(node) or (self.fused_products and node.opcode in PRODUCTS)

    def remove(self, cluster: Cluster) -> None:
        """Unregister a cluster."""
        for root in cluster.roots:
            del self.by_root[id(root)]
        for node in cluster.inputs:
            self.readers[id(node)].pop(id(cluster), None)

    def users(self, cluster: Cluster) -> list[Cluster]:
        """Return the clusters that read any of a cluster's results."""
        read_by = self.readers
        if len(cluster.roots) == 1:
            return list(read_by.get(id(cluster.root), {}).values())
        readers: dict[int, Cluster] = {}
        for root in cluster.roots:
            readers.update(read_by.get(id(root), {}))
        return list(readers.values())

    def producers(self, cluster: Cluster) -> list[Cluster]:
        """Return the clusters whose results a cluster reads."""
        makers = {id(c): c for c in [self.by_root.get(id(node)) for node in cluster.makers] if c}
        return list(makers.values())

    def merge(self, first: Cluster, second: Cluster) -> Cluster:
        """Merge two clusters into one with the members and roots of both."""
        self.remove(first)
        self.remove(second)
        members = {**first.members, **second.members}
        roots = sorted([*first.roots, *second.roots], key=lambda n: self.position[id(n)])
        made = Cluster(list(dict.fromkeys(roots)), members)
        self.add(made)
        return made

    def drop_unread(self) -> None:
        """Remove roots that no other kernel reads and that are not results of the graph."""
        for cluster in self.all():
            roots = [n for n in cluster.roots if id(n) in self.kept or self.readers.get(id(n))]
            if roots and len(roots) < len(cluster.roots):
                self.remove(cluster)
                cluster.roots = roots
                self.add(cluster)

    def absorb(
        self, producer: Cluster, consumers: Iterable[Cluster], *, keep: bool = False
    ) -> None:
        """Fuse a producer into each of its consumers; keep its own kernel only if ``keep``."""
        for consumer in consumers:
            self.remove(consumer)
            own, taken = set(consumer.nodes), set(producer.nodes)
            consumer.members.update(producer.members)
            consumer.opcodes |= producer.opcodes
            consumer.loops = consumer.loops and producer.loops
            consumer.consumes = consumer.consumes and producer.consumes
            inputs = [node for node in consumer.inputs if node not in taken]
            inputs += [node for node in producer.inputs if node not in own]
            self._read(consumer, dict.fromkeys(inputs))
            self._register(consumer)
        if not keep:
            self.remove(producer)


def owner(node: Node) -> Node:
    """Return the node whose kernel computes a value: for a tuple element, the tuple."""
    node = source_of(node)
    while node.opcode == "get-tuple-element":
        node = source_of(node.operands[0])
    return node


class Dependences:
    """Transitive dependences between kernels, as bit sets that are updated as kernels are merged.

    Args:
        clusters: Clusters of a graph; from here on only :meth:`merge` may change them.
    """

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        # Keyed by the id of a live cluster: its own bits, and the bits of its dependences.
        self._own = {id(cluster): 1 << i for i, cluster in enumerate(clusters.all())}
        self._needed: dict[int, int] = {}
        for cluster in clusters.all():
            self._find(cluster)

    def _find(self, start: Cluster) -> None:
        # Use an explicit stack: chains of kernels are longer than Python's recursion limit.
        stack = [start]
        while stack:
            cluster = stack[-1]
            if id(cluster) in self._needed:
                stack.pop()
                continue
            makers = [p for p in self._clusters.producers(cluster) if p is not cluster]
            missing = [p for p in makers if id(p) not in self._needed]
            if missing:
                stack += missing
                continue
            needed = 0
            for producer in makers:
                needed |= self._needed[id(producer)] | self._own[id(producer)]
            self._needed[id(cluster)] = needed

    def reaches(self, start: Cluster, target: Cluster) -> bool:
        """Return whether ``start`` depends on ``target``, directly or transitively."""
        return bool(self._needed[id(start)] & self._own[id(target)])

    def put_before(self, first: Cluster, second: Cluster) -> None:
        """Make one cluster, and all that depend on it, wait for another one."""
        own, more = self._own[id(second)], self._own[id(first)] | self._needed[id(first)]
        if self._needed[id(second)] & more == more:
            return
        for key, known in self._needed.items():
            if known & own or key == id(second):
                self._needed[key] = known | more

    def merge(self, first: Cluster, second: Cluster) -> Cluster:
        """Merge two clusters; their readers then depend on the dependences of both."""
        made = self._clusters.merge(first, second)
        own = self._own.pop(id(first)) | self._own.pop(id(second))
        needed = (self._needed.pop(id(first)) | self._needed.pop(id(second))) & ~own
        for key, known in self._needed.items():
            if known & own:
                self._needed[key] = known | needed | own
        self._own[id(made)], self._needed[id(made)] = own, needed
        return made
