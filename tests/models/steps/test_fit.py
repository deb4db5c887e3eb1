"""Effects of steps, learned from a simulator whose truth is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from opcast.models.effects import WHOLE
from opcast.models.steps.effects import (
    PRIOR,
    EffectTable,
    Slopes,
    StepContext,
    fit_effects,
    slopes_at,
)
from opcast.models.steps.model import StepModel, interval_ends
from opcast.models.trust.calibrator import Calibrator

COSTS = tuple(PRIOR)


def context(framework: str = "a", cluster: str = "", architecture: str = "hopper") -> StepContext:
    return StepContext(framework, architecture, "gpu", "16", False, cluster, 0.0)


class Additive:
    """A simulator that adds up seconds of products and of collectives between boxes."""

    def __init__(self, contexts: Sequence[StepContext], seed: int = 0) -> None:
        self.contexts = list(contexts)
        draw = np.random.default_rng(seed)
        self.product = draw.uniform(0.5, 2.0, len(contexts))
        self.between = draw.uniform(0.1, 2.0, len(contexts))

    def __call__(
        self, which: Sequence[int], table: EffectTable, shifts: Mapping[str, float]
    ) -> np.ndarray:
        logs = [table.log_factors(self.contexts[i]) for i in which]
        own = {c: np.exp([log[c] + shifts.get(c, 0.0) for log in logs]) for c in COSTS}
        at = list(which)
        return np.log(self.product[at] * own["product"] + self.between[at] * own["between"])


def test_effects_of_frameworks_are_found_and_unknown_ones_get_the_mean() -> None:
    contexts = [context("a")] * 40 + [context("b")] * 40
    simulate = Additive(contexts)
    truth = EffectTable({"between/framework/a": 0.4, "between/framework/b": -0.4})
    measured = simulate(range(80), truth, {})
    groups = np.repeat(["a", "b"], 40)
    table = fit_effects(contexts, measured, groups, simulate)
    said = simulate(range(80), table, {}) + [table.log_factors(c)[WHOLE] for c in contexts]
    assert np.abs(said - measured).mean() < 0.06
    by_name = {n: table.log_factors(context(n))["between"] for n in ("a", "b", "unheard")}
    assert by_name["a"] > by_name["unheard"] > by_name["b"]
    assert by_name["a"] - by_name["b"] > 0.3
    assert abs(by_name["unheard"]) < 0.15


def test_one_wild_run_does_not_move_the_others() -> None:
    contexts = [context("a")] * 30
    simulate = Additive(contexts)
    measured = simulate(range(30), EffectTable(), {})
    measured[0] += np.log(40.0)
    table = fit_effects(contexts, measured, np.repeat(["a"], 30), simulate)
    said = simulate(range(30), table, {}) + [table.log_factors(c)[WHOLE] for c in contexts]
    assert np.abs(said - measured)[1:].mean() < 0.03


@pytest.mark.parametrize(("count", "left"), [(5, 0.5), (20, 0.3)])
def test_a_few_steps_tell_of_a_new_cluster(count: int, left: float) -> None:
    contexts = [context("a", "mine|h100-sxm")] * count
    simulate = Additive(contexts)
    truth = EffectTable({"between/cluster/mine|h100-sxm": 0.5})
    measured = simulate(range(count), truth, {})
    known = EffectTable({"between/all/gpu": 0.0})
    table = slopes_at(simulate, known, count).linear(contexts, measured).adapted()
    said = simulate(range(count), table, {}) + [table.log_factors(c)[WHOLE] for c in contexts]
    before = np.abs(simulate(range(count), known, {}) - measured).mean()
    assert np.abs(said - measured).mean() < left * before
    assert table.values["between/cluster/mine|h100-sxm"] > 0.1
    assert StepModel(table).tier(contexts[0]) == "cluster"


def test_steps_left_out_of_a_linear_model_teach_it_nothing() -> None:
    contexts = [context("a", f"mine|{name}") for name in ("h100-sxm", "h100-sxm", "l4", "t4")]
    simulate, known = Additive(contexts), EffectTable({"between/cluster/mine|t4": 0.1})
    slopes = slopes_at(simulate, known, 4)
    measured = slopes.level + np.array([0.3, 0.5, -0.2, 0.4])
    linear = slopes.linear(contexts, measured)
    slope = {cost: values[:3] for cost, values in slopes.slope.items()}
    part = Slopes(known, slopes.level[:3], slope).linear(contexts[:3], measured[:3])
    adapted = linear.adapted(np.arange(4) < 3)
    assert adapted.values == pytest.approx(part.adapted().values)
    assert adapted.values["between/cluster/mine|t4"] == 0.1
    left = linear.left_out(np.arange(4))
    assert left[3] == linear.errors(adapted)[3]
    assert np.isnan(linear.left_out(np.zeros(4))).all()


def test_what_is_known_of_a_step_decides_the_interval() -> None:
    # The prior of products: 0.3 for all, 0.15 a generation, 0.3 the bits (steps/effects.yaml).
    table = EffectTable(
        {
            "product/architecture/hopper": 0.1,
            "launch/framework/a": 0.1,
            "whole/cluster/x|h100-sxm": 0.0,
        },
        {"product/all/gpu": 0.03, "product/bits/16": 0.04, "whole/framework/a": 0.1},
    )
    model = StepModel(table, ends={"cluster": (-1.0, 2.0), "elsewhere": (-1.5, 3.0)})
    asked = [
        context("a", "x|h100-sxm"),
        context("a", "y|h100-sxm"),
        context("b", "y|h100-sxm"),
        context("b", "y|z", architecture="later"),
    ]
    assert [model.tier(one) for one in asked] == ["cluster", "framework", "architecture", "new"]
    # All of the step is products: 0.03, 0.15, 0.04, and on the whole step 0.1 for the framework
    # (0.2 where it is not known), 0.1 for the generation and 0.2 for the cluster.
    known = np.sqrt(0.03**2 + 0.15**2 + 0.04**2 + 0.1**2 + 0.1**2 + 0.2**2)
    other = np.sqrt(known**2 - 0.1**2 + 0.2**2)
    ends = [model.interval(one, {"product": 1.0}) for one in asked]
    assert ends[0] == pytest.approx((-known, 2 * known))
    assert ends[1] == pytest.approx((-1.5 * known, 3 * known))
    assert ends[2] == pytest.approx((-1.5 * other, 3 * other))
    # Half of it attention, which has no effects: products count half.
    half = np.sqrt(known**2 - 0.75 * (0.03**2 + 0.15**2 + 0.04**2))
    assert model.interval(asked[0], {"product": 0.5})[1] == pytest.approx(2 * half)


def test_steps_of_experts_have_ends_of_their_own() -> None:
    known = np.repeat(["elsewhere", "elsewhere/experts"], (41, 71))
    errors = np.r_[np.linspace(-0.2, 0.2, 41), np.linspace(-0.6, 0.1, 71)]
    model = StepModel(EffectTable(), ends=interval_ends(known, errors, known).ends)
    # 5 and 95 % of the errors; with experts never inside the ends of those without.
    assert model.ends["elsewhere"] == pytest.approx((-0.18, 0.18), abs=0.01)
    assert model.ends["elsewhere/experts"] == pytest.approx((-0.565, 0.18), abs=0.01)
    shares = {"product": 0.5, "experts": 0.5}
    spread = model.table.spread(context(), shares)
    low, high = model.interval(context(), shares)
    assert (low / spread, high / spread) == pytest.approx(model.ends["elsewhere/experts"])


def test_operators_that_nobody_measured_widen_the_interval() -> None:
    model = StepModel(EffectTable(), ends={"elsewhere": (-1.0, 1.0)})
    low, high = model.interval(context(), {"product": 1.0})
    assert model.interval(context(), {"product": 1.0}, (0.3, 0.4)) == pytest.approx(
        (-np.hypot(low, 0.3), np.hypot(high, 0.4))
    )


def test_a_cluster_with_many_runs_has_an_interval_of_its_own() -> None:
    deviations = {f"whole/cluster/{name}|h100-sxm": 0.1 for name in "xy"}
    table = EffectTable(dict.fromkeys(deviations, 0.0), deviations)
    calibrated = Calibrator({"cluster": (-0.3, 0.3)})
    calibrated.pool(np.linspace(-0.05, 0.05, 201), ["x|h100-sxm"] * 201, group=np.arange(201))
    own = calibrated.ends["x|h100-sxm"]
    assert own == pytest.approx((-0.045, 0.045), abs=1e-3)
    model = StepModel(table, ends=calibrated.ends)
    (_, high), (_, other) = (model.interval(context("a", f"{n}|h100-sxm"), {}) for n in "xy")
    assert high / other == pytest.approx(own[1] / 0.3)


def test_groups_count_the_same_in_an_interval_and_less_knowledge_is_not_surer() -> None:
    known = np.repeat(["cluster", "elsewhere"], (909, 2))
    scores = np.r_[np.full(900, 0.01), np.linspace(-1, 1, 9), 0.0, 0.1]
    groups = np.repeat(["big", "small", "g", "h"], (900, 9, 1, 1))
    ends = interval_ends(known, scores, groups).ends
    # Half of the weight is the small group's: a tenth of all is a fifth of it.
    assert ends["cluster"][0] == pytest.approx(-0.95, abs=0.1)
    assert ends["cluster"][1] == pytest.approx(0.95, abs=0.1)
    assert ends["elsewhere"] == ends["cluster"]


def test_hand_overs_grow_with_the_boxes_of_a_cluster_that_stalls() -> None:
    table = EffectTable({"hop/cluster-boxes/x|h100-sxm": 1.5})
    named, other = (
        StepContext("a", "hopper", "gpu", "16", True, f"{name}|h100-sxm", 0.0, np.log(64.0))
        for name in "xy"
    )
    assert table.effects(named).hop_s == pytest.approx(64**1.5 * PRIOR["hop"])
    assert table.effects(other).hop_s == pytest.approx(PRIOR["hop"])
    # What is not known of a cluster counts by its boxes: 1.0 for each e-fold, 2.5 the framework.
    assert table.log_deviations(other)["hop"] == pytest.approx(np.hypot(np.log(64.0), 2.5))
