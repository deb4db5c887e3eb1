import json
import math
import re
import resource
import time
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from opcast.common.errors import DeviceError, PlanError
from opcast.common.interval import Interval
from opcast.features.devices.catalogue import find_device
from opcast.features.operators.op import Op
from opcast.models.operators import OpModel
from opcast.models.steps.effects import EffectTable
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.network import ClusterNetwork, learned_time
from opcast.predict.cluster.peaks import least_seconds
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.cluster.step_case import StepCase
from opcast.predict.cluster.training_run import training_run
from opcast.predict.locate import find_model
from opcast.predict.operator.step_operators import OperatorLatency, step_row
from opcast.predict.page.cluster import step_data, step_page
from opcast.predict.render.step import print_step
from opcast.predict.sweep.job import SweepJob, judge
from opcast.predict.sweep.space import Candidate
from opcast.simulate.clusters.catalogue import find_cluster, joined
from opcast.simulate.clusters.files import save_cluster
from opcast.simulate.collectives.choose import collective_cost
from opcast.simulate.step.fitting import Fit
from opcast.simulate.step.layer_ops import layer_ops
from opcast.simulate.step.memory import StageMemory
from opcast.simulate.step.named_workloads import make_workload, read_workload
from opcast.simulate.step.plan import Group, Plan, parse_plan, resolved

