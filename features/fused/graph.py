"""Dataflow graphs to rewrite: a program with its calls inlined, nodes that know their operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..cost_library import is_annotation
from ..ir import Computation, Op, Program, Source, TensorType

#: Ops that only name their operand; they vanish when a program becomes a graph.
_NAMES = frozenset(
    ("opt-barrier", "optimization-barrier", "bitcast", "copy", "sdy.sharding_constraint",
     "sdy.reshard", "add-dependency", "domain")
)  # fmt: skip
#: Ops that run whether or not their result is read.
_EFFECTS = frozenset(("infeed", "outfeed", "send", "recv", "custom-call"))


@dataclass(slots=True, eq=False)
class Node:
    """One op of a graph; compared by identity.

    Attributes:
        opcode: HLO opcode.
        operands: Nodes whose values it reads.
        results: Leaf types of its result.
        attrs: As in :class:`opcast.features.ir.Op`.
        called: Names of computations of the program (reducers, comparators).
        graphs: Bodies of a loop or branches: their own graphs.
        is_tuple: Whether the result is a tuple, read through ``get-tuple-element``.
        sources: StableHLO ops that it came from.
    """

    opcode: str
    operands: list[Node] = field(default_factory=list)
    results: tuple[TensorType, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    graphs: list[Graph] = field(default_factory=list)
    is_tuple: bool = False
    source: Source | None = None
    _size: int = field(default=-1, repr=False)

    @property
    def type(self) -> TensorType:
        """Type of the first result."""
        return self.results[0]

    @property
    def size(self) -> int:
        """Elements of the first result."""
        if self._size < 0:
            self._size = prod(self.results[0].shape) if self.results else 0
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(t.nbytes for t in self.results)


@dataclass(slots=True, eq=False)
class Graph:
    """A computation that runs kernels: the entry, a loop's body or condition, a branch.

    Attributes:
        parameters: Its parameters in order.
        outputs: What it returns, one node an element.
        effects: Nodes that run though nobody reads them: transfers, calls with side effects.
    """

    parameters: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    effects: list[Node] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """Nodes that the outputs and effects need, operands first; all parameters included."""
        return topological([*self.outputs, *self.effects], self.parameters)


Value = Node | list["Value"]


def topological(roots: Iterable[Node], first: Sequence[Node] = ()) -> list[Node]:
    """Nodes that ``roots`` depend on, operands before users, ``first`` at the front."""
    order: list[Node] = list(first)
    done = {id(node) for node in first}
    for root in roots:
        if id(root) in done:
            continue
        stack = [(root, iter(root.operands))]
        while stack:
            node, rest = stack[-1]
            for operand in rest:
                if id(operand) not in done:
                    stack.append((operand, iter(operand.operands)))
                    break
            else:
                stack.pop()
                if id(node) not in done:
                    done.add(id(node))
                    order.append(node)
    return order


def users_of(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Users of each node by its ``id``, each user once."""
    users: dict[int, list[Node]] = {}
    for node in nodes:
        users.setdefault(id(node), [])
        for operand in dict.fromkeys(node.operands):
            users.setdefault(id(operand), []).append(node)
    return users


def build_graph(program: Program) -> Graph:
    """The entry of a program as a graph: calls inlined, names of values gone.

    Args:
        program: From StableHLO, or HLO that is not optimised.
    """
    return _Builder(program).graph(program.entry_computation)


def constant(value: Any, like: TensorType) -> Node:
    """A constant node."""
    return Node("constant", [], (like,), {"value": value})


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects: list[Node] = []

    def graph(self, comp: Computation, constants: dict[int, Node] | None = None) -> Graph:
        """A computation of its own; parameters in ``constants`` become copies of those."""
        parameters: list[Node] = []
        arguments: list[Value] = []
        for op in comp.parameters:
            index = len(parameters)
            node = Node("parameter", [], op.results, {"index": index}, is_tuple=op.is_tuple)
            parameters.append(node)
            known = (constants or {}).get(index)
            if known is not None:
                node = Node("constant", [], known.results, dict(known.attrs), source=known.source)
            arguments.append(node)
        outside, self.effects = self.effects, []
        value = self.inline(comp, arguments)
        found, self.effects = self.effects, outside
        return Graph(parameters, flatten(value), found)

    def inline(self, comp: Computation, arguments: list[Value]) -> Value:
        """The value of a computation's root, with nodes for its ops."""
        values: list[Value] = []
        for op in comp.ops:
            values.append(self._visit(op, values, arguments))
        return values[comp.root]

    def _visit(self, op: Op, values: list[Value], arguments: list[Value]) -> Value:
        opcode = op.opcode
        if opcode == "parameter":
            return arguments[int(op.attrs["index"])]
        inputs = [values[i] for i in op.operands]
        if opcode == "tuple":
            return inputs
        if opcode == "get-tuple-element":
            return _element(inputs[0], op)
        if opcode in _NAMES or (opcode == "custom-call" and is_annotation(op)):
            return inputs[0] if len(inputs) == 1 else inputs
        if opcode == "call" and op.called:
            return self.inline(self.program.computations[op.called[0]], inputs)
        if opcode in ("while", "conditional") and op.called:
            return self._control(op, inputs)
        nodes = [node for value in inputs for node in flatten(value)]
        called = op.called
        made = Node(opcode, nodes, op.results, dict(op.attrs), called, [], op.is_tuple, op.source)
        if opcode in _EFFECTS:
            self.effects.append(made)
        return made

    def _control(self, op: Op, inputs: list[Value]) -> Value:
        """A loop or conditional: constants that its bodies capture are sunk into them."""
        nodes = [node for value in inputs for node in flatten(value)]
        state = len(op.results) if op.opcode == "while" else 1
        shift = 0 if op.opcode == "while" else 1
        constants = {
            i - shift: node
            for i, node in enumerate(nodes)
            if i >= state and node.opcode == "constant"
        }
        graphs = [self.graph(self.program.computations[name], constants) for name in op.called]
        node = Node(op.opcode, nodes, op.results, dict(op.attrs), (), graphs, True, op.source)
        if not op.is_tuple:
            return element(node, 0)
        return [element(node, i) for i in range(len(op.results))]


def element(node: Node, index: int) -> Node:
    """A ``get-tuple-element`` node."""
    return Node(
        "get-tuple-element", [node], (node.results[index],), {"index": index}, source=node.source
    )


def flatten(value: Value) -> list[Node]:
    """Nodes of a value, of every element if it is a tuple."""
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in flatten(item)]


def _element(value: Value, op: Op) -> Value:
    if isinstance(value, list):
        return value[int(op.attrs["index"])]
    return Node("get-tuple-element", [value], op.results, dict(op.attrs), (), [], op.is_tuple)
