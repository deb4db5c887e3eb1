"""Effects of serving: what they do to costs, that a fit finds them, and the model's file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.serving.effects import (
    COSTS,
    PRIOR,
    ROUNDS,
    Observed,
    ServingEffects,
    fit_serving,
    linear_serving,
    request_errors,
    simulated_error,
)
from opcast.models.serving.ends import EndKey, Score, kind_of, serving_ends
from opcast.models.serving.model import (
    METRICS,
    REQUEST_TIME,
    Known,
    OwnStack,
    ServingModel,
)

RNG = np.random.default_rng(0)


def context(framework: str, chip: str = "hopper", source: str = "a") -> dict[str, str]:
    return {
        "all": "gpu", "architecture": chip, "framework": framework, "engine": f"{framework} now",
        "format": "bf16", "source": source, "cluster": f"{source}|{chip}", "group": "llama",
    }  # fmt: skip


CONTEXTS = [context("vllm"), context("sglang")] * 60
UNITS = RNG.uniform(0.2, 1.0, (len(CONTEXTS), len(COSTS)))
#: What the two frameworks' hosts really take for a pass, in seconds.
HOST = {"vllm": 4e-3, "sglang": 5e-4}


def costs(effects: ServingEffects, row: int) -> np.ndarray:
    """Costs of a row by class: each about a millisecond at its prior, the host 1."""
    prior = np.array(list(PRIOR.values()))
    units = UNITS[row] * 1e-3 / prior
    units[COSTS.index("host")] = 1.0
    return units * effects.weights(CONTEXTS[row])


def observe(effects: ServingEffects) -> Observed:
    said = np.array([costs(effects, row) for row in range(len(CONTEXTS))])
    plain = np.array([costs(ServingEffects(), row) for row in range(len(CONTEXTS))])
    own = np.array([HOST[c["framework"]] for c in CONTEXTS])
    measured = plain.sum(axis=1) - plain[:, COSTS.index("host")] + own
    count = len(CONTEXTS)
    return Observed(
        np.arange(count),
        np.full(count, "tpot"),
        np.log(measured),
        np.log(said.sum(axis=1)),
        said / said.sum(axis=1, keepdims=True),
        np.zeros(count),
    )


def test_hosts_in_python_begin_at_what_schedulers_between_passes_took() -> None:
    plain, early = (
        dict(zip(COSTS, ServingEffects().weights({"host": said}).tolist(), strict=True))
        for said in ("", "interpreted")
    )
    # At a hundred sequences 9 ms, of vLLM 0.5's 29 % beside 38 % of a GPU's 10 to 12 ms.
    assert early["host"] + 100 * early["sequence"] == pytest.approx(9e-3)
    assert {cost for cost in COSTS if early[cost] != plain[cost]} == {"host", "sequence"}


def test_weights_are_priors_times_effects() -> None:
    logs = {"host/engine/vllm now": np.log(3.0), "whole/engine/vllm now": 0.1}
    effects = ServingEffects({**logs, "first/engine/vllm now": 0.2})
    weights = effects.weights(context("vllm"))
    assert weights[COSTS.index("host")] == pytest.approx(3.0 * np.exp(0.1) * PRIOR["host"])
    assert weights[COSTS.index("decode")] == pytest.approx(np.exp(0.1) * PRIOR["decode"])
    assert effects.first(context("vllm")) == pytest.approx(np.exp(0.2))
    assert effects.weights(context("other")) == pytest.approx(list(PRIOR.values()))
    assert effects.knows("engine", "vllm now") and not effects.knows("engine", "sglang now")


def test_a_fit_finds_what_each_framework_costs() -> None:
    groups = np.array([["a", c["framework"]] for c in CONTEXTS])
    effects, seen = fit_serving(observe, CONTEXTS, groups)
    at = COSTS.index("host")
    found = {name: effects.weights(context(name, source="new"))[at] for name in HOST}
    assert found["vllm"] > 3.0 * found["sglang"]
    errors = linear_serving(seen, CONTEXTS, effects).errors(effects)
    before = observe(ServingEffects())
    assert np.abs(errors).mean() < 0.25 * np.abs(before.measured - before.simulated).mean()


def test_a_fit_that_starts_from_the_best_effects_stays_there() -> None:
    groups = np.array([["a", c["framework"]] for c in CONTEXTS])
    effects, _ = fit_serving(observe, CONTEXTS, groups)
    said: list[str] = []
    _, seen = fit_serving(observe, CONTEXTS, groups, said.append, effects)
    before, after = simulated_error(observe(effects), groups), simulated_error(seen, groups)
    assert after <= before < 0.5 * simulated_error(observe(ServingEffects()), groups)
    # It ends where a round gains less than a hundredth, before the last.
    assert sum("round" in line for line in said) <= ROUNDS


def test_errors_are_weighted_by_what_does_not_wait() -> None:
    seen = Observed(
        np.array([0, 1]), np.array(["tpot", "ttft"]), np.log([2.0, 6.0]), np.log([2.0, 4.0]),
        np.zeros((2, len(COSTS))), np.array([0.0, 1.0]),
    )  # fmt: skip
    # log 2 - log 2 = 0, weight 1; log 3 - log 2, weight 0.5 (1 - 0.8), as groups weigh the same.
    error = simulated_error(seen, np.array([["a", "a"], ["a", "b"]]))
    assert error == pytest.approx(0.1 * np.log(1.5) / 1.1)


def test_owners_count_by_the_root_of_what_they_measured() -> None:
    # Four model groups of one owner off by log 2, one of another by nothing: the four have a weight
    # of 4 / 2, the one of 1.
    off = np.array([np.log(2.0)] * 4 + [0.0])
    seen = Observed(
        np.arange(5), np.array(["tpot"] * 5), off, np.zeros(5), np.zeros((5, len(COSTS))),
        np.zeros(5),
    )  # fmt: skip
    groups = np.array([["a", "1"], ["a", "2"], ["a", "3"], ["a", "4"], ["b", "1b"]])
    assert simulated_error(seen, groups) == pytest.approx(np.log(2.0) * 2.0 / 3.0)


def test_the_deviation_of_a_latency_is_that_of_the_effects_it_rests_on() -> None:
    """Half of the time is the host's, with deviations of 0.3 and 0.4, the rest of sure streams."""
    shares = np.zeros(len(COSTS))
    shares[COSTS.index("host")] = shares[COSTS.index("stream")] = 0.5
    own = context("vllm") | {"any": "any", "stack": "a|vllm now", "era": "now", "shape": "dense"}
    sure = {key: 0.0 for _, key, _ in ServingEffects.levels.of(own)}
    known = ServingEffects({}, sure | {"host/any/any": 0.3, "host/engine/vllm now": 0.4})
    # sqrt(0.1^2 + (0.5 * 0.5)^2)
    assert known.spread(own, "tpot", shares) == pytest.approx(np.hypot(0.1, 0.25))
    known.deviations["first/engine/vllm now"] = 0.2
    assert known.spread(own, "ttft", shares) == pytest.approx(np.sqrt(0.01 + 0.0625 + 0.04))
    # Nobody says whose: the source's effects are as unsure as before anything was learned.
    nobody = {**own, "source": "", "cluster": "", "stack": ""}
    levels = {(level.cost, level.name): level.deviation for level in ServingEffects.levels.levels}
    hidden = [
        levels[cost, name] for cost in ("host", "whole") for name in ("source", "cluster", "stack")
    ]
    host = np.sqrt(0.25 + sum(d**2 for d in hidden[:3])) * 0.5
    expected = np.sqrt(0.01 + host**2 + sum(d**2 for d in hidden[3:]))
    assert known.spread(nobody, "tpot", shares) == pytest.approx(expected)


