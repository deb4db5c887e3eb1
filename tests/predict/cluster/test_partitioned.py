import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from opcast.common.errors import ProgramError
from opcast.common.interval import Interval
from opcast.common.units import size
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.options import LoweringOptions
from opcast.models.steps.effects import device_context
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.partitioned import predict_partitioned
from opcast.predict.export.timeline import stream_trace
from opcast.predict.program.case import ProgramCase
from opcast.predict.program.explain import explain
from opcast.predict.program.fidelities import compare_fidelities
from opcast.predict.render.step import print_partitioned
from opcast.simulate.clusters.catalogue import find_cluster

TESTS = Path(__file__).parents[2]
HLO = TESTS / "features" / "data" / "gpu_schedule.hlo"
KERNELS = TESTS / "models" / "data" / "gpu" / "kernels.hlo"
WHOLE = """module attributes {mhlo.num_partitions = PARTITIONS : i32} {
  func.func public @main(%x: tensor<512x512xf32>, %w: tensor<512x512xf32>) -> tensor<512x512xf32> {
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
    %z = stablehlo.tanh %y : tensor<512x512xf32>
    return %z : tensor<512x512xf32>
  }
}
"""


def constant(seconds):
    return lambda kind, size, group, cluster: Interval(seconds, seconds, seconds)


def test_scheduled_program_overlaps_only_its_asynchronous_pair():
    cluster = find_cluster("h100-sxm-x4")
    free = predict_partitioned(HLO, cluster, None, collective=constant(0.0))
    short = predict_partitioned(HLO, cluster, None, collective=constant(1e-6))
    long = predict_partitioned(HLO, cluster, None, collective=constant(1e-3))
    assert free.run.exposed == pytest.approx(0.0, abs=1e-12)
    # The pair stands around one product; the other all-reduce is synchronous.
    # It takes 16 of 132 cores while it is hidden, as in `simulate`.
    assert short.run.exposed == pytest.approx((1 + 16 / 132) * 1e-6)
    assert 1.9e-3 < long.run.exposed < 2e-3
    assert long.interval.lo < long.run.makespan < long.interval.hi


