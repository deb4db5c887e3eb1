"""Runs of training on devices that fail: closed forms, simulated runs, and what was published."""

from math import exp, inf, sqrt

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.common.interval import Interval
from opcast.predict.cluster.step_case import StepCase
from opcast.predict.cluster.training_run import (
    CHECKPOINT_S,
    MTBF_H,
    RunSettings,
    TrainingRun,
    best_stretch,
    wall_time,
)
from opcast.simulate.step.named_workloads import read_workload


def test_the_mean_is_that_of_daly() -> None:
    work, rate, stretch, checkpoint, restart = 1e6, 1 / 7000, 900.0, 20.0, 300.0
    found = wall_time(work, rate, stretch, checkpoint, restart)
    daly = work / stretch / rate * exp(rate * restart) * (exp(rate * (stretch + checkpoint)) - 1)
    assert found.mean == pytest.approx(daly)
    assert found.failures == pytest.approx(daly * rate)
    # Without failures there are checkpoints alone.
    assert wall_time(1000.0, 0.0, 100.0, 3.0, 60.0).mean == pytest.approx(1030.0)
    assert wall_time(1000.0, 0.0, inf, 3.0, 60.0).deviation == 0.0


def test_no_other_stretch_is_much_better_than_the_best() -> None:
    best = best_stretch(20.0, 1 / 50_000)
    assert best == pytest.approx(sqrt(2 * 20 * 50_000))
    times = [
        wall_time(1e7, 1 / 50_000, best * f, 20.0, 300.0).mean for f in (0.3, 0.7, 1.0, 1.4, 3.0)
    ]
    assert min(times) == times[2]


def simulated(rng: np.random.Generator, spares: int, repair: float) -> float:
    """Seconds of 40 stretches of 500 s, with 10 s of checkpoints and 100 s of restarts."""
    clock, done = 0.0, 0
    broken: list[float] = []  # when each is repaired
    restarting = 0.0
    while done < 40:
        whole = restarting or 510.0
        failure = rng.exponential(2000.0)
        if failure > whole:
            clock += whole
            done += not restarting
            restarting = 0.0
            continue
        clock += failure
        restarting = 100.0
        if spares >= 0:
            broken = [t for t in broken if t > clock] + [clock + rng.exponential(repair)]
            if len(broken) > spares:
                clock = max(clock, min(broken))
    return clock


@pytest.mark.parametrize(("spares", "repair"), [(-1, 0.0), (0, 1500.0), (2, 3000.0)])
def test_runs_that_are_played_take_as_long(spares: int, repair: float) -> None:
    rng = np.random.default_rng(0)
    times = np.array([simulated(rng, spares, repair) for _ in range(3000)])
    found = wall_time(40 * 500.0, 1 / 2000, 500.0, 10.0, 100.0, spares, repair)
    # A short run begins with all boxes whole, and failures come in bursts where none is left.
    assert found.mean == pytest.approx(times.mean(), rel=0.015)
    assert found.deviation == pytest.approx(times.std(), rel=0.05 if spares <= 0 else 0.2)


def run_of(step: float, devices: int, **settings: float) -> TrainingRun:
    own = RunSettings(**{"tokens": 1e12, **settings})  # type: ignore[arg-type]
    return TrainingRun(own, 1000, Interval(step, 0.9 * step, 1.2 * step), devices, 6.3, 2.0)


def test_llama_3_trained_for_more_than_nine_tenths_of_the_time() -> None:
    """54 days of 16,384 H100 with 419 failures, more than 90 % of them effective."""
    run = TrainingRun(RunSettings(tokens=1.0), 700_000, Interval(6.0, 6.0, 6.0), 16384, 6.3)
    data = run.to_dict()
    assert data["failures"] / data["days"] == pytest.approx(419 / 54, rel=0.01)
    assert 0.88 < data["goodput"] < 0.94


