from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from opcast.datagen.profile import measure
from opcast.datagen.profile.runner import STEADY, Pulse, local_pulse


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that the pulse's next runs take; the last one stays."""
    seconds = [1e-3]

    def run(self: Pulse) -> float:
        return seconds.pop(0) if len(seconds) > 1 else seconds[0]

    monkeypatch.setattr(Pulse, "_time", run)
    yield seconds


def test_a_reading_is_relative_to_the_best(clock: list[float]) -> None:
    pulse = Pulse()
    assert pulse.best_s == {"plain": 1e-3}
    clock[:] = [2e-3]
    assert pulse.ratio() == pytest.approx(2.0)
    # One slow run of three does not count.
    clock[:] = [1e-3, 9e-3, 1e-3, 1e-3]
    assert pulse.ratio() == pytest.approx(1.0)
    # Readings under the profiler have a best one of their own.
    clock[:] = [4e-3]
    assert pulse.ratio(traced=True) == 1.0
    clock[:] = [6e-3]
    assert pulse.ratio(traced=True) == pytest.approx(1.5)


def test_the_best_reading_of_an_earlier_process_counts(clock: list[float]) -> None:
    assert Pulse({"plain": 0.5e-3}).ratio() == pytest.approx(2.0)


def test_a_real_pulse_reads_about_one_on_this_machine() -> None:
    pulse = local_pulse()
    assert pulse is not None
    assert 1e-6 < pulse.best_s["plain"] < 1.0
    assert pulse.ratio() >= 1.0


def test_a_disturbed_measurement_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = SimpleNamespace(
        seconds=0.01, durations=dict.fromkeys("ab", ()), disturbed=False, name="p"
    )
    ratios = iter([3.0, STEADY - 0.1])
    sessions = itertools.count(1)

    def session(group: Any, pending: Any, pulse: Any) -> Any:
        number = next(sessions)
        return [(next(ratios), {"a": [float(number)], "b": [float(number)]})]

    monkeypatch.setattr(measure, "_session", session)
    program.durations = {"a": [], "b": []}
    measure._trace_steadily([program], {}, None)
    assert program.durations == {"a": [2.0], "b": [2.0]}
    assert not program.disturbed


def test_the_least_disturbed_try_counts_if_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = SimpleNamespace(seconds=0.01, durations={"a": []}, disturbed=False)
    tries = iter([(3.0, {"a": [3.0]}), (2.0, {"a": [2.0]}), (4.0, {"a": [4.0]})])
    monkeypatch.setattr(measure, "_session", lambda group, pending, pulse: [next(tries)])
    measure._trace_steadily([program], {}, None)
    assert program.durations == {"a": [2.0]}
    assert program.disturbed