def test_plain_data_and_trace_agree_with_the_run():
    found = predict_partitioned(HLO, find_cluster("h100-sxm-x4"), None)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["lowering"] == "scheduled"
    assert data["collectives"]["all_reduce"]["count"] == 2
    assert data["step_us"] == pytest.approx(data["compute_us"] + data["exposed_communication_us"])
    assert data["lo_us"] < data["latency_us"] == data["step_us"] < data["hi_us"]
    events = [e for e in stream_trace(found)["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(data["step_us"])


def test_whether_a_program_fits_is_known_only_with_the_memory():
    found = predict_partitioned(HLO, find_cluster("h100-sxm-x4"), None)
    small = replace(found, capacity_bytes=found.peak_memory_bytes - 1)
    unknown = replace(found, capacity_bytes=0.0)
    assert (found.fits, small.fits, unknown.fits) == (True, False, None)
    assert unknown.to_dict()["fits"] is None
    printed = StringIO()
    print_partitioned(Console(file=printed, width=200), unknown)
    # The peak, without a size that it is a part of.
    assert f"memory {size(found.peak_memory_bytes)}; lowering" in printed.getvalue()


def test_a_cluster_too_small_or_a_program_in_one_piece_is_refused(tmp_path):
    with pytest.raises(ProgramError, match="the cluster has 2"):
        predict_partitioned(HLO, find_cluster("h100-sxm-x2"), None)
    whole = tmp_path / "whole.mlir"
    whole.write_text(WHOLE.replace("PARTITIONS", "4"))
    with pytest.raises(ProgramError, match="no collectives"):
        predict_partitioned(whole, find_cluster("h100-sxm-x4"), None, LoweringOptions("op"))


def test_programs_for_one_device_and_for_several_are_not_mixed_up(predictor):
    one, four = (WHOLE.replace("PARTITIONS", count) for count in ("1", "4"))
    with pytest.raises(ProgramError, match=r"for 4 devices .* a single device was") as caught:
        predictor.predict(four, device="h100-sxm", lowering="op")
    assert "--cluster h100-sxm-x4" in caught.value.hint
    with pytest.raises(ProgramError, match="for 4 devices"):
        explain(predictor, ProgramCase(four, LoweringOptions("op", "h100-sxm")))
    with pytest.raises(ProgramError, match="for 4 devices"):
        compare_fidelities(ProgramCase(four, LoweringOptions("op", "h100-sxm")), ["roofline"])
    with pytest.raises(ProgramError, match="for one device, but the cluster h100-sxm-x4 has 4"):
        predict_partitioned(one, find_cluster("h100-sxm-x4"), None, LoweringOptions("op"))


def test_a_prediction_says_that_shardings_are_not_heeded(predictor):
    sharded = WHOLE.replace("PARTITIONS", "1").replace(
        "%x: tensor<512x512xf32>,",
        '%x: tensor<512x512xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"},',
    )
    plain = predictor.predict(WHOLE.replace("PARTITIONS", "1"), device="h100-sxm", lowering="op")
    found = predictor.predict(sharded, device="h100-sxm", lowering="op")
    assert found.latency_us == plain.latency_us
    assert any("over 8 devices" in note for note in found.notes)


def test_unoptimised_data_parallel_step_combines_and_hides_its_all_reduces():
    zoo = pytest.importorskip("opcast.datagen.zoo")
    pytest.importorskip("flax")
    step = zoo.build(
        "mlp", mode="train", data_parallel=4, batch=64, features=64, width=64, layers=6
    )
    text = step.mlir(debug_info=False)
    found = predict_partitioned(text, find_cluster("h100-sxm-x4"), None, LoweringOptions("op"))
    count, size, _ = found.by_collective()["all_reduce"]
    assert count < text.count("stablehlo.all_reduce") / 4
    assert size >= 4 * step.n_params
    slow = predict_partitioned(
        text, find_cluster("h100-sxm-x4"), None, LoweringOptions("op"), collective=constant(1e-3)
    )
    assert slow.run.exposed <= count * 1.001e-3


def test_without_collectives_a_program_takes_what_it_takes_on_one_device(predictor):
    for lowering in ("op", "fused"):
        program = WHOLE.replace("PARTITIONS", "1")
        alone = predictor.predict(program, device="h100-sxm", lowering=lowering)
        found = predict_partitioned(
            program, find_cluster("h100-sxm-x1"), predictor, LoweringOptions(lowering)
        )
        assert found.run.makespan * 1e6 == pytest.approx(alone.latency_us)
        assert (found.interval.lo * 1e6, found.interval.hi * 1e6) == pytest.approx(
            (alone.lo_us, alone.hi_us)
        )
        assert alone.notes == found.notes[: len(alone.notes)]


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5e"])
def test_compiled_programs_cost_the_same_whoever_is_asked(predictor, device, tmp_path):
    # Without its call of which nothing is known.
    known = tmp_path / "kernels.hlo"
    known.write_text(KERNELS.read_text().replace("someone_elses_kernel", "PadToStatic"))
    alone = predictor.predict(known, device=device)
    found = predict_partitioned(known, find_cluster(f"{device}-x1"), predictor)
    assert found.run.makespan * 1e6 == pytest.approx(alone.latency_us)
    assert found.lowering == "scheduled"
    assert sum(found.sources.values()) == pytest.approx(1.0)


def test_collectives_come_on_top_of_the_same_kernels(predictor):
    cluster = find_cluster("h100-sxm-x4")
    free = predict_partitioned(HLO, cluster, predictor, collective=constant(0.0))
    late = predict_partitioned(HLO, cluster, predictor, collective=constant(1e-3))
    spec = find_device("h100-sxm")
    lowered = lower(read_program(HLO), "xla")
    model = predictor.model_for(spec)
    alone = model.predict_kernels(lowered.kernels, spec)
    placed = model.predict_in_program(lowered, spec, alone)[0].latency
    busy = [k.takes_time and k.kind != "collective" for k in lowered.kernels]
    # Products slow down as in measured steps, which hold the chip at its power limit.
    context = device_context(spec, 16, "jax", launched=False)
    slower = StepModel.find().table.effects(context).product
    assert 1.05 < slower < 1.4
    products = np.array([k.kind in ("gemm", "conv") for k in lowered.kernels])
    more = (slower - 1.0) * placed * products
    kernels = sum(
        (t + m) * k.multiplicity
        for t, m, k, b in zip(alone.latency, more, lowered.kernels, busy, strict=True)
        if b
    )
    # Kernels, half a gap for each execution of anything, and the dispatch.
    runs = sum(k.multiplicity for k in lowered.kernels if k.takes_time)
    gaps = 0.5 * runs * spec.launch_gap + spec.dispatch
    assert free.run.makespan == pytest.approx(kernels + gaps)
    assert late.run.compute == pytest.approx(free.run.compute)
    assert late.run.makespan > free.run.makespan + 1e-3


#: Rows of x and columns of w are cut over two devices each, and so is what the product sums over.
ANNOTATED = """module @m attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=2]>
  func.func public @main(
      %x: tensor<512x1024xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
      %w: tensor<1024x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>})
      -> (tensor<512x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<512x1024xf32>, tensor<1024x2048xf32>) -> tensor<512x2048xf32>
    return %0 : tensor<512x2048xf32>
  }
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["op", "fused"])
def test_a_program_with_shardings_alone_is_partitioned(lowering, tmp_path):
    from opcast.datagen.partition.program import partition_annotated

    options = LoweringOptions(lowering)
    found = predict_partitioned(ANNOTATED, "h100-sxm-x4", None, options)
    # Each device holds partial sums of 256 x 2048 and adds them up with its partner.
    assert found.by_collective().keys() == {"all_reduce"}
    assert found.by_collective()["all_reduce"][:2] == (1, 256 * 2048 * 4)
    (product,) = [k for k in found.kernels if k.kind == "gemm"]
    assert product.flops == 2 * 256 * 512 * 2048
    assert any("partitioned along its shardings" in note for note in found.notes)
    assert not any("counted whole" in note for note in found.notes)
    path = tmp_path / "parts.mlir"
    path.write_bytes(partition_annotated(read_program(ANNOTATED)))
    parts = predict_partitioned(path, "h100-sxm-x4", None, options)
    assert parts.latency_us == found.latency_us
    with pytest.raises(ProgramError, match="partitioned already"):
        partition_annotated(read_program(path))