def test_a_few_runs_of_one_cluster_move_that_cluster_alone() -> None:
    seen = observe(ServingEffects())
    slower = seen._replace(measured=seen.simulated + 0.3)
    known = linear_serving(slower, CONTEXTS, ServingEffects()).adapted()
    assert {key.split("/")[1] for key in known.values} == {"cluster"}
    own = known.weights(context("vllm")).sum()
    assert own > 1.1 * ServingEffects().weights(context("vllm")).sum()
    other = context("vllm", source="b")
    assert known.weights(other) == pytest.approx(list(PRIOR.values()))


def scores(
    kind: str, errors: np.ndarray, new: str = "", tier: str = "model", place: str = ""
) -> list[Score]:
    key = EndKey(kind, place=place)
    context = {"cluster": new}
    return [
        Score(key, tier, context, "g", at, float(error), 0.1) for at, error in enumerate(errors)
    ]


def test_ends_are_in_deviations() -> None:
    # Errors of up to one deviation of 0.1, the outer twentieths of which are cut off.
    ends = serving_ends([*scores("tpot", np.linspace(-0.1, 0.1, 41)), *scores("ttft", np.ones(3))])
    assert ends == {
        "tpot": pytest.approx((-0.9, 0.9), abs=0.1),
        # No end lies beyond 95 % of the errors, however unsure effects are.
        "tpot/bound": pytest.approx((-0.0974, 0.0974), abs=1e-4),
    }
    model = ServingModel(ends=ends)
    assert model.interval("tpot", "model", 0.0, {}, 0.05, "") == pytest.approx(
        tuple(np.exp(0.05 * np.array(ends["tpot"])))
    )
    assert model.interval("tpot", "model", 0.0, {}, 3.0, "") == pytest.approx(
        tuple(np.exp(ends["tpot/bound"]))
    )
    # On chips of a vendor without runs, half as far again is expected.
    foreign = serving_ends(scores("tpot", np.linspace(-0.15, 0.15, 41), tier="vendor"))
    assert foreign["tpot"] == pytest.approx(ends["tpot"])


