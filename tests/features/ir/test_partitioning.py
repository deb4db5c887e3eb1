"""For how many devices a program is: what its header sets decides, in StableHLO and in HLO."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.common.errors import CompilerError, ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.mlir.bindings import parse_module, write_bytecode
from opcast.features.ir.partitioning import (
    annotated_devices,
    check_one_device,
    check_several_devices,
    header_counts,
    sharding_note,
)
from opcast.features.ir.reader import SourceProgram, read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.install import find_compiler
from opcast.features.lowering.xla import _as_stablehlo
from opcast.simulate.clusters.catalogue import named_cluster

HLO = """HloModule sharded{header}

ENTRY main {{
  x = f32[512,256] parameter(0), sharding={{devices=[4,1]<=[4]}}
  w = f32[256,256] parameter(1), sharding={{replicated}}
  ROOT y = f32[512,256] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}},
    sharding={{devices=[4,1]<=[4]}}
}}
"""
STABLEHLO = """module {header} {{
  sdy.mesh @mesh = <["data"=2, "model"=4]>
  func.func public @main(
      %x: tensor<512x256xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"data"}}, {{}}]>}},
      %w: tensor<256x256xf32>) -> tensor<512x256xf32> {{
    %y = stablehlo.dot %x, %w
      : (tensor<512x256xf32>, tensor<256x256xf32>) -> tensor<512x256xf32>
    return %y : tensor<512x256xf32>
  }}
}}
"""
COLLECTIVE = """module {
  func.func public @main(%x: tensor<64xf32>) -> tensor<64xf32> {
    %y = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}
      : (tensor<64xf32>) -> tensor<64xf32>
    return %y : tensor<64xf32>
  }
}
"""
FLOPS = 2 * 512 * 256 * 256


def hlo(header: str = "") -> SourceProgram:
    return read_program(HLO.format(header=header))


def stablehlo(header: str = "") -> SourceProgram:
    return read_program(STABLEHLO.format(header=header))


def test_header_and_shardings_are_told_apart() -> None:
    told = "attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 2 : i32}"
    assert [header_counts(p) for p in (hlo(), stablehlo())] == [(1, 1), (1, 1)]
    assert header_counts(hlo(", replica_count=2, num_partitions=4")) == (2, 4)
    assert header_counts(stablehlo(told)) == (2, 8)
    assert [annotated_devices(p) for p in (hlo(), stablehlo())] == [4, 8]
    mesh = HLO.format(header="").replace(
        "{replicated}", '{replicated}, frontend_attributes={m="#sdy.mesh<[\\"a\\"=2, \\"b\\"=16]>"}'
    )
    assert annotated_devices(read_program(mesh)) == 32
    assert annotated_devices(read_program("func.func @main() { return }")) == 1


SHARD_MAP = """module {
  sdy.mesh @other = <["z"=64]>
  sdy.mesh @mesh = <["data"=2, "model"=4]>
  func.func public @main(%x: tensor<512x256xf32>) -> tensor<512x256xf32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {}]>]
        out_shardings=[<@mesh, [{"data"}, {}]>] manual_axes={"data", "model"}
        (%a: tensor<256x256xf32>) {
      %y = stablehlo.add %a, %a : tensor<256x256xf32>
      sdy.return %y : tensor<256x256xf32>
    } : (tensor<512x256xf32>) -> tensor<512x256xf32>
    return %0 : tensor<512x256xf32>
  }
}
"""


@pytest.mark.parametrize("form", [str, bytes])
def test_a_shard_map_is_for_its_mesh_though_the_header_says_one_partition(form: type) -> None:
    """As JAX writes it over an ``AbstractMesh``; a mesh that nothing uses does not count."""
    program = read_program(SHARD_MAP)
    if form is bytes:
        text = SHARD_MAP.replace("module {", "module attributes {mhlo.num_partitions = 1 : i32} {")
        program = read_program(write_bytecode(parse_module(text)))
    assert header_counts(program) == (1, 8)
    assert "8 devices" in program.note and sharding_note(program) == ""
    assert header_counts(read_program(program.compile_input)) == (1, 8)
    with pytest.raises(ProgramError, match="for 8 devices"):
        check_one_device(program, "h100-sxm")
    alone = SHARD_MAP.replace('"data"=2, "model"=4', '"data"=1, "model"=1')
    assert header_counts(read_program(alone.replace("256x256", "512x256"))) == (1, 1)


@pytest.mark.parametrize("lowering", ["xla", "fused", "op"])
@pytest.mark.parametrize("program", [hlo, stablehlo])
def test_shardings_without_partitions_are_not_heeded(program: Any, lowering: str) -> None:
    found = lower(program(), lowering, cache=False)
    assert sum(k.flops for k in found.kernels if k.kind == "gemm") == FLOPS
    (note,) = [note for note in found.notes if "shardings" in note]
    assert f"over {annotated_devices(program())} devices" in note and "counted whole" in note


def test_an_absent_compiler_does_not_split_what_the_header_leaves_whole() -> None:
    try:
        find_compiler("gpu")
    except CompilerError as error:
        pytest.skip(str(error))
    found = lower(hlo(), device=find_device("h100-sxm"), cache=False)
    assert sum(k.flops for k in found.kernels) == pytest.approx(FLOPS, rel=0.01)
    assert any("counted whole" in note for note in found.notes)
    split = lower(hlo(", num_partitions=4"), device=find_device("h100-sxm"), cache=False)
    assert sum(k.flops for k in split.kernels) == pytest.approx(FLOPS / 4, rel=0.02)
    assert not any("counted whole" in note for note in split.notes)


def test_counts_of_hlo_reach_the_compiler() -> None:
    """XLA's converter to StableHLO forgets them."""
    assert header_counts(_as_stablehlo(hlo(", replica_count=2, num_partitions=4"))) == (2, 4)
    assert header_counts(_as_stablehlo(hlo())) == (1, 1)


