"""Dataflow graphs to rewrite: a program with its calls inlined, as nodes with their operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from ....common.types import JsonObject
from ...cost.library_calls import is_annotation
from ...ir.op_table import named
from ...ir.program import Computation, Op, Program, Source, TensorType

#: Ops that only name their operand; they vanish when a program becomes a graph. Copies do, too: the
#: compiler puts in its own where a buffer is written to (loops.py, epilogues.py).
_NAMES = named("names")
#: Ops that run whether or not their result is read. Custom calls are kept in any case: the readers
#: drop the attribute for side effects.
_EFFECTS = frozenset(("infeed", "outfeed", "send", "recv", "custom-call"))

#: Ops behind which values are new ones to the compiler: it joins nothing across them.
_BARRIERS = frozenset(("opt-barrier", "optimization-barrier"))


@dataclass(slots=True, eq=False)
class Node:
    """One op of a graph; compared by identity.

    Attributes:
        opcode: HLO opcode.
        operands: Nodes whose values it reads.
        results: Leaf types of its result.
        attrs: As in :class:`opcast.features.ir.program.Op`.
        called: Names of computations of the program (reducers, comparators).
        graphs: Bodies of a loop or branches: their own graphs.
        is_tuple: Whether the result is a tuple, read through ``get-tuple-element``.
        sources: StableHLO ops that it came from.
    """

    opcode: str
    operands: list[Node] = field(default_factory=list)
    results: tuple[TensorType, ...] = ()
    attrs: JsonObject = field(default_factory=dict)
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


#: Opcode, operands, result types, called computations and attributes of a node. Nodes with equal
#: keys have equal values.
Key = tuple[str, tuple[Node, ...], tuple[TensorType, ...], tuple[str, ...], Hashable]


@dataclass(slots=True, eq=False)
class Graph:
    """A computation that runs kernels: the entry, a loop's body or condition, a branch.

    Attributes:
        parameters: Its parameters in order.
        outputs: What it returns, one node an element.
        effects: Nodes that run though nobody reads them: transfers, calls with side effects.
        simplified: What distinguishes each node to which no rule of ``simplify`` applied.
    """

    parameters: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    effects: list[Node] = field(default_factory=list)
    simplified: dict[Node, Key] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """List the nodes that outputs and effects need, operands first; all parameters included."""
        return topological([*self.outputs, *self.effects], self.parameters)


Value = Node | list["Value"]
#: Places of a tuple's leaves, as nested as the tuple.
Structure = int | list["Structure"]


def topological(roots: Iterable[Node], first: Sequence[Node] = ()) -> list[Node]:
    """Order the nodes that ``roots`` depend on, operands before users, ``first`` at the front."""
    order = dict.fromkeys(first)
    begun: set[Node] = set()
    for root in roots:
        # With an explicit stack: chains of ops exceed Python's recursion limit.
        stack = [root]
        while stack:
            node = stack[-1]
            if node not in order:
                if node not in begun:
                    missing = [operand for operand in node.operands if operand not in order]
                    if missing:
                        begun.add(node)
                        stack += missing[::-1]
                        continue
                # What was missing stood above it on the stack.
                order[node] = None
            stack.pop()
    return list(order)


def users_of(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Return the users of each node by its ``id``, each user once."""
    users: dict[int, list[Node]] = {}
    for node in nodes:
        users.setdefault(id(node), [])
        for operand in dict.fromkeys(node.operands):
            users.setdefault(id(operand), []).append(node)
    return users


def rewrite(graph: Graph, rule: Callable[[Node], Node | None]) -> None:
    """Replace nodes, operands first, by what a rule makes of them; ``None`` keeps a node."""
    replaced: dict[Node, Node] = {}
    for node in graph.nodes():
        if replaced:
            node.operands = [replaced.get(o, o) for o in node.operands]
        made = rule(node)
        if made is not None:
            replaced[node] = made
    graph.outputs = [replaced.get(node, node) for node in graph.outputs]


def rewrite_all(graph: Graph, rule: Callable[[Node], Node | None]) -> None:
    """As :func:`rewrite`, in loops and branches too, before what they are in."""

    def inside(node: Node) -> Node | None:
        for inner in node.graphs:
            rewrite_all(inner, rule)
        return rule(node)

    rewrite(graph, inside)


def build_graph(program: Program) -> Graph:
    """Turn the entry of a program, HLO that is not optimised, into a graph, with calls inlined.

    Bodies of loops and branches take one parameter for each array of what they are given, as
    StableHLO's do. HLO's take one tuple, and each branch its own; that is taken apart here.
    """
    graph = _Builder(program).graph(program.entry_computation)
    sink_constants(graph)
    return graph