def test_intervals_on_machines_that_nobody_measured() -> None:
    here = scores("tpot", np.linspace(-0.1, 0.1, 41))
    there = scores("tpot", np.linspace(0.0, 0.4, 41), "device h100", place="elsewhere")
    model = ServingModel(
        ServingEffects({"host/engine/vllm now": 0.0}),
        serving_ends(here + there),
        Known(clusters=("a|hopper",), chips=("|vllm now|bf16||llama",)),
    )
    known = model.interval("tpot", "model", 0.0, context("vllm"), 0.1)
    assert known == pytest.approx(np.exp([-0.09, 0.09]), abs=0.01)
    # Neither were engines on known machines.
    for other in (context("vllm", source="b"), {}, context("sglang")):
        low, high = model.interval("tpot", "model", 0.0, other, 0.1)
        # Less knowledge does not narrow it; of one held-out device, the factor is sqrt(2).
        assert low == pytest.approx(known[0])
        assert high == pytest.approx(np.exp(2**0.5 * 0.38), rel=0.02)
    wide = model.interval("tpot", "vendor", 0.0, {}, 0.1)
    assert np.log(wide) == pytest.approx(1.5 * np.log([low, high]))


def test_intervals_of_models_that_nobody_measured_on_known_machines() -> None:
    model = ServingModel(
        ServingEffects({"host/engine/vllm now": 0.0}),
        serving_ends(
            scores("tpot", np.linspace(-0.1, 0.1, 41))
            + scores("tpot", np.linspace(-0.05, 0.3, 41), place="new")
        ),
        Known(clusters=("a|hopper",), chips=("|vllm now|bf16||llama",)),
    )
    own = context("vllm")
    known = model.interval("tpot", "model", 0.0, own, 0.1)
    assert known == pytest.approx(np.exp([-0.09, 0.09]), abs=0.01)
    low, high = model.interval("tpot", "framework", 0.0, {**own, "group": "qwen"}, 0.1)
    # No surer below than what was measured; other machines are no surer than these.
    assert (low, high) == pytest.approx((known[0], np.exp(0.28)), rel=0.02)
    elsewhere = model.interval("tpot", "new", 0.0, context("vllm", source="b"), 0.1)
    assert elsewhere == pytest.approx((low, high))


def test_the_fewer_the_machines_the_wider_the_interval() -> None:
    errors = np.linspace(-0.4, 0.4, 401)
    both = [scores("tpot", errors, name, place="elsewhere") for name in ("a", "b")]
    # One machine, two with equal weights, and two of which one has few runs: sqrt(1 + 1 / n),
    # where n is 1, 2, and with weights of 401^0.75 and 4^0.75 the inverse Simpson index 1.063.
    parts = {"one": both[0], "two": both[0] + both[1], "few": both[0] + both[1][:4]}
    end = {name: serving_ends(own)["tpot/elsewhere"][1] for name, own in parts.items()}
    assert end["one"] == pytest.approx(2**0.5 * 3.6, rel=0.01)
    assert end["two"] == pytest.approx(1.5**0.5 * 3.6, rel=0.01)
    assert end["few"] == pytest.approx((1 + 1 / 1.063) ** 0.5 * 3.6, rel=0.02)


