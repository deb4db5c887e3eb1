"""Deployments under loads: memory, latencies, intervals, timeline and page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.models.serving.effects import ServingEffects
from opcast.models.serving.model import Known, OwnStack, ServingModel
from opcast.predict.cluster.deployment import Deployment, Workers, deployment_of, on_cluster
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import (
    EngineOptions,
    FleetCase,
    LoadSpec,
    ModelCase,
    ServingCase,
)
from opcast.predict.cluster.serving_engine import cache_transfer
from opcast.predict.cluster.serving_load import draw, load_of, parse_slo
from opcast.predict.cluster.serving_prediction import ServingPrediction
from opcast.predict.export.timeline import serving_trace
from opcast.predict.page.cluster import serving_data, serving_page
from opcast.simulate.serving.checkpoints import served_by_name
from opcast.simulate.serving.latencies import Slo, served
from opcast.simulate.serving.load import CLASSES, Load
from opcast.simulate.serving.served import EnginePlan, Formats, ServedModel, in_formats
from opcast.simulate.step.memory import RESERVED_BYTES
from opcast.simulate.step.named_workloads import make_workload

LLAMA = make_workload(
    "llama",
    {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256},
)
FOUR = Workers(EnginePlan(tp=4, moe_tp=4))
PLAIN = Deployment(ServedModel(LLAMA), "h100-sxm", engine=FOUR)
SPEC = LoadSpec(prompt="512", output="64", concurrency=8, count=40)


@pytest.fixture(scope="module")
def predictor() -> ServingPredictor:
    return ServingPredictor(None, ServingModel())


def test_memory_by_hand(predictor: ServingPredictor) -> None:
    found = predictor.predict(PLAIN, SPEC)
    capacity, weights = (0.992 * 80 - 0.2) * 2**30, 8_030_261_248 * 2 / 4
    assert sum(found.memory.values()) == pytest.approx(capacity)
    assert found.memory["left alone"] == pytest.approx(0.1 * capacity)
    held = sum(found.memory[name] for name in ("embedding and head", "attention", "feed-forward"))
    assert held == pytest.approx(weights, rel=1e-3)
    # Keys and values of 32 layers, two heads of 128 in 16 bits on each device.
    cache = 0.9 * capacity - RESERVED_BYTES - held
    assert found.cache_tokens == int(cache / (2 * 32 * 2 * 128 * 2))
    told = replace(PLAIN, options=EngineOptions(memory=0.5))
    assert predictor.predict(told, SPEC).cache_tokens < 0.6 * found.cache_tokens


def test_what_does_not_fit_is_named(predictor: ServingPredictor) -> None:
    large = replace(PLAIN, model=ServedModel(replace(LLAMA, layers=1000)))
    with pytest.raises(PlanError, match="are missing, from feed-forward on ") as raised:
        predictor.predict(large, SPEC)
    parts = "(weights in GiB: embedding and head "
    assert parts in str(raised.value) and "more devices" in str(raised.value)
    with pytest.raises(PlanError, match="needs"):
        predictor.predict(PLAIN, replace(SPEC, prompt="9000000"))


def test_decoding_is_bound_by_reading_weights(predictor: ServingPredictor) -> None:
    one = predictor.predict(PLAIN, LoadSpec(prompt="16", output="64", concurrency=1, count=1))
    least = 8_030_261_248 * 2 / 4 / 3.35e12
    assert one.figures["tpot/mean"].value > 0.9 * least


def test_no_end_of_an_interval_is_below_the_data_sheet() -> None:
    ends = {f"{m}": (-4.0, 1.0) for m in ("ttft", "ttft-queued", "tpot", "per_token", "e2e")}
    wide = ServingModel(ends=ends, provenance=Known(vendors=()))
    # Runs that took a fiftieth of the time of these engines teach nothing beyond the data sheet.
    fast = replace(wide, effects=ServingEffects({"whole/engine/vllm now": -4.0}))
    lone = LoadSpec(prompt="512", output="65", concurrency=1, count=4)
    # Weights of all layers and the head on four devices that keep 50 MB each; two heads' cache.
    weights = (8_030_261_248 - 128256 * 4096) * 2 / 4 - 50 * 2**20
    least = (weights + (512 + 65 / 2) * 32 * 2 * 2 * 128 * 2) / 3.35e12
    multiplied = 2 * (8_030_261_248 - 2 * 128256 * 4096) / 4 * 512
    first = (multiplied + 32 * 8 * 4 * 128 * 512 * 513 / 2) / 989.4e12
    for model in (wide, fast):
        found = ServingPredictor(None, model).predict(PLAIN, lone)
        tpot, ttft, whole = (found.figures[f"{m}/mean"] for m in ("tpot", "ttft", "e2e"))
        assert tpot.lo == pytest.approx(least, rel=1e-3)
        assert ttft.lo == pytest.approx(first, rel=1e-3)
        assert whole.lo == pytest.approx(first + 64 * least, rel=1e-3)
        assert found.figures["itl/p50"].lo == pytest.approx(least, rel=1e-3)
        # One in flight over the shortest request are the most a second.
        assert found.requests_per_s.hi * whole.lo == pytest.approx(1.0, rel=0.01)
    # The last of them is the fast one.
    assert (tpot.value, ttft.value) == pytest.approx((least, first), rel=1e-3)
    # So has an open load; of prompts that a cache has, only the weights have to be read.
    spec = LoadSpec(prompt="512", output="65", rate=0.1, count=20)
    alone = ServingPredictor(None, fast).predict(PLAIN, spec)
    assert alone.figures["tpot/mean"].lo == pytest.approx(least, rel=1e-3)
    known = ServingPredictor(None, fast).predict(
        replace(PLAIN, options=EngineOptions(prefix_hits=0.9)), spec
    )
    assert alone.figures["ttft/mean"].lo == pytest.approx(first, rel=1e-3)
    assert known.figures["ttft/mean"].lo == pytest.approx(weights / 3.35e12, rel=1e-3)


def test_throughput_and_latencies_agree(predictor: ServingPredictor) -> None:
    found = predictor.predict(PLAIN, SPEC)
    rate = found.requests_per_s.value
    assert rate == pytest.approx(40 / found.run.makespan)
    assert found.tokens_per_s.value == pytest.approx(64 * rate)
    # Little's law: requests in flight are those that come while one is served.
    assert rate * found.figures["e2e/mean"].value == pytest.approx(8, rel=0.05)
    for interval in found.figures.values():
        assert interval.lo <= interval.value <= interval.hi
    by_token = found.figures["itl/mean"].value
    assert by_token == pytest.approx(found.figures["tpot/mean"].value, rel=1e-6)


def test_ends_of_a_closed_loop_keep_to_littles_law(predictor: ServingPredictor) -> None:
    apart = {"ttft": (-0.6, 4.0), "ttft-queued": (-2.9, 2.3), "tpot": (-1.1, 1.9), "e2e": (-1, 1.5)}
    ends = {f"{kind}-apart": end for kind, end in apart.items()}
    shipped = ServingPredictor(None)
    wide = ServingPredictor(None, ServingModel(ends=ends, provenance=Known(vendors=("none",))))
    two = replace(PLAIN, prefill=FOUR)
    for made in (wide.predict(two, SPEC), shipped.predict(two, SPEC), shipped.predict(PLAIN, SPEC)):
        rate, whole = made.requests_per_s, made.figures["e2e/mean"]
        # Eight in flight over the longest request are the fewest a second.
        for one, other in ((rate.value, whole.value), (rate.lo, whole.hi), (rate.hi, whole.lo)):
            assert one * other == pytest.approx(8, rel=0.05)
        for level in ("mean", "p50", "p90", "p99"):
            assert made.figures[f"ttft/{level}"].hi <= made.figures[f"e2e/{level}"].hi
            assert made.figures[f"tpot/{level}"].hi * 63 <= 1.05 * made.figures[f"e2e/{level}"].hi
    assert any("separate prefill workers" in note for note in wide.predict(two, SPEC).notes)
    # All sent at once, the longest ends with the run.
    batch = shipped.predict(PLAIN, LoadSpec(prompt="512", output="64", count=40))
    assert batch.figures["e2e/p99"].hi <= 1.001 * 40 / batch.requests_per_s.lo


def test_an_interval_passes_from_one_kind_to_the_other() -> None:
    ends = {"ttft": (-0.5, 1.0), "ttft-queued": (-2.0, 2.0)}
    model = ServingModel(ends=ends)
    lows, highs = zip(
        *(model.interval("ttft", "new", q, {}, 1.0) for q in np.linspace(0.25, 0.7, 11)),
        strict=True,
    )
    assert lows[0] == pytest.approx(np.exp(-0.5)) and highs[10] == pytest.approx(np.exp(2.0))
    # Half way between times that hardly wait and those that wait: a sum of two parts.
    assert highs[5] == pytest.approx((np.exp(1.0) + np.exp(2.0)) / 2)
    outer = [model.interval("ttft", "new", q, {}, 1.0) for q in (0.0, 1.0)]
    assert outer == [(lows[0], highs[0]), (lows[10], highs[10])]
    assert (np.diff(lows) < 0).all() and (np.diff(highs) > 0).all()
    assert np.abs(np.diff(highs)).max() == pytest.approx((highs[10] - highs[0]) / 10)


def test_an_open_load_bounds_the_throughput(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="128", output="16", rate=5.0, count=200)
    found = predictor.predict(PLAIN, spec)
    offered = 200 / draw(spec).arrivals[-1]
    assert found.requests_per_s.hi <= 1.01 * offered
    assert found.requests_per_s.value == pytest.approx(offered, rel=0.05)


def test_a_rate_over_a_short_run_says_what_was_offered(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="128", output="512", rate=5.0, count=30)
    found = predictor.predict(PLAIN, spec)
    last, whole = float(draw(spec).arrivals[-1]), found.run.makespan
    assert found.requests_per_s.value == pytest.approx(30 / whole) and 30 / whole < 4.9
    (note,) = [note for note in found.notes if "offered" in note]
    assert note.startswith(
        f"the offered rate is 5 requests/s ({30 / last:.3g} as drawn), which the engines sustain"
    )
    assert f"{30 / whole:.3g} requests/s is the mean over the whole run" in note
    assert f"last {whole - last:.3g} of {whole:.3g} s after the last request" in note
    closed = predictor.predict(PLAIN, SPEC)
    assert not any("offered" in note for note in closed.notes)


def test_closed_loops_with_equal_outputs_say_that_they_stay_in_step() -> None:
    """Random prompts do not break the step, random outputs do: 64 in flight on tp=8, as a user."""
    predictor = ServingPredictor(None, ServingModel())

    def asked(prompt: str, output: str) -> ServingPrediction:
        return predictor.predict(
            PLAIN, LoadSpec(prompt=prompt, output=output, concurrency=64, count=640)
        )

    for prompt, output in (
        ("1000", "500"),
        ("uniform:900:1100", "500"),
        ("1000", "uniform:498:502"),
    ):
        found = asked(prompt, output)
        (note,) = [note for note in found.notes if "equal output lengths" in note]
        assert "as with --output uniform:400:600, the time to the first token is" in note
        # The drifted loop is not saturated: the engines keep up.
        assert not any("saturated" in own for own in found.notes)
    stuck, loose = asked("uniform:900:1100", "500"), asked("uniform:900:1100", "uniform:400:600")
    assert loose.figures["ttft/mean"].value < 0.5 * stuck.figures["ttft/mean"].value
    assert not any("equal output lengths" in note for note in loose.notes)
    # The burst at the start alone waits, and decides the mean; half of the others hardly do.
    assert loose.queued > 0.5
    assert not any("saturated" in note for note in loose.notes)
    # One engine that takes 16 at a time leaves 48 of 64 in its queue, whatever the lengths.
    full = replace(PLAIN, options=EngineOptions(max_batch=16))
    spec = LoadSpec(prompt="uniform:900:1100", output="uniform:400:600", concurrency=64, count=640)
    assert any("saturated" in note for note in predictor.predict(full, spec).notes)


def test_a_trace_that_says_what_prompts_share_saturates_no_more_than_one_that_does_not() -> None:
    # A small load of prompts of 1 to 8 blocks, a third of which begin alike, ten seconds apart.
    known = {f"{m}": (-0.3, 0.3) for m in ("ttft", "ttft-queued", "tpot", "per_token")}
    model = ServingModel(ends=known, provenance=Known(vendors=()))
    predictor = ServingPredictor(None, model)
    prompts = 512 * (1 + np.arange(60) % 8)
    blocks = [
        tuple((0 if i % 3 == 0 else 1000 * i) + j for j in range(n // 512))
        for i, n in enumerate(prompts)
    ]
    plain = Load(prompts, np.full(60, 64), 10.0 * np.arange(60))
    spec = LoadSpec(requests=Path("requests.jsonl"))
    without = predictor.predict(PLAIN, spec, load=plain)
    shared = predictor.predict(PLAIN, spec, load=replace(plain, blocks=blocks))
    assert shared.run.hit_tokens > 0 and shared.figures["ttft/mean"] < without.figures["ttft/mean"]
    for found in (without, shared):
        assert found.overload < 0.01 and found.queued < 0.05
        # Ends of what is served are those of the time until the last request is answered.
        assert found.requests_per_s.lo > 0.97 * found.requests_per_s.value
        assert not any("saturated" in note or "keep up" in note for note in found.notes)


def test_upper_ends_of_a_load_do_not_grow_with_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServingEffects, "spread", lambda *_: 1.0)
    # 90 % of engines take between half and twice the estimated time.
    two = float(np.log(2.0))
    known = dict.fromkeys(("tpot", "per_token"), (-two, two))
    sure = dict.fromkeys(("ttft", "ttft-queued"), (-0.1, 0.1))
    model = ServingModel(ends=known | sure)
    predictor = ServingPredictor(None, model)
    own = replace(PLAIN, options=EngineOptions(max_batch=8))
    # Of unequal outputs, since equal ones sent at once share passes over prompts.
    alike = LoadSpec(prompt="256", output="uniform:32:96", count=480)
    most = predictor.predict(own, alike).requests_per_s
    # At 70 % of what they serve, engines that take 1 / 0.7 of the time do not keep up.
    spec = replace(alike, rate=0.7 * most.value, count=1000)
    short, long = (predictor.predict(own, replace(spec, count=n)) for n in (1000, 4000))
    likely = 1.0 - NormalDist().cdf(1.645 * np.log(1.0 / 0.7) / np.log(2.0))
    assert short.overload == pytest.approx(likely, abs=0.05)
    first, later = (each.figures["ttft/p90"] for each in (short, long))
    # A queue that grows as long as requests come would be four times as long.
    assert later.hi < 2.5 * first.hi
    # Engines at an end run other batches: times between tokens are as much further off.
    each, gap = (short.figures[f"{name}/mean"] for name in ("tpot", "itl"))
    assert gap.hi / gap.value == pytest.approx(each.hi / each.value)
    # None of them is below its floor.
    assert gap.lo / gap.value == pytest.approx(each.lo / each.value, rel=0.1)
    # With an SLO on the queue it is not sure that any request keeps it.
    kept = predictor.predict(own, spec, slo=Slo(ttft=100.0)).good
    assert (kept.value, kept.lo) == (1.0, 0.0)
    # Throughput of the slowest is what they serve, however little is offered beyond.
    assert short.requests_per_s.lo == pytest.approx(most.value / 2.0, rel=0.1)
    idle = predictor.predict(own, replace(spec, rate=0.1 * most.value), slo=Slo(ttft=100.0))
    assert idle.overload < 0.01 and idle.good.lo == 1.0


def test_a_first_token_of_workers_apart_may_take_many_times_as_long() -> None:
    """Some servers take seconds for the first token, which no column explains (docs/serving.md)."""
    model = served_by_name("deepseek-v3", {}, Formats())
    eight = Workers(EnginePlan(tp=8, moe_tp=8))
    own = Deployment(model, "h200-sxm", framework="sglang", engine=eight, prefill=eight)
    spec = LoadSpec(prompt="2048", output="512", rate=4.0, count=150)
    first = ServingPredictor(None).predict(own, spec).figures["ttft/mean"]
    assert first.value / 7.0 < first.lo < first.value < first.hi < 40.0 * first.value


def test_requests_beyond_a_known_context_are_told(predictor: ServingPredictor) -> None:
    # 576 tokens a request.
    for context, told in ((0, 0), (576, 0), (575, 1)):
        notes = predictor.predict(replace(PLAIN, context=context), SPEC).notes
        found = [note for note in notes if "max_position_embeddings" in note]
        assert len(found) == told
    assert found[0].startswith("40 of 40 requests are longer than the 575 tokens")
    assert "the longest by 1:" in found[0]


def test_an_slo_counts_requests(predictor: ServingPredictor) -> None:
    found = predictor.predict(PLAIN, SPEC)
    ttft = (found.run.first - found.run.sent) * 1.0
    middle = float(np.median(ttft))
    kept = predictor.predict(PLAIN, SPEC, slo=Slo(ttft=middle)).good
    assert kept.value == pytest.approx((ttft <= middle).mean())
    assert kept.lo <= kept.value <= kept.hi
    data = predictor.predict(PLAIN, SPEC, slo=Slo(ttft=10.0)).to_dict()
    assert data["request_goodput:"] == data["request_throughput"]


def test_slos_are_read() -> None:
    assert parse_slo("ttft=500ms,tpot=0.03s,e2e=20s") == Slo(0.5, 0.03, 20.0)
    assert parse_slo("") == Slo() and parse_slo("ttft=.5s,tpot=1e1ms") == Slo(0.5, 0.01)
    for text in ("ttft=-1ms", "ttft=0ms", "speed=3s", "ttft=soon", "ttft=1", "e2e=20000"):
        with pytest.raises(PlanError, match="is not an SLO") as refused:
            parse_slo(text)
        assert "ttft, tpot or e2e above 0" in refused.value.hint
    with pytest.raises(PlanError, match="SLO: 'ttft' is not of the form key=value"):
        parse_slo("ttft")


def test_every_option_changes_something(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="600", output="200", concurrency=32, count=96)
    options = {
        "max_batch": 4,
        "token_budget": 256,
        "chunked": False,
        "prefix_hits": 0.5,
        "eager": True,
        "memory": 0.075,
        "block": 512,
        "watermark": 0.5,
        "drafts": 3,
    }
    tight = EngineOptions(memory=0.078, token_budget=700)
    base = replace(PLAIN, options=tight)
    # Some 17,000 tokens of cache for 32 requests of 800, so that some are evicted.
    plain = predictor.predict(base, spec)
    assert plain.run.evicted > 0
    other = predictor.predict(replace(base, framework="sglang"), spec)
    assert other.run.makespan != plain.run.makespan
    for name, value in {**options, "preemption": "swap"}.items():
        changed = replace(base, options=replace(tight, **{name: value}))
        assert predictor.predict(changed, spec).run.makespan != plain.run.makespan, name


def test_a_prompt_is_not_shared_out_over_stages_and_ranks(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="8192", output="2", concurrency=1, count=1)

    def ttft(model: ServedModel, plan: EnginePlan) -> float:
        own = replace(PLAIN, model=model, engine=Workers(plan))
        return predictor.predict(own, spec).figures["ttft/mean"].value

    # Every stage waits for the one before: 2 FLOP for each of 7.5e9 weights and each token.
    one = ttft(ServedModel(LLAMA), EnginePlan())
    assert 8192 * 2 * 7.5e9 / 989.4e12 < one < ttft(ServedModel(LLAMA), EnginePlan(pp=8))
    # Seven ranks of their own do not help with the attention of the eighth's prompt.
    moe = ServedModel(replace(LLAMA, d_ff=1024, experts=64, top_k=8))
    assert ttft(moe, EnginePlan(tp=8, ep=8)) < ttft(moe, EnginePlan(dp=8, ep=8))


def test_the_host_schedules_a_step_of_drafts_once(predictor: ServingPredictor) -> None:
    small = ServedModel(replace(LLAMA, layers=2))
    drafted = EngineOptions(drafts=2, accepted=2.0)
    in_turn = replace(PLAIN, framework="vllm", version="0.13")
    own = replace(in_turn, options=drafted, draft=small)
    station = predictor.simulate(own, SPEC).stations[0]
    assert station.costs.decode(8, 4096, 5)[CLASSES.index("host")] == 5.0
    # Tokens are verified at the cost of one pass over the weights: a single sequence gains.
    alone = replace(SPEC, concurrency=1, count=5)
    with_drafts, without = (predictor.simulate(one, alone) for one in (own, in_turn))
    assert with_drafts.seconds("tpot") < 0.7 * without.seconds("tpot")


def test_a_draft_model_costs_its_passes_and_memory(predictor: ServingPredictor) -> None:
    drafted = EngineOptions(drafts=2, accepted=2.0)
    free = replace(PLAIN, options=drafted)
    small = ServedModel(replace(LLAMA, layers=4))
    paid = replace(free, draft=small)
    one, other = (predictor.predict(d, SPEC) for d in (free, paid))
    assert other.figures["tpot/mean"].value > 1.1 * one.figures["tpot/mean"].value
    assert other.memory["draft model"] > 0
    with pytest.raises(PlanError, match="4 tokens a step of 2 drafts"):
        replace(free, options=replace(drafted, accepted=4.0))


def test_without_a_prefix_cache_nothing_is_found() -> None:
    load = replace(draw(SPEC), blocks=((1, 2),) * 40)
    assert load_of(PLAIN, load).blocks
    assert not load_of(replace(PLAIN, options=EngineOptions(prefix_cache=False)), load).blocks


def test_workers_apart_move_caches(predictor: ServingPredictor) -> None:
    apart = replace(PLAIN, prefill=FOUR)
    moved = cache_transfer(apart)(1000)
    # 131,072 bytes a token over four links of 450 GB/s each way, four fifths of which it gets.
    assert moved == pytest.approx(1e-3 + 1000 * 131_072 / (4 * 450e9 * 0.8), rel=0.01)
    slow = replace(apart, options=EngineOptions(transfer=1e9))
    fast, late = (predictor.predict(d, SPEC) for d in (apart, slow))
    gap = late.figures["ttft/p50"].value - fast.figures["ttft/p50"].value
    assert gap > 0.5 * 512 * 131_072 / 1e9
    assert fast.deployment.devices == 8
    assert "prefill" in fast.deployment.text()
    # 512 tokens of 131,072 bytes take 0.067 s of a link of 1 GB/s: 15 requests a second at most.
    for rate, overload in ((10.0, 0.0), (20.0, 1.0)):
        open_load = replace(SPEC, prompt="512", concurrency=0, rate=rate, count=200)
        found = predictor.predict(slow, open_load)
        assert found.overload == pytest.approx(overload, abs=0.05)
    assert any("of what the links between them can transfer" in note for note in found.notes)
    assert found.states["queue_max"] > 10


@pytest.mark.parametrize(
    ("name", "plan", "framework", "refused"),
    [
        # Experts of 1536 columns over 8 ranks are 192 each, over 4 three whole blocks of 128.
        ("Qwen/Qwen3-235B-A22B-FP8", "tp=8", "vllm", True),
        ("Qwen/Qwen3-235B-A22B-FP8", "tp=4", "vllm", False),
        ("Qwen/Qwen3-235B-A22B-FP8", "tp=8,ep=8", "sglang", False),
        ("Qwen/Qwen3-235B-A22B-FP8", "tp=8", "tensorrt-llm", False),
        ("Qwen/Qwen3-235B-A22B", "tp=8", "vllm", False),
        # 25600 columns over 16 ranks are 12.5 blocks.
        ("Qwen/Qwen3-32B-FP8", "tp=16", "vllm", True),
        # 2048 columns: 16 ranks have a block each, 32 half of one.
        ("deepseek-v3", "tp=16", "vllm", False),
        ("deepseek-v3", "tp=32", "sglang", True),
    ],
)
def test_plans_that_cut_blocks_of_scales_are_refused(
    name: str, plan: str, framework: str, refused: bool
) -> None:
    case = ServingCase(
        ModelCase(name, framework=framework), FleetCase(device="h100-sxm", plan=plan)
    )
    if not refused:
        assert deployment_of(case).engine.plan.text() == plan
        return
    with pytest.raises(PlanError, match=f"{framework} refuses {plan}: .* no whole blocks of 128"):
        deployment_of(case)


def test_deployments_that_are_none() -> None:
    with pytest.raises(PlanError, match=r"generates nothing .*for an encoder, use opcast predict"):
        replace(PLAIN, model=ServedModel(replace(LLAMA, causal=False)))
    with pytest.raises(PlanError, match=r"tp=5 does not divide 32 heads \(tp is 1, 2, 4,"):
        replace(PLAIN, engine=Workers(EnginePlan(tp=5, moe_tp=5)))
    with pytest.raises(PlanError, match="hit rate"):
        replace(PLAIN, options=EngineOptions(prefix_hits=1.0))


def test_engines_fill_a_cluster() -> None:
    assert on_cluster("h100-sxm-x8", EnginePlan(tp=2, moe_tp=2)) == (
        "h100-sxm",
        Workers(EnginePlan(tp=2, moe_tp=2), 4),
    )
    with pytest.raises(PlanError, match="16 devices, h100-sxm-x8 has 8"):
        on_cluster("h100-sxm-x8", EnginePlan(tp=8, moe_tp=8), 2)
    # Workers that run prompts take their devices first.
    assert on_cluster("h100-sxm-x8", FOUR.plan, prefill=FOUR)[1] == FOUR
    with pytest.raises(PlanError, match=r"12 devices \(8 of them run prompts\), h100-sxm-x8 has 8"):
        on_cluster("h100-sxm-x8", FOUR.plan, prefill=replace(FOUR, count=2))
    with pytest.raises(PlanError, match="12 devices"):
        on_cluster("h100-sxm-x8", FOUR.plan, 2, prefill=FOUR)


def test_formats_of_checkpoints() -> None:
    moe = replace(LLAMA, experts=8, top_k=2)
    assert in_formats(moe, Formats("mxfp4")).weights == "bf16"
    assert in_formats(LLAMA, Formats("mxfp4")).weights == "mxfp4_a4"
    assert in_formats(LLAMA, Formats("mxfp4", activations="bf16")).weights == "mxfp4"
    assert in_formats(LLAMA, Formats("fp8", framework="tensorrt-llm")).cache == "fp8"
    assert in_formats(LLAMA, Formats("fp8", activations="bf16")).weights == "fp8_wo"
    with pytest.raises(PlanError, match="activations in 'fp4'"):
        in_formats(LLAMA, Formats("fp8", activations="fp4"))
    assert in_formats(LLAMA, Formats(cache="FP8_E4M3")).cache == "fp8"
    assert in_formats(LLAMA, Formats(cache="f16")).cache == "bf16"
    with pytest.raises(PlanError, match="a cache in 'banana' is not known"):
        in_formats(LLAMA, Formats(cache="banana"))


def test_weights_alone_in_fp8_cost_arithmetic_in_16_bits(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="8192", output="2", concurrency=1, count=1)
    both, alone = (
        predictor.predict(replace(PLAIN, model=in_formats(LLAMA, formats)), spec)
        for formats in (Formats("fp8"), Formats("fp8", activations="bf16"))
    )
    assert alone.memory["feed-forward"] == both.memory["feed-forward"]
    assert alone.figures["ttft/mean"].value > 1.3 * both.figures["ttft/mean"].value


def test_weights_of_4_bits_are_widened_without_units_for_them(predictor: ServingPredictor) -> None:
    spec = LoadSpec(prompt="8192", output="64", concurrency=1, count=1)
    plain, whole, narrow = (
        predictor.predict(replace(PLAIN, model=in_formats(LLAMA, Formats(name))), spec)
        for name in ("bf16", "int4", "nvfp4")
    )

    def of(found: ServingPrediction, name: str) -> float:
        return found.figures[name].value

    assert of(narrow, "ttft/mean") == pytest.approx(of(plain, "ttft/mean"), rel=0.05)
    assert of(narrow, "tpot/mean") == pytest.approx(of(whole, "tpot/mean"), rel=0.1)
    said = "h100-sxm has no nvfp4 units: matrix products convert the weights and run in 16 bits"
    assert said in narrow.notes and said not in whole.notes
    new = replace(PLAIN, device="b200", model=in_formats(LLAMA, Formats("nvfp4")))
    wide = replace(new, model=in_formats(LLAMA, Formats("bf16")))
    fast, slow = predictor.predict(new, spec), predictor.predict(wide, spec)
    assert of(fast, "ttft/mean") < 0.75 * of(slow, "ttft/mean")
    assert not any("nvfp4" in note for note in fast.notes)


def test_a_model_of_images_and_text_is_told_to_be_described_by_its_text(
    predictor: ServingPredictor,
) -> None:
    by_name = replace(PLAIN, model=served_by_name("Qwen/Qwen3-VL-8B-Instruct", {}, Formats()))
    said = "the vision encoder is left out; images count as the tokens of the prompt that they are"
    assert said in predictor.predict(by_name, SPEC).notes
    assert not served_by_name("Qwen/Qwen3-8B", {}, Formats()).left_out


def test_a_stack_of_ones_own_is_known_by_its_device() -> None:
    model = ServingModel(provenance=Known(own={"mine|h100-sxm": OwnStack(0.5)}))
    predictor = ServingPredictor(None, model)
    own = predictor.own(PLAIN)
    assert (own.source, own.options.memory) == ("mine", 0.5)
    other = predictor.own(replace(PLAIN, device="h200-sxm"))
    assert (other.source, other.options.memory) == ("", 0.0)


def test_timeline_and_page(predictor: ServingPredictor) -> None:
    two = replace(PLAIN, engine=replace(FOUR, count=2))
    run = predictor.simulate(two, SPEC, record=True)
    # As if first tokens were learned to take 0.8 of what they take on the engines' clock.
    seen = served(run.load, run.run, 0.8, floor=run.floor)
    found = predictor.judge(replace(run, first=0.8, seen=seen))
    trace = serving_trace(found)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    passes = [e for e in events if e["ph"] == "X" and e["pid"] < 2]
    # Of a closed loop, passes end when all of its requests are served.
    assert max(e["ts"] + e["dur"] for e in passes) == pytest.approx(
        40e6 / found.requests_per_s.value
    )
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    tokens = [e["dur"] for e in spans if e["cat"] == "ttft"]
    assert len(tokens) == 40
    # What is drawn is what is printed.
    engines = float(np.mean(run.run.first - run.run.sent)) * 1e6
    assert np.mean(tokens) == pytest.approx(found.figures["ttft/mean"].value * 1e6)
    assert np.mean(tokens) == pytest.approx(0.8 * engines)
    assert sum(e["dur"] for e in spans) / 40 == pytest.approx(found.figures["e2e/mean"].value * 1e6)
    shown = serving_data(found)
    assert np.mean(shown["ttft"]) == pytest.approx(found.figures["ttft/mean"].value * 1e6, rel=1e-3)
    assert np.mean(shown["e2e"]) == pytest.approx(found.figures["e2e/mean"].value * 1e6, rel=1e-3)
    assert {e["name"] for e in events if e["ph"] == "C"} == {"requests", "cache"}
    page = serving_page(found)
    assert "2 x (tp=4)" in page and "http" not in page.split("<script>")[0].split("csp")[0][400:]
    json.dumps(found.to_dict())


def test_energy_and_cost_of_a_request(predictor: ServingPredictor) -> None:
    found = predictor.predict(PLAIN, SPEC)
    assert found.energy is not None
    # Four devices of 700 W, between a board that waits and its limit.
    most = 4 * 700 * found.run.makespan
    assert 0.15 * most < found.energy.value < most
    assert found.energy.lo < found.energy.value < found.energy.hi
    data = found.to_dict(price=2.0)
    assert data["joules_per_request"] == pytest.approx(found.energy.value / 40)
    assert data["joules_per_output_token"] == pytest.approx(found.energy.value / (40 * 64))
    # Four devices at 2 $ an hour over the tokens that they make in it.
    rate = found.tokens_per_s.value
    assert data["dollars_per_million_tokens"] == pytest.approx(8.0 / 3600 / rate * 1e6)
    assert data["dollars_per_request"] == pytest.approx(8.0 / 3600 / found.requests_per_s.value)
    assert data["dollars_per_request_lo"] < data["dollars_per_request"]
    assert not any(name.startswith("dollars") for name in found.to_dict())


def test_a_name_of_which_nothing_was_learned_is_told() -> None:
    known = Known(clusters=("lab|h100-sxm", "lab|l4"))
    model = replace(ServingModel(), provenance=known)

    def said(source: str) -> list[str]:
        notes = ServingPredictor(None, model).predict(replace(PLAIN, source=source), SPEC).notes
        return [note for note in notes if "nothing was learned" in note]

    assert said("") == said("lab") == []
    assert said("lap") == [
        "nothing was learned of machines of 'lap' with h100-sxm; known on it: lab"
    ]