LLAMA = {
    "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256,
    "seq": 8192, "batch": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def operators():
    return OpModel.load(find_model("gpu-operators"))


def test_every_operator_of_every_family_can_be_asked_for(operators):
    latency = OperatorLatency(find_device("h100-sxm"), operators)
    for family in ("llama", "moe", "gpt", "bert"):
        w = make_workload(family, {"batch": 8, "layers": 2})
        ops = layer_ops(w, resolved(w, Plan(tp=2), 2))
        found = latency(ops.forward + ops.backward + ops.weights)
        assert (found[:, 1] <= found[:, 0]).all()
        assert (found[:, 0] <= found[:, 2]).all()
        assert (found > 0).all()
    known = {call.family for call, scope in latency.scopes.items() if scope == "known"}
    assert known >= {"linear", "attention", "moe"}


def test_products_take_longer_than_the_roofline_of_the_peak(operators):
    spec = find_device("h100-sxm")
    calls = [Op("linear", (m, 4096, 4096), name="x") for m in (512, 4096, 16384)]
    found = OperatorLatency(spec, operators)(calls)[:, 0]
    floor = np.array([c.flops() for c in calls]) / spec.matrix_peak("bf16")
    assert (found > floor).all()
    assert (found < 3 * floor + 1e-5).all()
    assert step_row(calls[0], spec)["key"] == "graph/linear"


def test_devices_that_no_model_knows_take_the_roofline(operators):
    spec = find_device("tpu-v5e")
    call = Op("linear", (8192, 4096, 4096), name="x")
    latency = OperatorLatency(spec, operators)
    # Arrays of 128 × 128 reach nine tenths of their peak in the compiler's own estimates.
    expected = 2 * 8192 * 4096 * 4096 / (0.9 * 197e12) + spec.floor
    assert latency([call])[0, 0] == pytest.approx(expected)
    assert latency.scopes[call] == "roofline"
    # Heads of 128 fill all rows of a v5e's arrays, half of a v6e's.
    heads = Op("attention", (1, 32, 8, 128, 128, 8192, 8192, 1), name="z")
    v6e = find_device("tpu-v6e")
    found = [OperatorLatency(own, None)([heads])[0, 0] - own.floor for own in (spec, v6e)]
    assert found[0] / found[1] == pytest.approx(918 / 197 / 2)
    wide = OperatorLatency(spec, None)([Op("move", (819_000_000,))])
    assert wide[0, 0] == pytest.approx(1e-3 / 0.85 + spec.floor)


def analytical_time(kind, size, ranks, cluster):
    """Closed forms alone, without any measurement."""
    found = collective_cost(kind, size, ranks, cluster).total
    return Interval(found, found, found)


def test_gathers_are_asked_with_one_rank_s_share():
    cluster = find_cluster("dgx-h100-x16")
    network = ClusterNetwork(cluster, analytical_time)
    found = network("all_gather", 8e6, Group(8, 1)).value
    assert found == collective_cost("all_gather", 1e6, range(8), cluster).total
    across = network("all_reduce", 8e6, Group(2, 8)).value
    assert across == collective_cost("all_reduce", 8e6, range(0, 16, 8), cluster).total


def test_a_box_that_is_filled_in_part_has_fewer_ports():
    # 78 ranks, every fourth of boxes of 64: four boxes of 16 and one of 14, which all wait for.
    asked = {}

    def time(kind, size, ranks, cluster):
        asked[kind] = size, ranks
        return analytical_time(kind, size, ranks, cluster)

    network = ClusterNetwork(joined("gb200", 2496), time)
    uneven = network("reduce_scatter", 1e9, Group(78, 4))
    network("all_gather", 1e9, Group(78, 4))
    size, ranks = asked["all_gather"]
    assert len(ranks) == 5 * 14 and size == 1e9 / 70
    assert list(ranks[:2]) == [0, 4] and ranks[14] == 64
    even = network("reduce_scatter", 1e9, Group(80, 4))
    assert even.value < uneven.value < 1.25 * even.value
    # A group within a box, and one of whole boxes, is as it is.
    assert network._ranks(Group(12, 4)) == range(0, 48, 4)
    assert network._ranks(Group(32, 4)) == range(0, 128, 4)


def test_frameworks_of_which_nothing_is_known_are_refused():
    case = StepCase(cluster="h100-sxm-x8", framework="bogus", model="roofline")
    with pytest.raises(PlanError, match=r"'bogus' is not known.*nanotron, nemo"):
        case.predict(read_workload("llama-3-8b", {"batch": 64}), None)


def test_a_step_above_the_best_published_share_is_widened_and_says_so():
    case = StepCase(cluster="tpu-v5p-x1024", plan="fsdp=128,tp=8", model="roofline")
    work = read_workload("gpt-3-175b", {"batch": 2048, "seq": 2048})
    found = case.predict(work, None)
    # 55 % of the 459 TFLOP/s of its data sheet.
    usual = work.model_flops() / 1024 / 459e12 / 0.55
    assert found.step.total < usual <= found.interval.hi
    said = "more than any step on a TPU in the training data (55%)"
    assert any(said in note for note in found.notes())


def test_measured_collectives_count_inside_a_box():
    cluster = find_cluster("h100-sxm-x8")
    learned = learned_time("all_reduce", 64e6, range(8), cluster)
    formula = analytical_time("all_reduce", 64e6, range(8), cluster)
    assert learned.lo < learned.value < learned.hi
    assert learned.value != formula.value
    assert 0.5 < learned.value / formula.value < 2.0


def test_an_interval_is_as_wide_as_what_nobody_measured(operators, tmp_path):
    """A hardware architect's own chip is less sure than an H100, and a pipeline than plain FSDP."""
    own = tmp_path / "own.yaml"
    own.write_text("name: own\nbase: h100-sxm\npeak_tflops: {bf16: 2000}\n")
    work = make_workload("llama", LLAMA)

    def width(device=None, plan="fsdp=64", framework=""):
        predictor = StepPredictor("dgx-h100-x64", operators, device, framework)
        found = predictor.predict(work, parse_plan(plan), remedy=False).interval
        return math.log(found.hi / found.lo)

    measured = width()
    assert 0.3 < measured < 0.8
    assert width(own) > 1.25 * measured
    # Megatron-LM's runs on H100 were learned from; hand-overs between stages differ by framework.
    assert width(framework="nemo") < measured
    assert width(plan="fsdp=4,pp=16,microbatches=64") > measured


@pytest.mark.parametrize(
    ("cluster", "products", "peak", "format_"),
    # Data sheets: an H100 does 1,978.9 TFLOP/s in fp8 and has no unit for nvfp4; a B200 does 9,000
    # in nvfp4; an A100 has nothing below 16 bits for floats.
    [
        ("dgx-h100-x8", "fp8", 1978.9, "fp8"),
        ("dgx-h100-x8", "nvfp4", 1978.9, "fp8"),
        ("dgx-b200-x8", "nvfp4", 9000.0, "nvfp4"),
        ("dgx-a100-x8", "fp8", 312.0, "bf16"),
    ],
)
def test_mfu_is_of_the_peak_of_the_format_that_is_multiplied(cluster, products, peak, format_):
    predictor = StepPredictor(find_cluster(cluster), None)
    found = predictor.predict(
        make_workload("llama", LLAMA | {"products": products}), parse_plan("fsdp=8"), remedy=False
    )
    data = found.to_dict()
    assert data["mfu"] == pytest.approx(data["tflops_per_device"] / peak, rel=1e-3)
    assert data["mfu_format"] == format_
    printed = StringIO()
    print_step(Console(file=printed, width=100), found)
    assert f"of its {format_} peak" in printed.getvalue()


@pytest.mark.parametrize(
    ("cluster", "batch", "plan", "passes"),
    [
        ("tpu-v5p-x8", 128, "fsdp=8", 3.0),
        ("tpu-v5p-x64", 64, "fsdp=64", 3.0),
        # The layers once more; the vocabulary's product is not run again.
        ("tpu-v5p-x64", 64, "fsdp=64,recompute=full", 4.0),
        ("tpu-v5p-x64", 64, "fsdp=16,pp=4,microbatches=4", 3.0),
    ],
)
def test_no_step_is_shorter_than_its_arithmetic_at_the_peak(cluster, batch, plan, passes):
    """A user's Llama 3 8B on v5p had a lower end below its FLOPs over 459 TFLOP/s."""
    work = make_workload("llama-3-8b", {"batch": batch, "seq": 8192})
    predictor = StepPredictor(cluster, None)
    found = predictor.predict(work, parse_plan(plan), remedy=False)
    # Products and attention over the visible pairs, as published for the model.
    per_token = 2 * (8_030_261_248 - 128_256 * 4096) + 32 * 2 * 4096 * 8193
    head = 2 * 128_256 * 4096
    flops = batch * 8192 * (passes * (per_token - head) + 3 * head)
    least = flops / found.plan.devices / 459e12
    assert least < found.interval.lo <= found.interval.value <= found.interval.hi
    # Attention's backward pass has five products where the model's FLOPs count four.
    if "pp" not in plan:
        assert found.interval.lo < 1.05 * least
    # What sweeps write is the same.
    row = judge(SweepJob(work, model="roofline"), [Candidate(cluster, batch, parse_plan(plan))])[0]
    assert row["lo_us"] == found.interval.lo * 1e6


def test_no_step_under_a_power_cap_is_faster_than_without_one():
    work, plan = make_workload("llama", {"layers": 4, "batch": 16}), parse_plan("tp=8,dp=2")
    free, deep = (
        StepPredictor("dgx-h100-x16", None, power_cap_w=cap)
        .run_by("nanotron", compiled=False, source="own", learned=StepModel.find())
        .predict(work, plan)
        .interval
        for cap in (None, 180.0)
    )
    assert free.lo <= deep.lo < deep.value and free.value < deep.value


def test_formats_without_units_run_as_wider_ones(operators):
    """An A100 has no fp8: what is simulated in it is never faster than bf16, and is told."""

    def predicted(cluster, products):
        work = make_workload("llama-3-8b", {"batch": 64, "seq": 8192, "products": products})
        predictor = StepPredictor(cluster, operators)
        return predictor.predict(work, parse_plan("fsdp=64"), remedy=False, explain=True)

    plain = predicted("dgx-a100-x64", "")
    for products in ("fp8", "mxfp8", "nvfp4"):
        found = predicted("dgx-a100-x64", products)
        assert found.interval == plain.interval
        lessons = dict(next(t for t in found.terms if t.name == "matrix products").lessons)
        assert "bits 16" in lessons
        assert "bits 8" not in lessons
        assert any(f"no units for {products}" in note for note in found.notes())
    # Hopper has fp8 and widens nvfp4 to it.
    fast, widened = predicted("dgx-h100-x64", "fp8"), predicted("dgx-h100-x64", "nvfp4")
    assert not any("no units" in note for note in fast.notes())
    assert fast.interval.value < predicted("dgx-h100-x64", "").interval.value
    assert widened.interval == fast.interval
    assert any("products run in fp8" in note for note in widened.notes())


def test_collectives_of_a_chip_without_measured_steps_widen_the_interval(operators):
    """No step of an L40S was measured: it is as uncertain as PCI Express, which it waits for."""

    def found(cluster):
        work = make_workload("llama", {"layers": 16, "batch": 32})
        return StepPredictor(cluster, operators).predict(work, parse_plan("fsdp=8"), remedy=False)

    slow, known = found("l40s-x8"), found("h100-sxm-x8")
    link = learned_time("all_gather", 2**27, range(8), find_cluster("l40s-x8"))
    # The exposed share of the step grows with its collectives.
    most = 1 + slow.step.exposed / slow.step.total * (link.hi / link.value - 1)
    assert slow.step.exposed > 0.4 * slow.step.total and most > 1.4
    assert slow.interval.hi / slow.interval.value >= most
    assert known.interval.hi < 1.4 * known.interval.value


def test_fewer_micro_batches_are_named_where_they_are_much_faster(operators):
    # Each of 8 micro-batches gathers 36 billion parameters / 8 twice and reduces their gradients
    # in f32 over 7/8 of 8 boxes: 31.5 GB, 0.63 s at 50 GB/s against 0.4 s of computation.
    sizes = {**LLAMA, "layers": 40, "d_model": 8192, "heads": 64, "d_ff": 28672, "batch": 64}

    def case(plan):
        return StepCase(cluster="dgx-h100-x64", plan=plan)

    def found(plan):
        return case(plan).predict(make_workload("llama", sizes), operators)

    chosen, two = found("tp=8,fsdp=8"), found("tp=8,fsdp=8,microbatches=2")
    note = next(note for note in chosen.notes() if "was chosen" in note)
    said = re.fullmatch(r"microbatches=8 was chosen.*microbatches=2, which fits.* ([\d.]+) s", note)
    assert two.fit.fits
    assert float(said[1]) == pytest.approx(two.step.total, rel=1e-2)
    assert chosen.step.total > 2 * two.step.total
    for plan in ("tp=8,fsdp=8,microbatches=8", "tp=8,dp=8,zero=1"):
        assert not any("was chosen" in note for note in found(plan).notes())


# A V100's matrix units take f16 alone (125 TFLOP/s); bf16 is widened to the vector units' f32.
@pytest.mark.parametrize(("device", "dtype", "told"), [
    ("v100-sxm", "bf16", "15.7 TFLOP/s, f16 at 125: dtype=f16 is faster"),
    ("v100-sxm", "f16", ""),
    ("v100-sxm", "f32", ""),
    ("a100-sxm-80gb", "bf16", ""),
])  # fmt: skip
def test_a_device_that_is_slow_in_bf16_is_named(operators, device, dtype, told):
    work = make_workload("gpt", {"batch": 8, "layers": 2, "dtype": dtype})
    notes = StepPredictor(find_cluster(device), operators).predict(work, parse_plan("dp=1")).notes()
    found = [note for note in notes if "is faster" in note]
    assert len(found) == bool(told)
    assert all(told in note for note in found)


def test_prediction_adds_up_and_its_interval_holds_it(operators):
    predictor = StepPredictor(find_cluster("dgx-h100-x128"), operators)
    found = predictor.predict(make_workload("llama", LLAMA), parse_plan("tp=8,pp=2,dp=8"))
    data = found.to_dict()
    names = ("compute_us", "exposed_communication_us", "bubble_us", "host_us")
    parts = sum(data[name] for name in names)
    assert parts == pytest.approx(data["step_us"])
    assert data["lo_us"] < data["latency_us"] < data["hi_us"]
    assert data["step_us"] == data["latency_us"]
    assert 0.2 < data["mfu"] < 0.7
    assert data["fits"]
    assert data["tflops_per_device"] == pytest.approx(data["mfu"] * 989.4)
    assert sum(data["operators_us"].values()) == pytest.approx(data["compute_us"])
    assert sum(data["scope_share"].values()) == pytest.approx(1.0)
    assert json.loads(json.dumps(data)) == data


def test_waiting_for_experts_lowers_the_end_of_the_interval():
    sizes = {
        "layers": 4, "d_model": 2048, "heads": 16, "d_ff": 512, "vocab": 32000, "seq": 4096,
        "batch": 16, "experts": 16, "top_k": 8,
    }  # fmt: skip
    work, plan = make_workload("moe", sizes), parse_plan("dp=16,ep=16")
    found = StepPredictor("dgx-h100-x16", None).predict(work, plan)
    wait, total = found.step.communication["expert"], found.step.total
    assert wait > 0.3 * total and found.step.bubble == 0.0
    assert found.interval.lo <= (total - 0.7 * wait) * (1 + 1e-9)
    assert any("expert-parallel all-to-alls" in note for note in found.notes())
    # 4 of the 8 s of a device, so half of the bubble of 2 s as well: 10 - 0.7 x 4 x 10 / 8.
    by_hand = {"total": 10.0, "exposed": 5.0, "bubble": 2.0}
    long = replace(found.step, communication={"expert": 4.0, "tensor": 1.0}, **by_hand)
    assert least_seconds(work, long) == pytest.approx(6.5)
    assert least_seconds(replace(work, mode="forward"), long) == 10.0
    few = replace(long, communication={"expert": 2.9})
    assert least_seconds(work, few) == 10.0
    # The same layers without expert parallelism have neither note nor wait.
    alone = StepPredictor("dgx-h100-x16", None).predict(work, parse_plan("dp=16"))
    assert not any("expert-parallel" in note for note in alone.notes())
    # The whole chip is known, so that nothing but the learned effects is unsure.
    assert 0.55 * alone.step.total < alone.interval.lo < alone.step.total


def test_measured_steps_of_a_framework_are_learned_from(operators):
    cluster, work = find_cluster("dgx-h100-x128"), make_workload("llama", LLAMA)
    plan = parse_plan("tp=8,pp=2,dp=8")
    found = {
        name: StepPredictor(cluster, operators, framework=name).predict(work, plan)
        for name in ("nanotron", "megatron-bridge", "unheard-of")
    }
    data = found["nanotron"].to_dict()
    parts = ("compute_us", "exposed_communication_us", "bubble_us", "host_us")
    assert sum(data[part] for part in parts) == pytest.approx(data["step_us"])
    assert sum(data["operators_us"].values()) == pytest.approx(data["compute_us"])
    # Its published runs with tp=8 wait for the host; those of Megatron do not.
    host = {name: p.step.host / p.step.total for name, p in found.items()}
    assert host["nanotron"] > 0.04 > 7 * host["megatron-bridge"]
    assert found["nanotron"].step.total > 1.1 * found["megatron-bridge"].step.total
    widths = {n: p.interval.hi / p.interval.lo for n, p in found.items()}
    # Hand-overs between stages, of which nothing is known without a framework, weigh less than
    # nanotron's own, which are known.
    assert widths["nanotron"] > widths["unheard-of"] > 0.9 * widths["megatron-bridge"]
    assert any("no measured step of unheard-of" in note for note in found["unheard-of"].notes())
    average = StepPredictor(cluster, operators).predict(work, plan)
    assert average.step.total == pytest.approx(found["unheard-of"].step.total)
    graphs = StepPredictor(cluster, operators, framework="nanotron", compiled=True)
    assert graphs.predict(work, plan).step.host == 0.0


def test_terms_add_up_and_say_what_was_learned(operators):
    cluster, work = find_cluster("dgx-h100-x128"), make_workload("llama", LLAMA)
    predictor = StepPredictor(cluster, operators, framework="nanotron")
    found = predictor.predict(work, parse_plan("tp=8,pp=2,dp=8"), explain=True)
    terms = {term.name: term for term in found.terms}
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.step.total, rel=1e-6)
    times = [term.seconds for term in found.terms]
    assert times == sorted(times, reverse=True)
    products = sum(v for k, v in found.operators.items() if k not in ("attention", "attention_dx"))
    assert terms["matrix products"].seconds < products
    # Without launches and links a step takes less by what it waits for the host and for them.
    inside, between = terms["scale-up collectives"], terms["scale-out collectives"]
    assert inside.seconds + between.seconds == pytest.approx(found.step.exposed, rel=0.1)
    waiting = ("launch overhead", "pipeline sends and receives")
    host = sum(terms[name].seconds for name in waiting)
    assert host == pytest.approx(found.step.host, rel=0.1)
    for term in found.terms:
        assert term.lo <= found.step.total * (1 + 1e-9) and term.hi >= found.step.total * (1 - 1e-9)
    host = terms["launch overhead"]
    assert ("framework nanotron" in dict(host.lessons)) and host.hi > host.lo
    assert dict(host.lessons)["framework nanotron"] > 2.0
    assert found.to_dict()["terms"][0]["us"] == pytest.approx(times[0] * 1e6)
    assert "terms" not in predictor.predict(work, parse_plan("tp=8,pp=2,dp=8")).to_dict()


