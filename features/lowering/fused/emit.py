"""Turn clusters back into a program: fusions, library calls and loops in a valid schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from ....common.errors import LoweringError
from ...ir.program import Computation, Op, Program
from .clusters import Cluster, Clusters, is_consumer, is_view
from .convolutions import REVERSED
from .generated import WIDENED
from .graph import Graph, Node
from .layouts import MOVES
from .loops import copy_carried


class Emitter:
    """Write fused graphs as computations of a scheduled HLO program.

    Args:
        origin: The program that the graphs were built from; its reducers are copied.
    """

    def __init__(self, origin: Program) -> None:
        self.program = Program(
            entry="main",
            dialect="hlo",
            name=origin.name,
            num_replicas=origin.num_replicas,
            num_partitions=origin.num_partitions,
            is_scheduled=True,
            aliases=origin.aliases,
            origin=origin.origin,
        )
        self.origin = origin
        self._count = 0

    def called(self, name: str) -> str:
        """Copy a computation of the original program and return its new name."""
        if name not in self.program.computations:
            source = self.origin.computations[name]
            for op in source.ops:
                for inner in op.called:
                    self.called(inner)
            self.program.computations[name] = source
        return name

    def name(self, base: str) -> str:
        """Return an unused name."""
        self._count += 1
        return f"{base}.{self._count}"

    def add(self, computation: Computation) -> str:
        """Add a computation to the program and return its name."""
        self.program.computations[computation.name] = computation
        return computation.name


class _Writer(ABC):
    """The ops of one computation, and the index of the op that holds the value of each node."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.ops: list[Op] = []
        self.place: dict[int, int] = {}

    @abstractmethod
    def _make(self, node: Node) -> int:
        """Write the op for a value computed by no cluster, and return its index."""

    def _value(self, node: Node) -> int:
        """Return the index of the op with a node's value; write views and constants on demand."""
        known = self.place.get(id(node))
        if known is not None:
            return known
        if is_view(node):
            source = self._value(node.operands[0])
            return self._put(node, Op("", "bitcast", (source,), node.results, source=node.source))
        return self._make(node)

    def _op(self, node: Node) -> Op:
        """Make the op for a node after writing its operands."""
        operands = tuple(self._value(operand) for operand in node.operands)
        called = tuple(self.emitter.called(name) for name in node.called)
        attrs = {k: v for k, v in node.attrs.items() if k not in (REVERSED, MOVES, WIDENED)}
        return Op(
            "", node.opcode, operands, node.results, attrs, called, node.is_tuple, node.source
        )

    def _append(self, op: Op, base: str = "") -> int:
        op.name = self.emitter.name(base or op.opcode)
        self.ops.append(op)
        return len(self.ops) - 1

    def _put(self, node: Node, op: Op) -> int:
        self.place[id(node)] = position = self._append(op)
        return position

    def _tuple(self, nodes: Sequence[Node], places: Iterable[int]) -> int:
        types = tuple(t for node in nodes for t in node.results)
        return self._append(Op("", "tuple", tuple(places), types, is_tuple=True))

    def _computation(self, name: str, roots: Sequence[Node]) -> Computation:
        """Return the computation written so far, with the values of ``roots`` as its result."""
        places = [self._value(node) for node in roots]
        root = places[0] if len(places) == 1 else self._tuple(roots, places)
        return Computation(name, self.ops, root)