def test_errors_of_a_few_latencies_calibrate_nothing_however_often_they_were_left_out() -> None:
    assert not serving_ends(scores("tpot", np.linspace(-0.1, 0.1, 9)) * 5)


def test_tiers() -> None:
    model = ServingModel(
        ServingEffects({"stream/architecture/hopper": 0.1, "host/engine/vllm now": 0.1}),
        provenance=Known(chips=("h100-sxm|vllm now|fp8||llama",)),
    )
    own = {**context("vllm"), "device": "h100-sxm", "format": "fp8", "group": "llama"}
    assert model.tier(own) == "model"
    assert model.tier({**own, "group": "qwen"}) == "framework"
    for other in ({"format": "bf16"}, {"expert_format": "fp8"}, {"engine": "sglang now"}):
        assert model.tier({**own, **other}) == "device"
    # A chip that names a generation with measured ones was not measured itself.
    assert model.tier({**own, "device": "h300"}) == "architecture"
    assert model.tier(context("vllm", "cdna3")) == "new"
    model.provenance = Known(vendors=("NVIDIA",))
    assert model.tier({**context("vllm", "cdna3"), "vendor": "AMD"}) == "vendor"
    assert model.tier({**context("vllm", "blackwell"), "vendor": "NVIDIA"}) == "new"


def test_first_tokens_of_workers_that_run_prompts_alone_have_intervals_of_their_own() -> None:
    apart = {"spread": "disaggregated"}
    assert str(kind_of("ttft", 0.9, {})) == "ttft-queued"
    assert str(kind_of("ttft", 0.95, {})) == "ttft-full"
    assert str(kind_of("ttft", 0.9, apart)) == "ttft-queued-apart"
    # A further token is what it is elsewhere: of engines with experts another one than without.
    assert str(kind_of("tpot", 0.4, apart)) == "tpot-dense"
    # Of engines that requests wait for, limits decide how many run beside each other.
    assert str(kind_of("tpot", 0.9, apart)) == "tpot-queued"
    assert str(kind_of("tpot", 0.0, {"expert_format": "fp8"})) == "tpot-experts"
    assert str(kind_of("per_token", 0.0, {"expert_format": "fp8"})) == "per_token"
    model = ServingModel(ends={"ttft": (-0.1, 0.1), "ttft-apart": (-0.4, 0.3)})
    assert model.interval("ttft", "model", 0.0, apart, 1.0) == pytest.approx(np.exp([-0.4, 0.3]))
    # Too few runs calibrate nothing of their own: those of all workers, or models, are taken.
    del model.ends["ttft-apart"]
    assert model.interval("ttft", "model", 0.0, apart, 1.0) == pytest.approx(np.exp([-0.1, 0.1]))
    model = ServingModel(ends={"tpot": (-0.2, 0.2)})
    assert model.interval("tpot", "model", 0.0, apart, 1.0) == pytest.approx(np.exp([-0.2, 0.2]))


def test_nobody_says_whose_servers_hand_requests_over() -> None:
    at = COSTS.index("request")
    shares = np.eye(len(COSTS))[at]
    own = context("vllm") | {"any": "any", "stack": "a|vllm now"}
    together = ServingEffects().spread(own, "ttft", shares)
    apart = ServingEffects().spread({**own, "spread": "disaggregated"}, "ttft", shares)
    handover = next(v for v in ServingEffects.levels.levels if v.name == "handover")
    spread = [v for v in ServingEffects.levels.levels if v.name == "spread"]
    more = handover.deviation**2 + sum(v.deviation**2 for v in spread)
    assert apart**2 - together**2 == pytest.approx(more)


def test_the_file_of_a_model(tmp_path: Path) -> None:
    model = ServingModel(
        ServingEffects({"host/all/gpu": 0.5}, {"host/all/gpu": 0.1}),
        {"tpot": (-0.1, 0.2)},
        Known(rows=3),
    )
    model.save(tmp_path / "m.json")
    again = ServingModel.load(tmp_path / "m.json")
    assert again == model
    assert again.interval("tpot", "model", 0.0, {}, 1.0) == pytest.approx(np.exp([-0.1, 0.2]))
    (tmp_path / "bad.json").write_text('{"format": 9}')
    with pytest.raises(ModelError, match="format 9"):
        ServingModel.load(tmp_path / "bad.json")
    with pytest.raises(ModelError, match="train it again"):
        ServingModel.load(tmp_path / "none.json")


