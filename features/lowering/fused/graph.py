"""Dataflow graphs for rewriting: a program with its calls inlined, as nodes with operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from ....common.types import JsonObject
from ...cost.library_calls import is_annotation
from ...ir.op_table import named
from ...ir.program import Computation, Op, Program, Source, TensorType

#: Ops that only alias their operand; removed when a program becomes a graph. So are copies: the
#: compiler inserts its own where a buffer is overwritten (loops.py, epilogues.py).
_NAMES = named("names")
#: Ops that run even if their result is not read. Custom calls are always kept: the parsers drop the
#: attribute for side effects.
_EFFECTS = frozenset(("infeed", "outfeed", "send", "recv", "custom-call"))

#: Barriers, whose results the compiler treats as new values: it merges nothing across them.
_BARRIERS = frozenset(("opt-barrier", "optimization-barrier"))


@dataclass(slots=True, eq=False)
class Node:
    """One op of a graph; compared by identity.

    Attributes:
        opcode: HLO opcode.
        operands: Nodes whose values it reads.
        results: Leaf types of its result.
        attrs: As in :class:`opcast.features.ir.program.Op`.
        called: Names of the program's computations that it applies (reducers, comparators).
        graphs: Bodies of a loop or the branches of a conditional.
        is_tuple: Whether the result is a tuple, read through ``get-tuple-element``.
        sources: StableHLO ops that it was derived from.
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
        """The type of the first result."""
        return self.results[0]

    @property
    def size(self) -> int:
        """The number of elements of the first result."""
        if self._size < 0:
            self._size = prod(self.results[0].shape) if self.results else 0
        return self._size

    @property
    def nbytes(self) -> int:
        """The number of bytes of all results."""
        return sum(t.nbytes for t in self.results)


#: Opcode, operands, result types, called computations and attributes of a node. Nodes with equal
#: keys have equal values.
Key = tuple[str, tuple[Node, ...], tuple[TensorType, ...], tuple[str, ...], Hashable]


@dataclass(slots=True, eq=False)
class Graph:
    """A computation that runs kernels: the entry, the body or condition of a loop, or a branch.

    Attributes:
        parameters: Its parameters in order.
        outputs: Its results, one node per tuple element.
        effects: Nodes that run even if nothing reads them: transfers, calls with side effects.
        simplified: Key of each node to which no rule of ``simplify`` applied.
    """

    parameters: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    effects: list[Node] = field(default_factory=list)
    simplified: dict[Node, Key] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """List the nodes that outputs and effects need, operands first, and all parameters."""
        return topological([*self.outputs, *self.effects], self.parameters)


Value = Node | list["Value"]
#: Indices of the leaves of a tuple, nested like the tuple.
Structure = int | list["Structure"]


def topological(roots: Iterable[Node], first: Sequence[Node] = ()) -> list[Node]:
    """Sort the nodes that ``roots`` depend on, operands before users, after those in ``first``."""
    order = dict.fromkeys(first)
    begun: set[Node] = set()
    for root in roots:
        # Use an explicit stack: chains of ops exceed Python's recursion limit.
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
                # Its missing operands were above it on the stack.
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
    """Replace each node, operands first, by the result of ``rule``, unless that is ``None``."""
    replaced: dict[Node, Node] = {}
    for node in graph.nodes():
        if replaced:
            node.operands = [replaced.get(o, o) for o in node.operands]
        made = rule(node)
        if made is not None:
            replaced[node] = made
    graph.outputs = [replaced.get(node, node) for node in graph.outputs]


def rewrite_all(graph: Graph, rule: Callable[[Node], Node | None]) -> None:
    """Apply :func:`rewrite` to loops and branches too, before the graph that contains them."""

    def inside(node: Node) -> Node | None:
        for inner in node.graphs:
            rewrite_all(inner, rule)
        return rule(node)

    rewrite(graph, inside)


def build_graph(program: Program) -> Graph:
    """Turn the entry of a program (HLO before optimisation) into a graph, with calls inlined.

    Bodies of loops and branches get one parameter per array, as in StableHLO. In HLO they take one
    tuple, and each branch takes a separate one; these are unpacked here.
    """
    graph = _Builder(program).graph(program.entry_computation)
    sink_constants(graph)
    return graph