class ComputationWriter(_Writer):
    """Write the clusters of one graph as one computation.

    Args:
        emitter: Collects the program.
        clusters: The kernels of the graph.
        bodies: Names of the computations of each loop and conditional, keyed by node id.
        wrapped: Whether single ops become fusions, as compilers write them.
    """

    def __init__(
        self,
        emitter: Emitter,
        clusters: Clusters,
        bodies: dict[int, tuple[str, ...]],
        *,
        wrapped: bool = True,
    ) -> None:
        super().__init__(emitter)
        self.clusters = clusters
        self.bodies = bodies
        self.wrapped = wrapped

    def write(self, name: str, *, one_parameter: bool = False) -> Computation:
        """Write the computation; ``one_parameter`` packs its parameters into one tuple."""
        self._parameters(one_parameter)
        for cluster in self._scheduled():
            self._cluster(cluster)
        return self._computation(name, self.clusters.graph.outputs)

    def _scheduled(self) -> list[Cluster]:
        """Order clusters so that each comes after the clusters that it reads.

        Raises:
            LoweringError: Fusion made two kernels depend on each other.
        """
        done: set[int] = set()
        begun: set[int] = set()
        order: list[Cluster] = []
        for start in self.clusters.all():
            stack = [(start, False)]
            while stack:
                cluster, ready = stack.pop()
                if id(cluster) in done:
                    continue
                if ready:
                    done.add(id(cluster))
                    order.append(cluster)
                    continue
                if id(cluster) in begun:
                    raise LoweringError(
                        f"the fused kernel of {cluster.root.opcode} waits for its own result",
                        where="--lowering fused",
                        hint="--lowering xla, or op",
                    )
                begun.add(id(cluster))
                # Depth first with an explicit stack: producers are written before their readers.
                stack.append((cluster, True))
                # Reversed, since a stack is last in, first out: this keeps the program order.
                waiting = [p for p in self.clusters.producers(cluster) if id(p) not in done]
                stack.extend((p, False) for p in reversed(waiting) if p is not cluster)
        return order

    def _parameters(self, one: bool) -> None:
        parameters = self.clusters.graph.parameters
        if one and parameters:
            types = tuple(t for node in parameters for t in node.results)
            op = Op("", "parameter", (), types, {"index": 0}, is_tuple=True)
            whole = self._append(op, "parameter")
            for i, node in enumerate(parameters):
                self._put(node, Op("", "get-tuple-element", (whole,), node.results, {"index": i}))
            return
        for i, node in enumerate(parameters):
            op = Op("", "parameter", (), node.results, {"index": i}, is_tuple=node.is_tuple)
            self._put(node, op)

    def _make(self, node: Node) -> int:
        op = self._op(node)
        if node.opcode == "get-tuple-element":
            op.source = None
        return self._put(node, op)

    def _cluster(self, cluster: Cluster) -> None:
        members = cluster.nodes
        if len(members) == 1 and not (self.wrapped and is_consumer(members[0])):
            self._single(members[0])
            return
        body = _Fused(self, cluster, members)
        name = self.emitter.add(body.write(self.emitter.name("fused")))
        results = tuple(t for root in cluster.roots for t in root.results)
        op = Op("", "fusion", tuple(body.outside), results, {"kind": _kind(cluster)}, (name,))
        op.is_tuple = len(cluster.roots) > 1
        op.source = cluster.roots[-1].source
        position = self._append(op, _name(cluster))
        if not op.is_tuple:
            self.place[id(cluster.root)] = position
            return
        for i, root in enumerate(cluster.roots):
            self._put(root, Op("", "get-tuple-element", (position,), root.results, {"index": i}))

    def _single(self, node: Node) -> None:
        """Write a node that forms a kernel without a fusion: a product, a sort, a loop."""
        op = self._op(node)
        if id(node) in self.bodies:
            op.called = self.bodies[id(node)]
            if node.opcode == "conditional":
                # HLO passes one operand to each branch: all branches get the same tuple.
                state = self._tuple(node.operands[1:], op.operands[1:])
                op.operands = (op.operands[0], *[state] * len(op.called))
            elif op.attrs.get("trip_count") is not None:
                # A GPU runs a loop with a known trip count without evaluating its condition.
                # XLA:GPU writes this text; extraction reads it (kernels/extract.py:
                # _counted_by_compiler).
                op.attrs["backend_config"] = {"known_init_step": {"init": "0", "step": "1"}}
        self._put(node, op)


def bodies_of(
    graph: Graph, emitter: Emitter, writer: Callable[[Graph, Emitter], ComputationWriter]
) -> dict[int, tuple[str, ...]]:
    """Write the loops and branches of a graph; return their names, keyed by node id."""
    bodies = {}
    for node in graph.nodes():
        names = []
        for place, inner in enumerate(node.graphs):
            body, one = writer(inner, emitter), node.opcode == "conditional"
            if node.opcode == "while" and place:
                copy_carried(body.clusters)
            names.append(emitter.add(body.write(emitter.name("body"), one_parameter=one)))
        if names:
            bodies[id(node)] = tuple(names)
    return bodies


class _Fused(_Writer):
    """The computation inside one fusion."""

    def __init__(self, writer: ComputationWriter, cluster: Cluster, members: list[Node]) -> None:
        super().__init__(writer.emitter)
        self.writer = writer
        self.cluster = cluster
        self.members = members
        self.outside: list[int] = []
        self.parameters: dict[int, int] = {}

    def write(self, name: str) -> Computation:
        """Write the computation."""
        for node in self.members:
            self._put(node, self._op(node))
        return self._computation(name, self.cluster.roots)

    def _make(self, node: Node) -> int:
        """Make a parameter for a value from outside the fusion; its views are written inside."""
        if node.opcode == "constant":
            op = Op("", "constant", (), node.results, node.attrs, source=node.source)
            return self._put(node, op)
        # Keyed by the op outside the fusion, so that a value and its views share a parameter.
        outer = self.writer._value(node)
        parameter = self.parameters.get(outer)
        if parameter is None:
            index = len(self.outside)
            self.outside.append(outer)
            op = Op("", "parameter", (), node.results, {"index": index}, is_tuple=node.is_tuple)
            parameter = self.parameters[outer] = self._append(op)
        self.place[id(node)] = parameter
        return parameter


def _kind(cluster: Cluster) -> str:
    if cluster.library or cluster.rows:
        return "kCustom"
    codes = {root.opcode for root in cluster.roots}
    # XLA's fusion kinds: kLoop kernels compute an element per thread, kInput kernels iterate over
    # their input.
    return "kInput" if codes & {"reduce", "scatter", "transpose"} else "kLoop"


def _name(cluster: Cluster) -> str:
    if len(cluster.members) == 1:
        return f"wrapped_{cluster.root.opcode.replace('-', '_')}"
    base = "input" if _kind(cluster) == "kInput" else "loop"
    if cluster.library:
        base = "library"
    elif cluster.rows:
        base = "rows"
    names = dict.fromkeys(root.opcode.replace("-", "_").replace(".", "_") for root in cluster.roots)
    return f"{base}_{'_'.join(list(names)[:3])}_fusion"
