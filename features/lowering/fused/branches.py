"""Branches without loops or library calls: both are computed, and a select takes the result.

XLA's ConditionalSimplifier does the same where both branches are cheap.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.program import TensorType
from .clusters import FREE
from .folding import is_elementwise, splat_node, spread
from .graph import Graph, Node, rewrite

_CHEAP = FREE | {"broadcast", "reshape", "slice", "transpose", "iota"}


def inline_branches(graph: Graph) -> None:
    """Replace conditionals of two cheap branches, in loops and branches too."""
    made: dict[int, list[Node]] = {}

    def rule(node: Node) -> Node | None:
        for inner in node.graphs:
            inline_branches(inner)
        if node.opcode == "conditional" and _is_cheap(node):
            made[id(node)] = _selected(node)
        if node.opcode == "get-tuple-element" and id(node.operands[0]) in made:
            return made[id(node.operands[0])][int(node.attrs["index"])]
        return None

    rewrite(graph, rule)


def _is_cheap(node: Node) -> bool:
    """Whether both branches have only ops that fuse with whatever reads them."""
    return len(node.graphs) == 2 and all(
        not branch.effects
        and all(is_elementwise(own) or own.opcode in _CHEAP for own in branch.nodes())
        for branch in node.graphs
    )


def _selected(node: Node) -> list[Node]:
    """Results of a conditional: of both branches, chosen by its first operand."""
    test, *given = node.operands
    first, second = (_inlined(branch, given) for branch in node.graphs)
    if test.type.dtype != "pred":
        # A number chooses: 0 the first branch, anything else the last.
        zero = splat_node(0, test.type)
        attrs = {"direction": "EQ"}
        test = Node("compare", [test, zero], (TensorType("pred", test.type.shape),), attrs)
    return [
        Node("select", [spread(test, [], one.type.shape, node.source), one, other], one.results)
        for one, other in zip(first, second, strict=True)
    ]


def _inlined(branch: Graph, given: list[Node]) -> list[Node]:
    """Copy a branch's nodes, with what it is given in the place of its parameters."""
    copies = {id(own): value for own, value in zip(branch.parameters, given, strict=True)}
    for node in branch.nodes():
        if id(node) not in copies:
            copies[id(node)] = replace(node, operands=[copies[id(o)] for o in node.operands])
    return [copies[id(node)] for node in branch.outputs]