def test_a_cluster_of_one_s_own_has_its_effects(operators):
    shipped = StepModel.find()
    slower = {"whole/cluster/own|h100-sxm": math.log(1.5)}
    own = replace(shipped, table=EffectTable(shipped.table.values | slower))
    work, plan = make_workload("llama", {**LLAMA, "layers": 4, "batch": 8}), parse_plan("dp=8")
    found = [
        StepPredictor(find_cluster("h100-sxm-x8"), operators, learned=model).predict(work, plan)
        for model in (shipped, own)
    ]
    assert found[1].step.total == pytest.approx(1.5 * found[0].step.total, rel=1e-3)
    assert found[1].known == "cluster"


def test_what_does_not_fit_says_what_would(operators):
    predictor = StepPredictor(find_cluster("dgx-h100-x128"), operators)
    found = predictor.predict(make_workload("llama", LLAMA), parse_plan("dp=128"))
    assert not found.fit.fits
    assert found.fit.plan is not None
    again = predictor.predict(found.workload, found.fit.plan)
    assert again.fit.fits
    assert any("would fit with" in note for note in found.notes())


LLAMA_405B = {
    "layers": 126, "d_model": 16384, "heads": 128, "kv_heads": 8, "d_ff": 53248, "vocab": 128256,
    "seq": 16384, "batch": 256,
}  # fmt: skip