def constant(value: object, like: TensorType) -> Node:
    """A constant node."""
    return Node("constant", [], (like,), {"value": value})


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects: list[Node] = []
        self._names: dict[Hashable, str] = {}  # of computations, by what they compute

    def graph(self, comp: Computation) -> Graph:
        """Build the entry as a separate graph."""
        parameters = [
            Node("parameter", [], op.results, {**op.attrs, "index": index}, is_tuple=op.is_tuple)
            for index, op in enumerate(comp.parameters)
        ]
        return self._graph(comp, parameters, list(parameters))

    def _graph(self, comp: Computation, parameters: list[Node], arguments: list[Value]) -> Graph:
        # Effects belong to the graph that they occur in.
        outside, self.effects = self.effects, []
        value = self._inline(comp, arguments)
        effects, self.effects = self.effects, outside
        return Graph(parameters, flatten(value), effects)

    def _inline(self, comp: Computation, arguments: list[Value]) -> Value:
        """Make nodes for a computation's ops, and return its root's value."""
        values: list[Value] = []
        for op in comp.ops:
            values.append(self._visit(op, values, arguments))
        return values[comp.root]

    def _visit(self, op: Op, values: list[Value], arguments: list[Value]) -> Value:
        opcode = op.opcode
        if opcode == "parameter":
            return _local(arguments[int(op.attrs["index"])], op)
        inputs = [values[i] for i in op.operands]
        if opcode in ("tuple", "add-dependency"):
            return inputs if opcode == "tuple" else inputs[0]
        if opcode == "get-tuple-element":
            return _element(inputs[0], op)
        if opcode in _BARRIERS:
            return _barrier(inputs, op)
        if opcode in _NAMES or (opcode == "custom-call" and is_annotation(op)):
            return inputs[0] if len(inputs) == 1 else inputs
        if opcode == "call" and op.called:
            return self._inline(self.program.computations[op.called[0]], inputs)
        if opcode in ("while", "conditional") and op.called:
            return self._control(op, inputs)
        nodes = [node for value in inputs for node in flatten(value)]
        own = tuple([self._name(name) for name in op.called])
        made = Node(opcode, nodes, op.results, dict(op.attrs), own, [], op.is_tuple, op.source)
        if opcode in _EFFECTS:
            self.effects.append(made)
        return made

    def _name(self, name: str) -> str:
        """Name of the first computation that is equal, so that equal ops can be merged."""
        own = self.program.computations[name]
        ops = [(o.opcode, o.operands, o.results, repr(o.attrs), o.called) for o in own.ops]
        return self._names.setdefault((*ops, own.root), name)

    def _control(self, op: Op, inputs: list[Value]) -> Value:
        """Build a loop or conditional, whose bodies get every array handed to any of them."""
        # A conditional's first operand chooses the branch and is not handed on.
        test = [] if op.opcode == "while" else flatten(inputs[0])
        given = [split(value) for value in inputs[len(test) :]]
        bodies = [self.program.computations[name] for name in op.called]
        # HLO hands each branch its own operand; otherwise every branch gets all of them.
        apart = op.opcode == "conditional" and self.program.dialect == "hlo"
        graphs = [self._body(b, given, place if apart else -1) for place, b in enumerate(bodies)]
        nodes = [*test, *(node for value in given for node in flatten(value))]
        attrs = {key: value for key, value in op.attrs.items() if key != "nesting"}
        node = Node(op.opcode, nodes, op.results, attrs, (), graphs, True, op.source)
        if not op.is_tuple:
            return element(node, 0)
        return _arranged([element(node, i) for i in range(len(op.results))], _structure(op))

    def _body(self, comp: Computation, given: list[Value], branch: int) -> Graph:
        """Build the body of a loop or branch, with a parameter for each array that is given."""
        parameters: list[Node] = []
        arguments = [_parameters(value, parameters) for value in given]
        if branch >= 0:
            arguments = arguments[branch : branch + 1]
        graph = self._graph(comp, parameters, arguments)
        graph.outputs = [leaf for node in graph.outputs for leaf in flatten(split(node))]
        return graph


def _local(value: Value, parameter: Op) -> Value:
    """The value that a body is given, in the shape that the body declares.

    A manual computation (``shard_map``) is given whole arrays and works on its device's part: an
    argument of the program is that part from the start.
    """
    if (
        isinstance(value, Node)
        and value.opcode == "parameter"
        and not (value.is_tuple or parameter.is_tuple)
        and value.type.shape != parameter.type.shape
    ):
        value.results = parameter.results
    return value