def test_compiled_programs_keep_shardings_as_a_record() -> None:
    assert sharding_note(hlo(", is_scheduled=true")) == ""
    assert "num_partitions=4 in the header" in sharding_note(hlo())
    assert "mhlo.num_partitions = 8 : i32" in sharding_note(stablehlo())


def test_a_program_for_several_devices_is_refused_for_one() -> None:
    check_one_device(hlo(), "h100-sxm")
    with pytest.raises(ProgramError, match=r"for 4 devices \(1 replicas of 4") as caught:
        check_one_device(hlo(", num_partitions=4"), "h100-sxm")
    assert "--cluster h100-sxm-x4" in caught.value.hint
    assert "one device run the whole program: --whole with its file" in caught.value.hint
    assert "num_partitions" in caught.value.hint
    with pytest.raises(ProgramError, match="for 2 devices"):
        check_one_device(stablehlo("attributes {mhlo.num_replicas = 2 : i32}"), "h100-sxm")


def test_collectives_are_for_several_devices_whatever_the_header_says() -> None:
    with pytest.raises(ProgramError, match=r"for 4 devices \(by its collectives\)") as caught:
        check_one_device(read_program(COLLECTIVE), "h100-sxm", named_cluster)
    assert "opcast predict PROGRAM --cluster h100-sxm-x4" in caught.value.hint
    assert "opcast.predict(…, cluster='h100-sxm-x4')" in caught.value.hint
    # No device can run all of a part that collectives join.
    assert "--whole" not in caught.value.hint
    alone = COLLECTIVE.replace("[[0, 1, 2, 3]]> : tensor<1x4", "[[0]]> : tensor<1x1")
    check_one_device(read_program(alone), "h100-sxm")


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [
        ("h100-sxm", 4, "h100-sxm-x4"),
        ("h100-sxm", 16, "dgx-h100-x16"),
        ("tpu-v5e", 16, "tpu-v5e-x16"),
        ("l4", 64, "l4-x64"),
        ("l4", 63, ""),
    ],
)  # fmt: skip
def test_the_cluster_of_the_command_exists(device: str, count: int, name: str) -> None:
    assert named_cluster(device, count) == name
    program = stablehlo(f"attributes {{mhlo.num_partitions = {count} : i32}}")
    with pytest.raises(ProgramError) as caught:
        check_one_device(program, device, named_cluster)
    assert (f"--cluster {name} " if name else "--cluster FILE.yaml") in caught.value.hint.replace(
        ",", " "
    )


def test_a_program_for_one_device_is_refused_for_a_cluster() -> None:
    where = ("h100-sxm-x4", 4, "h100-sxm")
    plain = read_program(
        "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    )
    with pytest.raises(ProgramError, match="for one device, but the cluster h100-sxm-x4") as caught:
        check_several_devices(plain, *where)
    assert "--device h100-sxm" in caught.value.hint and "opcast partition" in caught.value.hint
    with pytest.raises(ProgramError) as caught:
        check_several_devices(hlo(), *where)
    assert "num_partitions=4 in the header" in caught.value.hint
    check_several_devices(plain, "h100-sxm-x1", 1, "h100-sxm")
    check_several_devices(hlo(", num_partitions=4"), *where)
    check_several_devices(read_program(COLLECTIVE), *where)
