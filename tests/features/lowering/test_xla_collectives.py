"""Rewrites of collectives by hand, and against what the GPU's own compiler leaves."""

from __future__ import annotations

from collections import Counter

import pytest

from opcast.common.errors import CompilerError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.mlir.bindings import module_counts, walk_ops
from opcast.features.ir.partitioning import partitions_as_replicas
from opcast.features.ir.program import Program
from opcast.features.ir.reader import read_program
from opcast.features.lowering.absent import is_partitioned
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.install import find_compiler
from opcast.features.lowering.xla_collectives import optimise_collectives
from opcast.simulate.program.nodes import combine_all, program_nodes

from ...support.cases import later

HEAD = """HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16,8], y: f32[16,8]) -> f32[4,8] {
  %x = f32[16,8]{1,0} parameter(0)
  %y = f32[16,8]{1,0} parameter(1)
  %id = u32[] partition-id()
  %four = u32[] constant(4)
  %zero = u32[] constant(0)
  %row = u32[] multiply(%id, %four)
"""
ALL = "channel_id=%d, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%%add"


def program(*lines: str) -> Program:
    return parse_hlo(HEAD + "\n".join(f"  {line}" for line in lines) + "\n}\n")


def rewritten(*lines: str) -> list[str]:
    found = optimise_collectives(program(*lines)).entry_computation
    return [op.opcode for op in found.ops if op.opcode not in ("parameter", "constant")]


def reduced(name: str, operand: str, channel: int, shape: str = "f32[16,8]{1,0}") -> str:
    return f"%{name} = {shape} all-reduce(%{operand}), {ALL % channel}"


def test_an_all_reduce_of_which_each_device_keeps_its_rows_is_a_reduce_scatter() -> None:
    cut = "ROOT %o = f32[4,8]{1,0} dynamic-slice(%r, %row, %zero), dynamic_slice_sizes={4,8}"
    done = optimise_collectives(program(reduced("r", "x", 1), cut))
    own = done.entry_computation.root_op
    assert (own.opcode, own.attrs["dimension"], own.type.shape) == ("reduce-scatter", 0, (4, 8))
    assert own.attrs["replica_groups"] == ((0, 1, 2, 3),)
    assert own.called == ("add",)
    # Nothing reads the device's number any more.
    assert [op.opcode for op in done.entry_computation.ops] == [
        "parameter", "parameter", "reduce-scatter",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "cut",
    [
        # The same rows everywhere, half of the rows, a part of two dimensions, read twice.
        "ROOT %o = f32[4,8]{1,0} dynamic-slice(%r, %four, %zero), dynamic_slice_sizes={4,8}",
        "ROOT %o = f32[8,8]{1,0} dynamic-slice(%r, %row, %zero), dynamic_slice_sizes={8,8}",
        "ROOT %o = f32[8,4]{1,0} dynamic-slice(%r, %row, %zero), dynamic_slice_sizes={8,4}",
        "%t = f32[16,8]{1,0} negate(%r)\n"
        "  %u = f32[4,8]{1,0} slice(%t), slice={[0:4], [0:8]}\n"
        "  %v = f32[4,8]{1,0} dynamic-slice(%r, %row, %zero), dynamic_slice_sizes={4,8}\n"
        "  ROOT %o = f32[4,8]{1,0} add(%u, %v)",
    ],
)
def test_other_slices_leave_it_an_all_reduce(cut: str) -> None:
    assert "reduce-scatter" not in rewritten(reduced("r", "x", 1), cut)


def test_a_reshape_between_does_not_matter() -> None:
    lines = (
        reduced("r", "x", 1),
        "%f = f32[128]{0} reshape(%r)",
        "%n = u32[] constant(32)",
        "%at = u32[] multiply(%id, %n)",
        "%c = f32[32]{0} dynamic-slice(%f, %at), dynamic_slice_sizes={32}",
        "ROOT %o = f32[4,8]{1,0} reshape(%c)",
    )
    assert rewritten(*lines)[-3:] == ["reshape", "reduce-scatter", "reshape"]


def test_equal_collectives_count_once() -> None:
    lines = (
        "%a = f32[16,8]{1,0} negate(%x)",
        "%b = f32[16,8]{1,0} negate(%x)",
        reduced("r", "a", 1),
        reduced("s", "b", 2),
        reduced("t", "y", 3),
        "%p = f32[16,8]{1,0} multiply(%r, %s)",
        "ROOT %o = f32[16,8]{1,0} multiply(%p, %t)",
    )
    assert Counter(rewritten(*lines))["all-reduce"] == 2


