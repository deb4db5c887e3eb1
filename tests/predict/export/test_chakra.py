import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from opcast.common.errors import DatasetError, ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.options import LoweringOptions
from opcast.features.lowering.xla_collectives import optimise_collectives
from opcast.predict.cluster.partitioned import predict_partitioned
from opcast.predict.export.chakra import export_chakra
from opcast.simulate.chakra.folder import read_folder
from opcast.simulate.chakra.messages import NodeType
from opcast.simulate.chakra.timeline import run_traces
from opcast.simulate.clusters.catalogue import find_cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import astra_sim

HLO = Path(__file__).parents[2] / "features" / "data" / "gpu_schedule.hlo"


def export(program, out, name="h100-sxm-x4"):
    cluster = find_cluster(name)
    found = predict_partitioned(program, cluster, None, LoweringOptions("op"))
    return found, export_chakra(found, cluster, find_device(found.device), out)


def compare(found, said, folder):
    """Traces, read back, hold what the prediction says."""
    traces, groups = read_folder(folder)
    summary = run_traces(traces, groups).summary()
    assert summary["collectives"] == said["collectives"]
    said_of = {k: (v["count"], v["bytes"]) for k, v in summary["collectives"].items()}
    program = {}
    for node in found.nodes:
        if node.collective and node.opcode != "collective-permute":
            # ASTRA-sim cuts each among its ranks, in four parts and two directions.
            size = max(node.collective.size, 8 * len(node.collective.group))
            count, total = program.get(node.collective.kind, (0, 0))
            program[node.collective.kind] = (count + node.times, total + size * node.times)
    assert {k: v for k, v in said_of.items() if k not in ("send", "recv")} == program
    pairs = [p for n in found.nodes if n.opcode == "collective-permute" and n.collective
             for p in n.collective.groups if p[0] != p[1]]  # fmt: skip
    for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        assert sum(n.type == kind for trace in traces for n in trace) == len(pairs)
    assert summary["kernels"] == sum(1 for n in found.nodes if n.seconds > 0)
    assert summary["compute_us"] == pytest.approx(found.run.compute * 1e6, abs=0.51)
    assert len(traces) == found.devices
    return traces, groups, summary


def test_a_scheduled_program_survives_the_round_trip(tmp_path):
    found, said = export(HLO, tmp_path)
    traces, groups, summary = compare(found, said, tmp_path)
    assert groups == {"1": [0, 1], "2": [2, 3]}
    assert all(n.attrs["is_cpu_op"] is False for trace in traces for n in trace)
    assert summary["step_us"] == pytest.approx(found.run.makespan * 1e6, abs=5)
    assert summary["latency_us"] == summary["step_us"]
    # ASTRA-sim's own times of the collectives are the predicted ones on the network beside them.
    assert exposed_there(tmp_path, summary) == pytest.approx(found.run.exposed * 1e6, rel=0.1)


def exposed_there(folder, summary):
    """Exposed communication in microseconds by ASTRA-sim's rules."""
    return astra_sim.simulate(folder) / 1e3 - summary["compute_us"]


def test_the_folder_has_what_astra_sim_reads(tmp_path):
    export(HLO, tmp_path)
    network = yaml.safe_load((tmp_path / "network.yml").read_text())
    system = json.loads((tmp_path / "system.json").read_text())
    memory = json.loads((tmp_path / "remote_memory.json").read_text())
    # Groups of two neighbours each, so two axes; the cluster's own network is beside them.
    assert network["npus_count"] == [2, 2]
    cluster = yaml.safe_load((tmp_path / "network_cluster.yml").read_text())
    assert cluster["npus_count"] == [4] and cluster["topology"] == ["Switch"]
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert len(system[f"{kind}-implementation"]) == len(network["topology"])
    assert system["roofline-enabled"] == 0
    assert memory["memory-type"] == "NO_MEMORY_EXPANSION"


def test_a_cluster_of_another_size_and_missing_ranks_are_refused(tmp_path):
    with pytest.raises(ProgramError, match="the cluster has 8"):
        export(HLO, tmp_path, "h100-sxm-x8")
    with pytest.raises(DatasetError, match="no traces"):
        read_folder(tmp_path)
    export(HLO, tmp_path)
    (tmp_path / "trace.1.et").unlink()
    with pytest.raises(DatasetError, match="no traces"):
        read_folder(tmp_path)


