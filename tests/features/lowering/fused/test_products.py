"""Matrix products in the libraries' form, on programs small enough to work out by hand."""

from __future__ import annotations

import pytest

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.lowering.fused.graph import Graph, Node, build_graph
from opcast.features.lowering.fused.product_rewrites import MERGE_BYTES, Dependence, merge_dots
from opcast.features.lowering.fused.products import (
    canonical_dots,
    convolved_products,
    widen_products,
)


def graph_of(*lines: str) -> Graph:
    return build_graph(parse_hlo("\n".join(["HloModule m", "ENTRY main {", *lines, "}"])))


def only(graph: Graph, opcode: str) -> Node:
    (node,) = [n for n in graph.nodes() if n.opcode == opcode]
    return node


def shapes(node: Node) -> list[str]:
    return [str(t) for n in (*node.operands, node) for t in n.results]


def canonical(*lines: str) -> Graph:
    graph = graph_of(*lines)
    canonical_dots(graph)
    return graph


def test_free_dimensions_become_one() -> None:
    graph = canonical(
        "x = f32[2,3,5] parameter(0)",
        "w = f32[5,7] parameter(1)",
        "ROOT y = f32[2,3,7] dot(x, w), lhs_contracting_dims={2}, rhs_contracting_dims={0}",
    )
    dot = only(graph, "dot")
    # 2 · 3 rows of 5.
    assert shapes(dot) == ["f32[6,5]", "f32[5,7]", "f32[6,7]"]
    assert dot.attrs["lhs_contracting_dims"] == (1,) and dot.attrs["rhs_contracting_dims"] == (0,)
    assert str(graph.outputs[0].type) == "f32[2,3,7]"
    assert "transpose" not in [n.opcode for n in graph.nodes()]


