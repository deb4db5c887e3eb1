import json
from pathlib import Path

import pytest

from opcast.features.errors import ProgramError
from opcast.predict.partitioned import predict_partitioned, stream_trace
from opcast.simulate.cluster_catalogue import find_cluster
from opcast.simulate.step.calls import Estimate

HLO = Path(__file__).parent.parent / "features" / "data" / "gpu_schedule.hlo"


def constant(seconds):
    return lambda kind, size, group, cluster: Estimate(seconds, seconds, seconds)


def test_scheduled_program_overlaps_only_its_asynchronous_pair():
    cluster = find_cluster("h100-sxm-x4")
    free = predict_partitioned(HLO, cluster, None, collective=constant(0.0))
    short = predict_partitioned(HLO, cluster, None, collective=constant(1e-6))
    long = predict_partitioned(HLO, cluster, None, collective=constant(1e-3))
    assert free.run.exposed == pytest.approx(0.0, abs=1e-12)
    # The pair stands around one product; the other all-reduce is synchronous.
    assert short.run.exposed == pytest.approx(1e-6)
    assert 1.9e-3 < long.run.exposed < 2e-3
    assert long.lo < long.run.makespan < long.hi


def test_plain_data_and_trace_agree_with_the_run():
    found = predict_partitioned(HLO, find_cluster("h100-sxm-x4"), None)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["lowering"] == "scheduled"
    assert data["collectives"]["all_reduce"]["count"] == 2
    assert data["step_us"] == pytest.approx(data["compute_us"] + data["exposed_communication_us"])
    events = [e for e in stream_trace(found)["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(data["step_us"])


def test_a_cluster_too_small_or_a_program_in_one_piece_is_refused(tmp_path):
    with pytest.raises(ProgramError, match="the cluster has 2"):
        predict_partitioned(HLO, find_cluster("h100-sxm-x2"), None)
    whole = tmp_path / "whole.mlir"
    whole.write_text(
        "module attributes {mhlo.num_partitions = 4 : i32} {\n"
        "  func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {\n"
        "    %y = stablehlo.add %x, %x : tensor<8xf32>\n    return %y : tensor<8xf32>\n  }\n}\n"
    )
    with pytest.raises(ProgramError, match="no collectives"):
        predict_partitioned(whole, find_cluster("h100-sxm-x4"), None)


def test_unoptimised_data_parallel_step_combines_and_hides_its_all_reduces():
    zoo = pytest.importorskip("opcast.datagen.zoo")
    pytest.importorskip("flax")
    step = zoo.build(
        "mlp", mode="train", data_parallel=4, batch=64, features=64, width=64, layers=6
    )
    text = step.mlir(debug_info=False)
    found = predict_partitioned(text, find_cluster("h100-sxm-x4"), None)
    count, size, _ = found.by_collective()["all_reduce"]
    assert count < text.count("stablehlo.all_reduce") / 4
    assert size >= 4 * step.n_params
    slow = predict_partitioned(text, find_cluster("h100-sxm-x4"), None, collective=constant(1e-3))
    assert slow.run.exposed <= count * 1.001e-3