def test_what_is_offloaded_has_to_fit_the_host(tmp_path):
    """A user's 405B parameters on 32 boxes: activations of eight devices are in one host."""
    work = make_workload("llama", LLAMA_405B)
    offloaded = parse_plan("fsdp=256,offload=activations")
    found = StepPredictor("dgx-h100-x256", None).predict(work, offloaded)
    # Of a layer: residuals and norms, attention, feed-forward, log-sum-exps; two layers stay.
    tokens = 16384
    layer = 2 * tokens * (4 * 16384 + 128 * (2 * 128 + 2 * 8) + 3 * 53248) + 4 * tokens * 128
    host = 8 * 124 * layer
    data = found.to_dict()
    assert data["host_memory_bytes_per_box"] == pytest.approx(host) and host > 7 * 2**40
    assert data["host_capacity_bytes_per_box"] == 2e12
    assert found.fit.worst.total < found.fit.capacity and data["fits"] is False
    assert any("of the host's memory in a box of 8" in note for note in found.notes())
    printed = StringIO()
    print_step(Console(file=printed, width=120), found)
    assert "does NOT fit" in printed.getvalue() and "of a box of 8" in printed.getvalue()
    # What helps fits the host, too: inputs of 124 layers are an eighth of that.
    assert found.fit.plan.recompute == "full"
    assert 8 * 126 * 2 * tokens * 16384 < 2e12
    # A file says how large the hosts are.
    own = tmp_path / "own.yaml"
    save_cluster(replace(find_cluster("dgx-h100-x256"), host_memory=9e12), own)
    large = StepPredictor(own, None).predict(work, offloaded)
    assert large.fit.fits and not any("host" in note for note in large.notes())
    own.write_text(own.read_text().replace("host_memory_gb: 9000", "host_memory_gb: many"))
    with pytest.raises(DeviceError, match="host_memory_gb"):
        find_cluster(own)
    # Of a pipeline in one box, stages have fewer micro-batches in flight the later they are.
    small = make_workload("llama", LLAMA | {"batch": 16})
    piped = StepPredictor("h100-sxm-x4", None).predict(
        small, parse_plan("pp=4,microbatches=16,offload=activations"), remedy=False
    )
    one = 2 * 8192 * (4 * 4096 + 128 * (2 * 32 + 2 * 8) + 3 * 14336) + 4 * 8192 * 32
    assert piped.fit.offloaded == pytest.approx(one * (8 * (4 + 3 + 2 + 1) - 4 * 2))


