import pytest

from opcast.common.errors import LoweringError, PlanError
from opcast.datagen.partition.workload import (
    batch_spec,
    cache_spec,
    expand_groups,
    export_partitioned,
    parameter_spec,
    parse_mesh,
)
from opcast.features.ir.reader import read_program

from ...support.cases import later


def test_mesh_is_ordered_outermost_first():
    assert list(parse_mesh("tp=2,fsdp=4").items()) == [("fsdp", 4), ("tp", 2)]


@pytest.mark.parametrize("text", ["", "fsdp=1", "ep=4", "fsdp=4,fsdp=2", "fsdp=four", "tp"])
def test_bad_meshes(text):
    with pytest.raises(PlanError, match="mesh"):
        parse_mesh(text)


def test_parameters_are_cut_by_their_names():
    mesh = {"fsdp": 4, "tp": 2}
    assert parameter_spec("Block_0/attention/query/kernel", (512, 256), mesh) == ("fsdp", "tp")
    assert parameter_spec("Block_0/attention/out/kernel", (256, 512), mesh) == ("tp", "fsdp")
    assert parameter_spec("Block_0/norm1/scale", (512,), mesh) == ("fsdp",)
    assert parameter_spec("Block_0/norm1/scale", (7,), mesh) == (None,)
    assert parameter_spec("count", (), mesh) == ()
    assert parameter_spec("Block_0/SwiGLU_0/up/kernel", (512, 1024), {"tp": 2}) == (None, "tp")


def test_batches_are_cut_along_all_data_axes():
    assert batch_spec((8, 16), {"dp": 2, "fsdp": 4}, "ids") == (("dp", "fsdp"),)
    assert batch_spec((8, 16), {"tp": 2}, "ids") == ()
    with pytest.raises(PlanError, match="multiple of 3"):
        batch_spec((8, 16), {"dp": 3}, "ids")


def test_caches_are_cut_by_batch_and_heads():
    shape = (8, 4096, 4, 64)
    assert cache_spec(shape, {"dp": 2, "fsdp": 4, "tp": 4}, "caches") == (
        ("dp", "fsdp"), None, "tp", None,
    )  # fmt: skip
    assert cache_spec(shape, {"tp": 8}, "caches") == (None,) * 4
    with pytest.raises(PlanError, match="multiple of 3"):
        cache_spec(shape, {"dp": 3}, "caches")


def test_replica_groups_are_written_out():
    text = (
        "a = all-reduce(x), replica_groups=mesh['x'=2,'y'=2] {'y'}, to_apply=%add\n"
        "b = all-reduce(x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add\n"
        "c = all-reduce(x), replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}, a=b\n"
        "d = all-reduce(x), replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}, a=b\n"
    )
    found = expand_groups(text).splitlines()
    assert "replica_groups={{0,1},{2,3}}, to_apply" in found[0]
    assert "replica_groups={{0,2},{1,3}}, to_apply" in found[1]
    # Devices in mesh order are 0 2 1 3: along x (0, 1) and (2, 3), along y (0, 2) and (1, 3).
    assert "replica_groups={{0,1},{2,3}}, a=b" in found[2]
    assert "replica_groups={{0,2},{1,3}}, a=b" in found[3]


def test_wrong_formats_and_double_parallelism(tmp_path):
    with pytest.raises(LoweringError, match="jax-export"):
        export_partitioned("llama", {}, "fsdp=4", tmp_path / "x", format="jax-export")
    with pytest.raises(LoweringError, match="data_parallel"):
        export_partitioned("llama", {"data_parallel": 2}, "fsdp=4", tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "devices"), [("fsdp=4", 4), later("dp=8,tp=8", 64)])
def test_partitioned_programs_hold_explicit_collectives(tmp_path, mesh, devices):
    settings = {
        "mode": "train", "layers": 1, "dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1024,
        "vocab": 1024, "seq": 64, "batch": 64,
    }  # fmt: skip
    path = export_partitioned("llama", settings, mesh, tmp_path / "step.mlir")
    program = read_program(path).program
    assert program.num_partitions == devices
    groups = [
        {d for group in op.attrs["replica_groups"] for d in group}
        for computation in program.computations.values()
        for op in computation.ops
        if op.opcode in ("all-reduce", "all-gather")
    ]
    assert groups
    assert all(g == set(range(devices)) for g in groups)


@pytest.mark.slow
def test_a_decoding_step_keeps_its_caches_by_batch_and_heads(tmp_path):
    settings = {
        "layers": 1, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 512, "vocab": 512,
        "cache": 128, "batch": 8,
    }  # fmt: skip
    path = export_partitioned("llama_decode", settings, "dp=2,tp=2", tmp_path / "step.mlir")
    entry = read_program(path).program.entry_computation
    shapes = [op.type.shape for op in entry.parameters]
    assert shapes.count((4, 128, 2, 64)) == 2
    # Nothing gathers a cache: attention runs where its heads and sequences lie.
    gathered = [op for op in entry.ops if op.opcode == "all-gather"]
    assert all(op.result_bytes < 4 * 128 * 2 * 64 * 4 for op in gathered)


@pytest.mark.slow
def test_a_failing_partitioner_says_why(tmp_path):
    with pytest.raises(LoweringError, match="multiple of 4"):
        export_partitioned("llama", {"batch": 6, "layers": 1}, "fsdp=4", tmp_path / "x")