def test_a_transposed_operand_is_read_as_it_lies() -> None:
    graph = canonical(
        "x = f32[4,5] parameter(0)",
        "w = f32[7,5] parameter(1)",
        "t = f32[5,7] transpose(w), dimensions={1,0}",
        "ROOT y = f32[4,7] dot(x, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    dot = only(graph, "dot")
    assert dot.operands[1] is graph.parameters[1]
    assert dot.attrs["rhs_contracting_dims"] == (1,)


def test_innermost_batches_need_a_transpose() -> None:
    graph = canonical(
        "x = f32[4,5,3] parameter(0)",
        "w = f32[3,5,7] parameter(1)",
        "ROOT y = f32[3,4,7] dot(x, w), lhs_batch_dims={2}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    )
    transpose = only(graph, "transpose")
    assert transpose.attrs["dimensions"] == (2, 0, 1)
    assert shapes(only(graph, "dot")) == ["f32[3,4,5]", "f32[3,5,7]", "f32[3,4,7]"]


def test_a_transposed_result_swaps_the_operands() -> None:
    graph = canonical(
        "x = f32[4,5] parameter(0)",
        "w = f32[5,7] parameter(1)",
        "y = f32[4,7] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT t = f32[7,4] transpose(y), dimensions={1,0}",
    )
    dot = only(graph, "dot")
    assert dot.operands == [graph.parameters[1], graph.parameters[0]]
    assert str(dot.type) == "f32[7,4]" and graph.outputs == [dot]


SHARED = (
    "x = f32[4,5] parameter(0)",
    "a = f32[5,7] parameter(1)",
    "b = f32[5,2] parameter(2)",
    "y = f32[4,7] dot(x, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "z = f32[4,2] dot(x, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "ROOT both = (f32[4,7], f32[4,2]) tuple(y, z)",
)


def test_products_of_one_operand_are_merged() -> None:
    graph = graph_of(*SHARED)
    merge_dots(graph)
    dot = only(graph, "dot")
    # Columns side by side: 7 + 2.
    assert shapes(dot) == ["f32[4,5]", "f32[5,9]", "f32[4,9]"]
    slices = [n.attrs["slice"] for n in graph.outputs]
    assert slices == [((0, 4, 1), (0, 7, 1)), ((0, 4, 1), (7, 9, 1))]


def test_products_of_one_right_operand_are_merged_by_rows() -> None:
    graph = graph_of(
        "w = f32[5,7] parameter(0)",
        "a = f32[4,5] parameter(1)",
        "b = f32[2,5] parameter(2)",
        "y = f32[4,7] dot(a, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "z = f32[2,7] dot(b, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT both = (f32[4,7], f32[2,7]) tuple(y, z)",
    )
    merge_dots(graph)
    assert shapes(only(graph, "dot")) == ["f32[6,5]", "f32[5,7]", "f32[6,7]"]
    assert [n.attrs["slice"][0] for n in graph.outputs] == [(0, 4, 1), (4, 6, 1)]


def test_products_that_wait_for_each_other_stay_apart() -> None:
    graph = graph_of(
        "x = f32[4,4] parameter(0)",
        "a = f32[4,4] parameter(1)",
        "y = f32[4,4] dot(x, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT z = f32[4,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    nodes = graph.nodes()
    first, second = [n for n in nodes if n.opcode == "dot"]
    order = Dependence(nodes)
    assert order.needs(second, first) and not order.needs(first, second)
    merge_dots(graph)
    assert [n for n in graph.nodes() if n.opcode == "dot"] == [first, second]


def test_two_pairs_of_products_that_wait_for_each_other_are_not_both_merged() -> None:
    """b needs a, and c needs d: (a, c) and (b, d) as one kernel each would wait for ever."""
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    graph = graph_of(
        "x = f32[4,4] parameter(0)",
        "y = f32[4,4] parameter(1)",
        "w = f32[4,4] parameter(2)",
        f"a = f32[4,4] dot(x, w), {dims}",
        f"d = f32[4,4] dot(y, w), {dims.replace('{0}', '{1}')}",
        f"b = f32[4,4] dot(y, a), {dims}",
        f"c = f32[4,4] dot(x, d), {dims}",
        "ROOT both = (f32[4,4], f32[4,4]) tuple(b, c)",
    )
    merge_dots(graph)
    assert len([n for n in graph.nodes() if n.opcode == "dot"]) == 3


@pytest.mark.parametrize(("rows", "products"), [(1024, 1), (2048, 2)])
def test_two_large_products_are_not_merged(rows: int, products: int) -> None:
    graph = graph_of(
        f"x = f32[{rows},2048] parameter(0)",
        "a = f32[2048,2048] parameter(1)",
        "b = f32[2048,2048] parameter(2)",
        f"y = f32[{rows},2048] dot(x, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        f"z = f32[{rows},2048] dot(x, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        f"ROOT both = (f32[{rows},2048], f32[{rows},2048]) tuple(y, z)",
    )
    # Operands and result of one product: 8 + 16 + 8 MiB, which is the limit, or 16 + 16 + 16.
    assert (4 * (2 * rows * 2048 + 2048 * 2048) <= MERGE_BYTES) == (products == 1)
    merge_dots(graph)
    assert sum(n.opcode == "dot" for n in graph.nodes()) == products


@pytest.mark.parametrize(
    "asked", ["operand_precision={highest,highest}", "algorithm=dot_bf16_bf16_f32_x6"]
)
def test_a_product_keeps_its_precision_as_a_convolution(asked: str) -> None:
    graph = graph_of(
        "x = f32[8,16] parameter(0)",
        "w = f32[16,4] parameter(1)",
        "ROOT y = f32[8,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, " + asked,
    )
    before = only(graph, "dot").attrs
    convolved_products(graph)
    name = asked.split("=")[0]
    assert before[name] and only(graph, "convolution").attrs[name] == before[name]


@pytest.mark.parametrize(
    ("left", "right", "result", "multiplied"),
    [
        # As compiled for an H100 and an A100 (JAX 0.10); the compiler refuses the product of f4.
        ("s4", "s4", "s32", "s32"),
        ("u4", "u4", "u32", "u32"),
        ("s8", "s4", "s32", "s32"),
        ("s8", "s8", "s32", "s8"),
        ("f4e2m1fn", "f4e2m1fn", "bf16", "bf16"),
        ("f8e4m3fn", "f8e4m3fn", "bf16", "f8e4m3fn"),
    ],
)
def test_formats_without_a_kernel_are_multiplied_in_a_wider_one(
    left: str, right: str, result: str, multiplied: str
) -> None:
    graph = graph_of(
        f"x = {left}[8,16] parameter(0)",
        f"w = {right}[16,4] parameter(1)",
        f"ROOT y = {result}[8,4] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    )
    widen_products(graph, frozenset(("f8e4m3fn",)))
    assert {o.type.dtype for o in only(graph, "dot").operands} == {multiplied}