def constant(value: object, like: TensorType) -> Node:
    """Make a constant node."""
    return Node("constant", [], (like,), {"value": value})


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects: list[Node] = []
        self._names: dict[Hashable, str] = {}  # names of computations by content

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
        """Make nodes for the ops of a computation, and return the value of its root."""
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
        """Return the name of the first equal computation, so that equal ops can be merged."""
        own = self.program.computations[name]
        ops = [(o.opcode, o.operands, o.results, repr(o.attrs), o.called) for o in own.ops]
        return self._names.setdefault((*ops, own.root), name)

    def _control(self, op: Op, inputs: list[Value]) -> Value:
        """Build a loop or conditional, whose bodies receive every array passed to any of them."""
        # The first operand of a conditional selects the branch and is not passed on.
        test = [] if op.opcode == "while" else flatten(inputs[0])
        given = [split(value) for value in inputs[len(test) :]]
        bodies = [self.program.computations[name] for name in op.called]
        # HLO passes a separate operand to each branch; otherwise every branch receives them all.
        apart = op.opcode == "conditional" and self.program.dialect == "hlo"
        graphs = [self._body(b, given, place if apart else -1) for place, b in enumerate(bodies)]
        nodes = [*test, *(node for value in given for node in flatten(value))]
        attrs = {key: value for key, value in op.attrs.items() if key != "nesting"}
        node = Node(op.opcode, nodes, op.results, attrs, (), graphs, True, op.source)
        if not op.is_tuple:
            return element(node, 0)
        return _arranged([element(node, i) for i in range(len(op.results))], _structure(op))

    def _body(self, comp: Computation, given: list[Value], branch: int) -> Graph:
        """Build the body of a loop or branch, with a parameter for each array passed to it."""
        parameters: list[Node] = []
        arguments = [_parameters(value, parameters) for value in given]
        if branch >= 0:
            arguments = arguments[branch : branch + 1]
        graph = self._graph(comp, parameters, arguments)
        graph.outputs = [leaf for node in graph.outputs for leaf in flatten(split(node))]
        return graph


def _local(value: Value, parameter: Op) -> Value:
    """Return the value passed to a body, with the shape that the body declares.

    A manual computation (``shard_map``) receives whole arrays but works on the shard of its device:
    arguments of the program get the shape of the shard from the start.
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
    """Copy constants into loops and branches that only read them, at any depth.

    Compilers do this too, and values captured in StableHLO are loop state in HLO.
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
    """Return whether no iteration changes an element of the loop state."""
    body = loop.graphs[1]
    return index >= len(body.outputs) or body.outputs[index] is body.parameters[index]


def _replace_parameters(graph: Graph, known: dict[int, Node]) -> None:
    """Replace parameters by copies of constants, except where they are passed through."""
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
    """Make parameters for the arrays of a value, in its structure, and append them to ``made``."""
    if isinstance(value, Node):
        node = Node("parameter", [], value.results, {"index": len(made)})
        made.append(node)
        return node
    return [_parameters(item, made) for item in value]


def split(value: Value) -> Value:
    """Split a value into its arrays: each node with several results becomes its nested elements."""
    if not isinstance(value, Node):
        return [split(item) for item in value]
    return _elements(value, _structure(value)) if value.is_tuple else value


def _elements(node: Node, structure: Structure) -> Value:
    """Read the elements of a tuple, one nesting level at a time."""
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
    """Return the indices of a tuple's leaves among its results, nested like its type."""
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
    """Arrange nodes in a structure that refers to each by its index."""
    if isinstance(structure, int):
        return nodes[structure]
    return [_arranged(nodes, part) for part in structure]


def element(node: Node, index: int) -> Node:
    """Make a ``get-tuple-element`` node."""
    return Node(
        "get-tuple-element", [node], (node.results[index],), {"index": index}, source=node.source
    )


def flatten(value: Value) -> list[Node]:
    """List the nodes of a value, including those of all tuple elements."""
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in flatten(item)]


def _barrier(inputs: list[Value], op: Op) -> Value:
    """Make new values, available once all operands are (``jax.checkpoint`` relies on this)."""
    given = split(inputs[0] if len(inputs) == 1 else inputs)
    leaves = flatten(given)
    types = tuple(leaf.type for leaf in leaves)
    whole = isinstance(given, list)
    node = Node("opt-barrier", leaves, types, is_tuple=whole, source=op.source)
    return _like(given, [element(node, i) for i in range(len(leaves))]) if whole else node


def _like(value: Value, leaves: list[Node]) -> Value:
    """Nest leaves like a value; they are taken from the front of the list."""
    if isinstance(value, Node):
        return leaves.pop(0)
    return [_like(item, leaves) for item in value]


def _element(value: Value, op: Op) -> Value:
    if isinstance(value, list):
        return value[int(op.attrs["index"])]
    return Node("get-tuple-element", [value], op.results, dict(op.attrs), (), [], op.is_tuple)