def test_intervals_hold_steps_chance_and_sites() -> None:
    given, guessed = run_of(5.0, 4096, mtbf_h=MTBF_H), run_of(5.0, 4096)
    assert given.seconds.value == guessed.seconds.value
    assert guessed.seconds.hi > given.seconds.hi > 1.2 * given.seconds.value
    assert given.seconds.lo >= 1000 * 0.9 * 5.0
    for run in (given, guessed):
        assert run.seconds.chance_below(run.seconds.hi) == pytest.approx(0.95)
        assert run.seconds.chance_below(run.seconds.value) == pytest.approx(0.5)
    rare = run_of(5.0, 4096, mtbf_h=1e9)
    assert rare.to_dict()["goodput"] > 0.98 and rare.seconds.value < given.seconds.value
    assert rare.to_dict()["cost"] == pytest.approx(2.0 * 4096 * rare.seconds.value / 3600)


def test_the_answer_of_a_step_has_the_run() -> None:
    work = read_workload("llama-3-8b", {"batch": 64, "seq": 8192})
    case = StepCase(cluster="h100-sxm-x8", plan="fsdp=8", run={"tokens": "1e9", "days": "0.2"})
    found = case.predict(work, None)
    assert found.run is not None
    data = found.to_dict()["run"]
    assert isinstance(data, dict) and data["steps"] == -(-(10**9) // (64 * 8192))
    step = found.interval
    assert data["days"] >= data["steps"] * step.value / 86400
    assert 0.0 < data["probability"] < 1.0
    # Joules of 1,908 steps of eight H100, which draw at most 700 W each.
    assert found.joules is not None
    assert data["energy_j"] == data["steps"] * found.joules.value
    assert data["energy_j"] <= 8 * 700 * data["days"] * 86400
    assert f"take {data['energy_j'] / 3.6e6:.3g} kWh" in found.run.lines()[0]
    hours = found.run.seconds.value / 3600
    assert f"{hours:.3g} hours" in found.run.lines()[0]


def test_frozen_weights_are_not_in_checkpoints() -> None:
    waits = {}
    for rank in (0, 16):
        work = read_workload("llama-3-8b", {"batch": 8, "seq": 8192, "lora_rank": rank})
        found = StepCase(cluster="h100-sxm-x8", plan="dp=8", run={"tokens": 1e9}).predict(
            work, None
        )
        assert found.run is not None
        waits[rank] = found.run.checkpoint - CHECKPOINT_S
    # A device holds all of 8.03 billion weights, of which 9.4 million are adapters.
    assert waits[16] / waits[0] == pytest.approx(9.4e6 / 8.03e9, rel=0.05)


def test_long_and_hopeless_runs_are_written_without_exponents() -> None:
    work = read_workload("llama-3-8b", {"batch": 64, "seq": 8192})
    case = StepCase(cluster="h100-sxm-x8", plan="fsdp=8", run={"tokens": 1e14, "days": 1})
    run = case.predict(work, None).run
    assert run is not None
    first, _, last = run.lines()
    assert round(run.seconds.value / 86400, -2) > 1e3 and "e+" not in first and " days " in first
    assert last == "within 1 days: under 1 % likely"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"days": 4}, "the run has no length"),
        ({"tokens": "many"}, "tokens"),
        ({"tokens": -1}, "tokens=-1 is not a valid time or number"),
        ({"tokens": 1e9, "hours": 1}, "run has no key 'hours'"),
        ({"tokens": 1e9, "spares": 2}, "give both or neither"),
        ({"tokens": 1e9, "spares": -5}, "spares=-5 is not a valid time or number"),
        ({"tokens": 1e9, "mtbf_h": 1e-5}, "the run never ends"),
        ({"tokens": 1e9, "mtbf_h": 0}, "mtbf_h=0 is not above 0"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], said: str) -> None:
    work = read_workload("llama-3-8b", {"batch": 64, "seq": 8192})
    with pytest.raises(PlanError) as found:
        found_run = StepCase(cluster="h100-sxm-x8", plan="fsdp=8", run=asked).predict(work, None)
        assert found_run.run is not None and found_run.run.seconds
    assert said in f"{found.value} {found.value.hint}"