def bytes_put_in(path):
    """Bytes of the operands of collectives, as the program has them without those made twice."""
    found = Counter()
    program = optimise_collectives(read_program(path).program)
    for computation in program.computations.values():
        for op in computation.ops:
            if op.opcode in ("all-reduce", "all-gather", "reduce-scatter"):
                found[op.opcode] += sum(computation.ops[i].result_bytes for i in op.operands)
    return found


ANNOTATED = """module @m attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(
      %x: tensor<4096x1024xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %y: tensor<4096x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
      -> (tensor<1024x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
    %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
      : (tensor<4096x1024xf32>, tensor<4096x2048xf32>) -> tensor<1024x2048xf32>
    return %0 : tensor<1024x2048xf32>
  }
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["op", "fused"])
def test_a_program_with_shardings_alone_is_partitioned_and_exported(lowering, tmp_path):
    cluster = find_cluster("h100-sxm-x4")
    found = predict_partitioned(ANNOTATED, cluster, None, LoweringOptions(lowering))
    said = export_chakra(found, cluster, find_device(found.device), tmp_path)
    # Each device sums over its 1024 rows; the partial products are added up over all four.
    assert said["collectives"] == {"all_reduce": {"count": 1, "bytes": 1024 * 2048 * 4}}
    summary = run_traces(*read_folder(tmp_path)).summary()
    assert len(read_folder(tmp_path)[0]) == 4
    assert exposed_there(tmp_path, summary) == pytest.approx(found.run.exposed * 1e6, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "mesh", "cluster"),
    [
        ("llama", "dp=4", "h100-sxm-x4"),
        ("llama", "fsdp=4", "h100-sxm-x4"),
        ("llama", "tp=4", "h100-sxm-x4"),
        ("llama", "dp=2,fsdp=2,tp=2", "h100-sxm-x8"),
        ("resnet", "dp=4", "tpu-v5e-x4"),
        ("llama", "fsdp=4", "tpu-v5e-x4"),
    ],
)
def test_exposed_communication_of_six_programs(family, mesh, cluster, tmp_path):
    from opcast.datagen.partition.workload import export_partitioned

    small = {
        "mode": "train", "layers": 1, "dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1024,
        "vocab": 1024, "seq": 256, "batch": 16,
    }  # fmt: skip
    settings = small if family == "llama" else {"mode": "train", "batch": 16}
    step = export_partitioned(family, settings, mesh, tmp_path / "step.mlir")
    where = find_cluster(cluster)
    found = predict_partitioned(step, where, None, LoweringOptions("fused"))
    export_chakra(found, where, find_device(found.device), tmp_path / "out")
    summary = run_traces(*read_folder(tmp_path / "out")).summary()
    there = exposed_there(tmp_path / "out", summary)
    assert there == pytest.approx(found.run.exposed * 1e6, rel=0.1)


@pytest.mark.slow
def test_a_training_step_on_four_devices(tmp_path):
    from opcast.datagen.partition.workload import export_partitioned

    settings = {
        "mode": "train", "layers": 1, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 512,
        "vocab": 512, "seq": 64, "batch": 8,
    }  # fmt: skip
    step = export_partitioned("llama", settings, "fsdp=2,tp=2", tmp_path / "step.mlir")
    found, said = export(step, tmp_path / "out")
    traces, groups, summary = compare(found, said, tmp_path / "out")
    # Kernels run behind collectives as they do in the prediction, not in the program's order.
    exposed = summary["step_us"] - summary["compute_us"]
    # The trace has no cores that hidden collectives take from kernels, as the prediction has.
    assert exposed == pytest.approx(found.run.exposed * 1e6, rel=0.15)
    put_in = bytes_put_in(step)
    assert said["collectives"]["all_gather"]["bytes"] == put_in["all-gather"]
    assert said["collectives"]["reduce_scatter"]["bytes"] == put_in["reduce-scatter"]
    # The loss and the norms' sums, of which each is a few bytes, are rounded up.
    rounded = said["collectives"]["all_reduce"]["bytes"] - put_in["all-reduce"]
    assert 0 < rounded < 100
    pairs = {tuple(ranks) for ranks in groups.values()}
    assert {(0, 1), (2, 3)} <= pairs
    assert {(0, 2), (1, 3)} <= pairs
    for rank, trace in enumerate(traces):
        own = {n.attrs["pg_name"] for n in trace if "pg_name" in n.attrs}
        assert all(rank in groups[name] for name in own)