def test_advice_does_not_offload_what_the_host_has_no_room_for(tmp_path):
    work = make_workload("llama", LLAMA | {"batch": 64})
    plan = parse_plan("fsdp=64,microbatches=1")
    cluster = replace(find_cluster("dgx-h100-x64"), host_memory=1e9)
    spec = replace(find_device("h100-sxm"), memory_bytes=12e9)
    roomy = replace(cluster, host_memory=1e15)
    changes = [StepPredictor(c, None, spec).predict(work, plan).fit for c in (roomy, cluster)]
    assert "offload=" in changes[0].change
    assert "offload=" not in changes[1].change


def test_a_plan_short_of_a_few_mebibytes_says_how_many():
    held = StageMemory(5 * 2**30, 10 * 2**30, 31 * 2**30, 33 * 2**30, 2**30, 20 * 2**20, 0)
    assert "needs 80.020 GiB of 80.000 GiB: " in Fit((held,), 80.0 * 2**30).reason()
    assert "needs 80.0 GiB of 64.0 GiB: " in Fit((held,), 64.0 * 2**30).reason()


def test_jitter_makes_samples(operators):
    predictor = StepPredictor(find_cluster("h100-sxm-x8"), operators)
    w = make_workload("llama", {**LLAMA, "layers": 4, "batch": 8, "vocab": 32000})
    found = predictor.predict(w, parse_plan("tp=4,pp=2"), jitter=0.05, speeds={0: 0.8})
    samples = found.to_dict()["samples"]
    assert samples["p5_us"] < samples["p50_us"] < samples["p95_us"]
    assert samples["p50_us"] > found.step.total * 1e6