def test_sums_are_made_before_they_are_reduced() -> None:
    lines = (
        reduced("r", "x", 1),
        reduced("s", "y", 2),
        "ROOT %o = f32[16,8]{1,0} add(%r, %s)",
    )
    done = optimise_collectives(program(*lines)).entry_computation
    kept = [op for op in done.ops if op.opcode in ("add", "all-reduce")]
    assert [op.opcode for op in kept] == ["add", "all-reduce"]
    assert done.root_op is kept[1]
    assert [done.ops[i].name for i in kept[0].operands] == ["x", "y"]
    # A third reader, or other devices, forbid it.
    more = (*lines[:2], "%p = f32[16,8]{1,0} add(%r, %s)",
            "ROOT %o = f32[16,8]{1,0} multiply(%p, %r)")  # fmt: skip
    assert Counter(rewritten(*more))["all-reduce"] == 2
    pairs = lines[1].replace("{{0,1,2,3}}", "{{0,1},{2,3}}")
    assert Counter(rewritten(lines[0], pairs, lines[2]))["all-reduce"] == 2


PARTITIONED = """module attributes {mhlo.num_partitions = 4 : i32} {
  func.func public @main(%x: tensor<8xf32> {mhlo.sharding = "{devices=[4]<=[4]}"})
      -> tensor<8xf32> {
    %n = stablehlo.partition_id : tensor<ui32>
    %y = "stablehlo.all_reduce"(%x) <{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<8xf32>) -> tensor<8xf32>
    return %y : tensor<8xf32>
  }
}
"""


def test_a_partitioned_module_is_compiled_as_replicas() -> None:
    module = read_program(PARTITIONED).module
    assert is_partitioned(module)
    found = partitions_as_replicas(module, 4)
    assert module_counts(found) == (4, 1)
    assert [op.name for op in walk_ops(found)] == [
        "stablehlo.replica_id" if op.name == "stablehlo.partition_id" else op.name
        for op in walk_ops(module)
    ]
    text = str(found)
    assert "channel_handle" not in text and "use_global_device_ids" not in text
    assert "stablehlo.partition_id" in str(module)
    # What is still to be partitioned is left to the compiler.
    sharded = PARTITIONED.replace(
        "%n = stablehlo.partition_id : tensor<ui32>",
        '%n = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} '
        ": (tensor<8xf32>) -> tensor<8xf32>",
    )
    assert not is_partitioned(read_program(sharded).module)


def collectives(kernels: list, scheduled: bool) -> dict[tuple[str, int], tuple[float, float]]:
    """Number and bytes put in, by kind and devices of a group."""
    nodes = program_nodes(kernels, [0.0] * len(kernels), 4, scheduled=scheduled)
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for node in nodes if scheduled else combine_all(nodes):
        if node.collective is not None:
            key = node.collective.kind, len(node.collective.group)
            count, size = found.get(key, (0.0, 0.0))
            found[key] = count + node.times, size + node.times * node.collective.size
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=4", later("dp=2,tp=2")])
def test_collectives_are_those_of_the_compiler(tmp_path, mesh: str) -> None:
    from opcast.datagen.partition.workload import export_partitioned

    try:
        find_compiler("gpu")
    except CompilerError:
        pytest.skip("the GPU compiler is not installed: make compilers")
    settings = {
        "mode": "train", "layers": 2, "dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1408,
        "vocab": 4096, "seq": 128, "batch": 8,
    }  # fmt: skip
    source = read_program(export_partitioned("llama", settings, mesh, tmp_path / "step.mlir"))
    compiled = lower(source, "xla", device=find_device("h100-sxm"))
    expected = collectives(compiled.kernels, scheduled=True)
    raw = collectives(lower(source, "op").kernels, scheduled=False)
    own = source.with_program(optimise_collectives(source.program))
    for lowering in ("op", "fused"):
        kernels = lower(own, lowering, device=find_device("h100-sxm")).kernels
        found = collectives(kernels, scheduled=False)
        assert {k: size for k, (_, size) in found.items()} == {
            k: size for k, (_, size) in expected.items()
        }
        # Over two axes, a scalar may be combined with others in another order.
        for key, (count, _) in expected.items():
            assert abs(found[key][0] - count) <= (mesh != "fsdp=4")
    assert sum(size for _, size in raw.values()) > sum(size for _, size in expected.values())
