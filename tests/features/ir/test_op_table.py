"""The table of ops: each op stands in it once, and what it names exists."""

from __future__ import annotations

from collections import Counter

from opcast.common.files import own_data
from opcast.features.cost import flops
from opcast.features.ir.mlir.opcodes import hlo_opcode
from opcast.features.ir.op_table import OPS, by_op
from opcast.features.kernels.kernel import KINDS
from opcast.features.table.columns import CODE, INDEX


def test_every_op_stands_in_one_row() -> None:
    listed = Counter(
        name for row in own_data("features/ir/ops.toml")["ops"] for name in row.split()
    )
    assert set(listed.values()) == {1}
    aliases = Counter(name for spec in OPS.values() for name in spec.stablehlo.split())
    assert set(aliases.values()) == {1} and hlo_opcode("stablehlo.dot_general") == "dot"


def test_columns_kinds_and_rules_that_ops_name_exist() -> None:
    for name, spec in OPS.items():
        assert not spec.column or {spec.column, spec.work} <= set(INDEX), name
        assert spec.kind in {"", *KINDS}, name
    ruled = {*flops._RULES, *flops.CONTROL}
    assert {name for name, spec in OPS.items() if spec.flops is None} == ruled - {"async-start"}


def test_an_elementwise_op_needs_no_list_but_the_table() -> None:
    tanh = OPS["tanh"]
    assert (tanh.operands, tanh.flops, tanh.transcendentals, tanh.kind) == (1, 0.0, 1.0, "")
    assert tanh.elementwise and tanh.expensive and tanh.reads == "share"


def test_an_op_follows_the_rules_of_the_op_that_it_is_like() -> None:
    assert by_op({"dot": 1, "scaled-dot": 2, "own": 3}) == {
        "dot": 1,
        "ragged-dot": 1,
        "scaled-dot": 2,
        "own": 3,
    }
    assert all(spec.like in OPS for spec in OPS.values() if spec.like)
    assert {spec.root for spec in OPS.values()} - {""} <= set(CODE["root"])