def sink_constants(graph: Graph) -> None:
    """Copy constants into the loops and branches that only read them, however deep.

    Compilers do so, and captured values of StableHLO are elements of HLO's state of loops.
    """
    for node in graph.nodes():
        # Operand 0 of a conditional is its predicate, which no branch receives.
        shift = 1 if node.opcode == "conditional" else 0
        for inner in node.graphs:
            known = {
                id(parameter): operand
                for i, parameter in enumerate(inner.parameters)
                if (operand := node.operands[i + shift]).opcode == "constant"
                and (node.opcode != "while" or _is_kept(node, i))
            }
            _replace_parameters(inner, known)
        for inner in node.graphs:
            sink_constants(inner)


def _is_kept(loop: Node, index: int) -> bool:
    """Return whether no iteration changes an element of a loop's state."""
    body = loop.graphs[1]
    return index >= len(body.outputs) or body.outputs[index] is body.parameters[index]


def _replace_parameters(graph: Graph, known: dict[int, Node]) -> None:
    """Let a graph read copies of constants instead of parameters; what it hands on stays."""
    if not known:
        return
    copies = {
        key: Node("constant", [], given.results, dict(given.attrs), source=given.source)
        for key, given in known.items()
    }
    for node in graph.nodes():
        node.operands = [copies.get(id(operand), operand) for operand in node.operands]
    own = dict(enumerate(graph.parameters))
    graph.outputs = [
        node if own.get(i) is node else copies.get(id(node), node)
        for i, node in enumerate(graph.outputs)
    ]


def _parameters(value: Value, made: list[Node]) -> Value:
    """Make parameters like a value's arrays, in its structure; each is added to ``made``."""
    if isinstance(value, Node):
        node = Node("parameter", [], value.results, {"index": len(made)})
        made.append(node)
        return node
    return [_parameters(item, made) for item in value]


def split(value: Value) -> Value:
    """Split a value's tuples: of a node with several results, into elements in their structure."""
    if not isinstance(value, Node):
        return [split(item) for item in value]
    return _elements(value, _structure(value)) if value.is_tuple else value


def _elements(node: Node, structure: Structure) -> Value:
    """Read the elements of a tuple, one level after the other."""
    if isinstance(structure, int):
        return node
    first = _leaves(structure)[0] if _leaves(structure) else 0
    values: list[Value] = []
    for i, part in enumerate(structure):
        types = tuple(node.results[leaf - first] for leaf in _leaves(part))
        inner = Node("get-tuple-element", [node], types, {"index": i}, source=node.source)
        inner.is_tuple = not isinstance(part, int)
        values.append(_elements(inner, part))
    return values


def _structure(what: Op | Node) -> Structure:
    """Return the places of a tuple's leaves among its results, as nested as its type."""
    stack: list[list[Structure]] = [[]]
    leaves = 0
    # Nesting is written as "(*(*))": a star for each leaf (ir/hlo_attributes.py: read_type).
    for mark in what.attrs.get("nesting") or f"({'*' * len(what.results)})":
        if mark == "(":
            stack.append([])
        elif mark == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(leaves)
            leaves += 1
    return stack[0][0]


def _leaves(structure: Structure) -> list[int]:
    if isinstance(structure, int):
        return [structure]
    return [leaf for part in structure for leaf in _leaves(part)]


def _arranged(nodes: list[Node], structure: Structure) -> Value:
    """Arrange nodes in a structure that names each by its place."""
    if isinstance(structure, int):
        return nodes[structure]
    return [_arranged(nodes, part) for part in structure]


def element(node: Node, index: int) -> Node:
    """Make a ``get-tuple-element`` node."""
    return Node(
        "get-tuple-element", [node], (node.results[index],), {"index": index}, source=node.source
    )


def flatten(value: Value) -> list[Node]:
    """List the nodes of a value, of every element if it is a tuple."""
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in flatten(item)]


def _barrier(inputs: list[Value], op: Op) -> Value:
    """Make values anew that come once all operands are there (``jax.checkpoint`` computes so)."""
    given = split(inputs[0] if len(inputs) == 1 else inputs)
    leaves = flatten(given)
    types = tuple(leaf.type for leaf in leaves)
    whole = isinstance(given, list)
    node = Node("opt-barrier", leaves, types, is_tuple=whole, source=op.source)
    return _like(given, [element(node, i) for i in range(len(leaves))]) if whole else node


def _like(value: Value, leaves: list[Node]) -> Value:
    """Arrange leaves, which are taken from the front, as nested as a value."""
    if isinstance(value, Node):
        return leaves.pop(0)
    return [_like(item, leaves) for item in value]


def _element(value: Value, op: Op) -> Value:
    if isinstance(value, list):
        return value[int(op.attrs["index"])]
    return Node("get-tuple-element", [value], op.results, dict(op.attrs), (), [], op.is_tuple)
