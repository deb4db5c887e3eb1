"""Simplifications that change kernels, as XLA makes them before fusion.

They follow its AlgebraicSimplifier, HloCSE and HloDCE.

Rewrites run over a graph in topological order until nothing changes. Only rewrites that change what
is computed or moved are included; those that fusion would hide anyway are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import factorial, inf

from ...ir.program import Program
from ..xla_collectives import IMPURE, PURE_COLLECTIVES
from .folding import fold, is_splat, simplify_view, splat, splat_node
from .graph import Graph, Key, Node

#: Rounds after which rewriting stops even if the graph still changes. Engineering estimate.
_MAX_ROUNDS = 4
#: Number of ops between a node and the furthest operand that a rule for the node examines.
_RULE_DEPTH = 3
#: Ops not counted in that depth, since rules look through chains of them for a splat constant.
_REPEATS = frozenset(("broadcast", "reshape"))
#: Largest order of a polygamma function for which an f32 can hold the factorial factor.
_MAX_ORDER = 33
#: First letters of float and complex types: f32, bf16, c64.
_FLOATS = ("f", "b", "c")


def simplify(graph: Graph, program: Program) -> None:
    """Simplify a graph and the bodies of its loops and branches in place.

    Args:
        graph: The graph.
        program: Contains the computations that the graph's nodes call.
    """
    for _ in range(_MAX_ROUNDS):
        changed, nested = _round(graph, program)
        for node in graph.nodes() if nested else ():
            for inner in node.graphs:
                simplify(inner, program)
        if not changed:
            return


def _round(graph: Graph, program: Program) -> tuple[bool, bool]:
    """Simplify each node once; return whether any changed, and whether any has inner graphs."""
    replaced: dict[Node, Node] = {}
    known: dict[Key, Node] = {}
    # Representatives of sets of equal nodes.
    settled: set[Node] = set()
    distance: dict[Node, int] = {}
    changed = nested = False
    for node in graph.nodes():
        nested = nested or bool(node.graphs)
        if replaced:
            for i, operand in enumerate(node.operands):
                new = replaced.get(operand)
                if new is not None:
                    node.operands[i] = new
        key = graph.simplified.get(node)
        distance[node] = near = _distance(node, key, distance)
        rewritten = None
        if near < _RULE_DEPTH:
            rewritten, key = _rewrite(node, program), None
        target = node if rewritten is None else rewritten
        if rewritten is not None:
            _fresh(rewritten, known, settled)
        # Common subexpression elimination, as in HloCSE: nodes are visited in topological order, so
        # their operands are already merged.
        same = target
        if key is None and _pure(target):
            key = _key(target)
        if key is not None:
            same = known.setdefault(key, target)
            settled.add(same)
            if target is node:
                graph.simplified[node] = key
        if same is not node:
            replaced[node] = same
            changed = True
    graph.outputs = [replaced.get(node, node) for node in graph.outputs]
    return changed, nested


def _distance(node: Node, key: Key | None, distance: Mapping[Node, int]) -> int:
    """Count the ops from a node up to the nearest one that changed since no rule applied to it.

    Args:
        node: The node; the distances of its operands are known.
        key: Its key when no rule applied; ``None`` if one did, or the node is new.
        distance: Distances of other nodes.
    """
    if key is None or key[1] != tuple(node.operands):
        return 0
    nearest = min([distance.get(operand, 0) for operand in node.operands], default=_RULE_DEPTH)
    return nearest + (node.opcode not in _REPEATS)


def _fresh(node: Node, known: dict[Key, Node], settled: set[Node]) -> None:
    """Replace the new operands that a rewrite made by equal nodes that already exist."""
    for i, operand in enumerate(node.operands):
        if operand in settled or operand.opcode not in ("constant", "broadcast", "reshape"):
            continue
        if operand.opcode != "constant":
            _fresh(operand, known, settled)
        node.operands[i] = same = known.setdefault(_key(operand), operand)
        settled.add(same)


def _pure(node: Node) -> bool:
    if node.opcode == "constant":
        # If constants are stored without their values, only their numbers identify equal ones.
        return node.attrs.get("value") is not None or "number" in node.attrs
    return not node.graphs and node.opcode not in _IMPURE


# Random numbers, transfers and collectives can look equal but differ; custom calls may have side
# effects.
_IMPURE = IMPURE | PURE_COLLECTIVES


def _key(node: Node) -> Key:
    attrs = tuple(sorted([(k, repr(v)) for k, v in node.attrs.items()])) if node.attrs else ()
    return node.opcode, tuple(node.operands), node.results, node.called, attrs


def _rewrite(node: Node, program: Program) -> Node | None:
    """Return a simpler node with the same value; ``None`` if there is none."""
    if node.opcode == "add":
        summed = _scatter_into(node, program)
        if summed is not None:
            return summed
    if node.opcode == "reduce":
        summed = _negative_sum(node, program)
        if summed is not None:
            return summed
    rule = _RULES.get(node.opcode)
    if rule is not None:
        rewritten = rule(node)
        if rewritten is not None:
            return rewritten
    rewritten = simplify_view(node)
    return fold(node) if rewritten is None else rewritten


def _binary(opcode: str, like: Node, *operands: Node) -> Node:
    return Node(opcode, list(operands), like.results, source=like.source)


def _scatter_into(node: Node, program: Program) -> Node | None:
    """Turn a scatter into zeros that is then added to an array into a scatter into that array.

    Gradients of embeddings have this form; XLA then updates the array in place.
    """
    for this, other in (node.operands, node.operands[::-1]):
        if this.opcode != "scatter" or this.is_tuple or this is other:
            continue
        if is_splat(this.operands[0], 0) and _adds(this, program):
            operands = [other, *this.operands[1:]]
            return Node(
                "scatter", operands, this.results, this.attrs, this.called, source=this.source
            )
    return None


def _negative_sum(node: Node, program: Program) -> Node | None:
    """Negate a sum instead of its summands, which occurs in gradients of softmax."""
    if node.is_tuple or node.operands[0].opcode != "negate" or not _adds(node, program):
        return None
    if not is_splat(node.operands[1], 0):
        return None
    operands = [node.operands[0].operands[0], node.operands[1]]
    summed = Node("reduce", operands, node.results, node.attrs, node.called, source=node.source)
    return Node("negate", [summed], node.results, source=node.source)


def _adds(user: Node, program: Program) -> bool:
    """Return whether a scatter or reduction adds elements."""
    only = program.computations[user.called[0]].only_op if user.called else None
    return only is not None and only.opcode == "add" and len(set(only.operands)) == 2


#: Identity operands by opcode.
_NEUTRAL: dict[str, float | bool] = {"add": 0, "multiply": 1, "maximum": -inf, "and": True}


def _neutral(node: Node) -> Node | None:
    """Remove an addition of 0, a multiplication by 1, a maximum with -inf, and the like."""
    wanted = _NEUTRAL[node.opcode]
    for this, other in (node.operands, node.operands[::-1]):
        value = splat(this)
        if value == wanted and isinstance(value, bool) == isinstance(wanted, bool):
            return other
    return None


def _add(node: Node) -> Node | None:
    """Turn ``a + (-b)`` into ``a - b``."""
    for this, other in (node.operands, node.operands[::-1]):
        if this.opcode == "negate":
            return _binary("subtract", node, other, this.operands[0])
    return _neutral(node)


def _multiply(node: Node) -> Node | None:
    """Merge two constant factors into one, or negate the factor of a negated operand."""
    for this, other in (node.operands, node.operands[::-1]):
        factor = splat(this)
        if factor is None or not node.type.dtype.startswith("f"):
            continue
        if other.opcode == "negate":
            return _binary("multiply", node, other.operands[0], splat_node(-factor, node.type))
        if other.opcode != "multiply":
            continue
        for first, second in (other.operands, other.operands[::-1]):
            known = splat(first)
            if known is not None:
                return _binary("multiply", node, second, splat_node(known * factor, node.type))
    return _masked(node) or _neutral(node)


def _masked(node: Node) -> Node | None:
    """Turn a multiplication by a converted predicate into a select of the value or zero."""
    for this, other in (node.operands, node.operands[::-1]):
        if this.opcode == "convert" and this.operands[0].type.dtype == "pred":
            return _binary("select", node, this.operands[0], other, splat_node(0, node.type))
    return None


def _clamp(node: Node) -> Node | None:
    """Turn a minimum and a maximum with constants into a clamp."""
    other = "minimum" if node.opcode == "maximum" else "maximum"
    for bound, inner in (node.operands, node.operands[::-1]):
        if inner.opcode != other or splat(bound) is None:
            continue
        for limit, value in (inner.operands, inner.operands[::-1]):
            ends = (splat(bound), splat(limit))
            if ends[1] is None or isinstance(ends[0], bool):
                continue
            low, high = (bound, limit) if node.opcode == "maximum" else (limit, bound)
            if splat(low) <= splat(high):
                return _binary("clamp", node, low, value, high)
    return _neutral(node) if node.opcode in _NEUTRAL else None


def _subtract(node: Node) -> Node | None:
    if node.operands[1].opcode == "negate":
        return _binary("add", node, node.operands[0], node.operands[1].operands[0])
    return node.operands[0] if is_splat(node.operands[1], 0) else None


def _divide(node: Node) -> Node | None:
    """Turn ``a / c`` into ``a · (1 / c)`` (floats), ``a / sqrt(b)`` into ``a · rsqrt(b)``."""
    lhs, rhs = node.operands
    if is_splat(rhs, 1):
        return lhs
    if not node.type.dtype.startswith(_FLOATS):
        return None
    value = splat(rhs)
    # As XLA does for floats. The last bit of the result may differ, which does not affect cost.
    if isinstance(value, float | int) and value and value not in (inf, -inf):
        return _binary("multiply", node, lhs, splat_node(1.0 / value, node.type))
    if rhs.opcode == "sqrt":
        inverse = Node("rsqrt", list(rhs.operands), rhs.results, source=rhs.source)
        return inverse if is_splat(lhs, 1) else _binary("multiply", node, lhs, inverse)
    return None


def _power(node: Node) -> Node | None:
    base, exponent = node.operands
    value = splat(exponent)
    if value == 1:
        return base
    if value == 2:
        return _binary("multiply", node, base, base)
    if value == 3:
        return _binary("multiply", node, _binary("multiply", node, base, base), base)
    if value == 0.5:
        return Node("sqrt", [base], node.results, source=node.source)
    if value == -0.5:
        return Node("rsqrt", [base], node.results, source=node.source)
    return None


def _square(node: Node) -> Node | None:
    return _binary("multiply", node, node.operands[0], node.operands[0])


def _polygamma(node: Node) -> Node | None:
    """Turn ``ψ⁽ⁿ⁾(x)`` with a constant order into ``(-1)ⁿ⁺¹ n! ζ(n + 1, x)``."""
    order = splat(node.operands[0])
    if not isinstance(order, int | float) or not 1 <= order <= _MAX_ORDER or order % 1:
        return None
    argument = splat_node(order + 1.0, node.type)
    factor = (-1.0) ** (order + 1) * factorial(int(order))
    zeta = _binary("chlo.zeta", node, argument, node.operands[1])
    return _binary("multiply", node, zeta, splat_node(factor, node.type))


def _convert(node: Node) -> Node | None:
    inner = node.operands[0]
    if inner.type.dtype == node.type.dtype:
        return inner
    # A round trip is an identity if the first conversion is lossless; for floats even if it is not
    # (SimplifyFPConversions, by xla_allow_excess_precision, which is on).
    if inner.opcode == "convert" and inner.operands[0].type.dtype == node.type.dtype:
        first = inner.operands[0]
        kinds = (first.type.dtype, inner.type.dtype)
        return first if kinds in _WIDER or kinds[::-1] in _FLOATING else None
    return None


#: Float types (wider one second) whose round trip through fewer bits the compiler removes.
_FLOATING = frozenset(
    (narrow, wide) for narrow in ("bf16", "f16", "f8e4m3fn", "f8e5m2") for wide in ("f32", "f64")
)
#: Pairs of types of which the second can represent every value of the first.
_WIDER = _FLOATING | {("f32", "f64"), ("s32", "s64"), ("u32", "u64")}
_WIDER |= {("pred", wide) for wide in ("s32", "f32", "bf16")}


def _select(node: Node) -> Node | None:
    value = splat(node.operands[0])
    if value is not None:
        return node.operands[1] if value else node.operands[2]
    return node.operands[1] if node.operands[1] is node.operands[2] else None


def _negate(node: Node) -> Node | None:
    inner = node.operands[0]
    return inner.operands[0] if inner.opcode == "negate" else None


def _reduce(node: Node) -> Node | None:
    """Turn reductions of nothing into reshapes, and reduce the operand of a transpose directly."""
    if len(node.results) != 1 or len(node.operands) != 2:
        return None
    source = node.operands[0]
    dims = tuple(node.attrs.get("dimensions", ()))
    if all(source.type.shape[d] == 1 for d in dims) and source.type.dtype == node.type.dtype:
        return Node("reshape", [source], node.results, source=node.source)
    if source.opcode != "transpose":
        return None
    order = tuple(source.attrs["dimensions"])
    kept = [order[d] for d in range(len(order)) if d not in dims]
    # The result would be transposed.
    if kept != sorted(kept):
        return None
    attrs = {**node.attrs, "dimensions": tuple(sorted(order[d] for d in dims))}
    operands = [source.operands[0], node.operands[1]]
    return Node("reduce", operands, node.results, attrs, node.called, source=node.source)


def _dynamic_slice(node: Node) -> Node | None:
    """Turn a dynamic slice into a slice if all start indices are known."""
    starts = [splat(start) for start in node.operands[1:]]
    if any(start is None for start in starts):
        return None
    source = node.operands[0]
    sizes = node.type.shape
    limits = []
    for start, size, full in zip(starts, sizes, source.type.shape, strict=True):
        # HLO clamps start indices so that a slice stays in bounds.
        begin = max(0, min(int(start), full - size))
        limits.append((begin, begin + size, 1))
    return Node("slice", [source], node.results, {"slice": tuple(limits)}, source=node.source)


def _tuple_element(node: Node) -> Node | None:
    """Read loop state that the body does not change from the loop's operand."""
    loop = node.operands[0]
    index = int(node.attrs["index"])
    if loop.opcode != "while":
        return None
    body = loop.graphs[1]
    unchanged = index < len(body.outputs) and body.outputs[index] is body.parameters[index]
    return loop.operands[index] if unchanged else None


_RULES: dict[str, Callable[[Node], Node | None]] = {
    **dict.fromkeys(_NEUTRAL, _neutral),
    "add": _add,
    "multiply": _multiply,
    "maximum": _clamp,
    "minimum": _clamp,
    "subtract": _subtract,
    "divide": _divide,
    "power": _power,
    "chlo.polygamma": _polygamma,
    "chlo.square": _square,
    "convert": _convert,
    "select": _select,
    "negate": _negate,
    "reduce": _reduce,
    "dynamic-slice": _dynamic_slice,
    "get-tuple-element": _tuple_element,
}