def test_what_a_file_says_of_a_stack_is_checked(tmp_path: Path) -> None:
    own = {"a|h100": OwnStack(0.5, ("g|vllm now|hopper",), {"tpot": (-0.1, 0.2)})}
    model = ServingModel(provenance=Known(vendors=(), own=own))
    file = tmp_path / "m.json"
    model.save(file)
    assert ServingModel.load(file) == model
    good = json.loads(file.read_text())
    # Older files say less, and may say what is no longer read.
    file.write_text(json.dumps({**good, "provenance": {"own": {"a|h100": {}}, "seed": 0}}))
    assert ServingModel.load(file).provenance == Known(own={"a|h100": OwnStack()})
    for known, key in (
        ({"groups": "llama"}, "provenance: groups"),
        ({"vendors": [1]}, "provenance: vendors"),
        ({"shapes": ["llama"]}, "provenance: shapes"),
        ({"own": {"a|h100": {"ends": {"tpot": 1.0}}}}, r"own: a\|h100: ends: tpot"),
        ([], "provenance"),
    ):
        file.write_text(json.dumps({**good, "provenance": known}))
        with pytest.raises(ModelError, match=key) as raised:
            ServingModel.load(file)
        assert str(file) in str(raised.value)


def test_the_shipped_model_knows_the_usual_frameworks() -> None:
    model = ServingModel.find()
    for engine in ("vllm now", "sglang now", "tensorrt-llm now"):
        assert model.effects.knows("engine", engine)
    cluster = {"cluster": "aiconfigurator/inferencex|h200-sxm"}
    low, high = model.interval("tpot", "model", 0.0, cluster, 0.3)
    assert 0.5 < low < 1.0 < high < 2.0
    wider = model.interval("tpot", "model", 0.0, {}, 0.3)
    assert wider[0] <= low and high <= wider[1]


def test_errors_of_whole_requests_are_of_both_parts() -> None:
    # Measured 1 s and 0.01 s, predicted 2 s and 0.005 s: of 101 tokens 2 s against 2.5 s.
    seen = Observed(
        np.array([0, 0, 1, 2, 2]),
        np.array(["ttft", "tpot", "tpot", "ttft", "tpot"]),
        np.log([1.0, 0.01, 0.01, 1.0, 0.01]),
        np.zeros(5),
        np.zeros((5, len(COSTS))),
        np.zeros(5),
    )
    errors = np.log([1 / 2, 2.0, 2.0, 1 / 2, 2.0])
    # The second row has one part alone, the third is of no closed loop.
    found = request_errors(seen, errors, [101.0, 101.0, 0.0])
    assert found == {1: pytest.approx(np.log(2.0 / 2.5))}


def test_parts_keep_to_the_ends_of_the_whole() -> None:
    def made(**ends: tuple[float, float]) -> dict[str, tuple[float, float]]:
        logs = {name: tuple(np.log(end)) for name, end in ends.items()}
        one = dict.fromkeys(("ttft", "tpot", REQUEST_TIME), 1.0)
        model = ServingModel(ends=logs)
        return model.tied_intervals("new", 0.0, {}, (1.0, 3.0), REQUEST_TIME, one)

    parts = {"ttft": (0.5, 20.0), "tpot": (0.6, 1.5)}
    found = made(**parts, e2e=(0.7, 2.0))
    assert found[REQUEST_TIME] == pytest.approx((0.7, 2.0))
    # 8 s at the most, of which at least 1.8 are of further tokens.
    assert found["ttft"] == pytest.approx((0.5, 6.2)) and found["tpot"] == pytest.approx((0.6, 1.5))
    # At least 3.6 s, of which the first token has 1.1 at the most.
    least = made(ttft=(0.5, 1.1), tpot=(0.6, 1.5), e2e=(0.9, 2.0))
    assert least["tpot"] == pytest.approx((2.5 / 3.0, 1.5))
    # A model without ends of whole requests: both parts at their ends.
    assert made(**parts)[REQUEST_TIME] == pytest.approx((2.3 / 4.0, 24.5 / 4.0))


def test_the_shipped_model_has_ends_of_whole_requests() -> None:
    ends = ServingModel.find().ends
    for metric in (*METRICS, REQUEST_TIME):
        for where in (metric, f"{metric}/elsewhere"):
            assert ends[where][0] < 0.0 < ends[where][1]