def test_page_stands_alone_and_draws_every_task(operators):
    predictor = StepPredictor(find_cluster("h100-sxm-x8"), operators)
    w = make_workload("llama", {**LLAMA, "layers": 4, "batch": 8, "vocab": 32000})
    found = predictor.predict(w, parse_plan("tp=2,pp=4"))
    page = step_page(found)
    assert not re.search(r"(?:src|href)=[\"'](?!data:)|url\(|@import", page)
    data = step_data(replace(found, run=training_run({"tokens": 8192e3}, found, 25e9)))
    # 8 sequences of 8192 tokens a step.
    assert data["run"][0].startswith("8,192,000 tokens in 125 steps: ")
    spans = data["spans"]
    kinds = [spans["words"][code] for code in spans["kind"]]
    assert kinds.count("forward") == 4 * 8
    assert max(spans["end"]) == pytest.approx(found.step.total * 1e6, rel=1e-5)


def test_a_device_of_one_s_own_makes_its_cluster_faster(tmp_path, operators):
    chip = tmp_path / "big.yaml"
    chip.write_text("name: big-h100\nbase: h100-sxm\ncore_count: 264\nhbm_bandwidth_gbps: 6700\n")
    box = find_cluster("h100-sxm-x8")
    own = type(box)("big-box", str(chip), box.topology)
    w = make_workload("llama", {**LLAMA, "layers": 2, "batch": 8, "vocab": 32000})
    times = [
        StepPredictor(cluster, operators).predict(w, parse_plan("dp=8")).step.compute
        for cluster in (box, own)
    ]
    assert 0.4 < times[1] / times[0] < 0.75


def test_a_name_of_which_nothing_was_learned_is_told(operators):
    w = make_workload("llama", {**LLAMA, "layers": 2, "batch": 8})

    def said(source):
        predictor = StepPredictor(find_cluster("h100-sxm-x8"), operators, source=source)
        return [n for n in predictor.predict(w, Plan(dp=8)).notes() if "nothing was learned" in n]

    assert said("own") == said("mosaicml/llm-foundry") == []
    (note,) = said("llm-foundry")
    assert "'llm-foundry' with h100-sxm; known on it: " in note and "mosaicml/llm-foundry" in note


def test_unknown_devices_and_plans_are_refused(operators):
    cluster = find_cluster("h100-sxm-x8")
    with pytest.raises(PlanError, match="8"):
        StepPredictor(cluster, operators).predict(make_workload("llama", LLAMA), Plan(dp=4))
    nameless = type(cluster)("mine", "", cluster.topology)
    with pytest.raises(DeviceError, match="device"):
        StepPredictor(nameless, operators)


def test_16384_devices_take_a_second_at_most(operators):
    w = make_workload("llama", {**LLAMA, "batch": 4096})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    predictor = StepPredictor(find_cluster("dgx-h100-x16384"), operators)
    found = predictor.predict(w, parse_plan("tp=8,pp=8,dp=256"))
    assert found.plan.devices == 16384
    # Under a second on an idle core; busy machines get time.
    assert time.process_time() - start < 5.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 500e6
