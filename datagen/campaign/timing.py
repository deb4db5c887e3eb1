"""Durations of calls and cases by the host's clock, for any framework."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...common.types import JsonObject

Result = TypeVar("Result")
#: Receives the result of a case: rows, the error that ended it, or ``None`` while it is in
#: progress.
Tell = Callable[[str, "list[JsonObject] | Exception | None"], None]

#: Seconds of a window of a long run, and of the pause before it, in which the device cools down.
_WINDOW_S, _PAUSE_S = 0.25, 2.0
#: Calls that are issued without waiting, and rounds of them, to measure the host's cost of a
#: launch.
_CALLS, _ROUNDS = 100, 15
#: Loops of calls that are timed as a whole, and the minimum seconds of one.
_LOOPS, _LOOP_S = 9, 2e-3
#: Calls of an anchor.
_REPEATS = 20


def time_calls(
    call: Callable[[], Result], settle: Callable[[Result], object], count: int = _REPEATS
) -> list[float]:
    """Microseconds of calls until their results are ready, after a warm-up call."""
    settle(call())
    return [round(_seconds_each(call, settle, 1) * 1e6, 3) for _ in range(count)]


def _seconds_each(
    call: Callable[[], Result], settle: Callable[[Result], object], count: int
) -> float:
    """Seconds per call of several calls in a row, until the last result is ready."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    settle(call())
    return (time.perf_counter() - start) / count


def time_launches(call: Callable[[], Result], settle: Callable[[Result], object]) -> JsonObject:
    """Microseconds for the host to issue a call, and of a call until its result is ready.

    Args:
        call: Launches something tiny.
        settle: Waits for its result.
    """
    blocked = time_calls(call, settle)
    issued = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(_CALLS - 1):
            call()
        last = call()
        issued.append(round((time.perf_counter() - start) / _CALLS * 1e6, 3))
        settle(last)
    return {"issue_us": issued, "blocked_us": blocked}


def time_loops(
    call: Callable[[], Result], settle: Callable[[Result], object], each_s: float
) -> list[float]:
    """Microseconds of a call, in loops that are long compared with reading the clock.

    Args:
        call: Launches the work.
        settle: Waits for its result.
        each_s: Approximate duration of a call in seconds.
    """
    count = max(1, round(_LOOP_S / max(each_s, 1e-6)))
    return [round(_seconds_each(call, settle, count) * 1e6, 4) for _ in range(_LOOPS)]


def time_windows(
    call: Callable[[], Result], settle: Callable[[Result], object], each_s: float, seconds: float
) -> list[JsonObject]:
    """Call back to back for some time; microseconds of a call by windows of a quarter second.

    Args:
        call: Launches the work.
        settle: Waits for its result.
        each_s: Approximate duration of a call in seconds.
        seconds: Total duration.
    """
    # Starting from a cool device at its highest clock.
    time.sleep(min(_PAUSE_S, seconds))
    count = max(1, round(min(_WINDOW_S, seconds / 4) / max(each_s, 1e-6)))
    found: list[JsonObject] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began, each = time.time(), _seconds_each(call, settle, count)
        found.append({"begin": began, "executions": count, "us_each": each * 1e6})
    return found


def each(
    cases: Sequence[JsonObject], tell: Tell, one: Callable[[str, JsonObject], list[JsonObject]]
) -> None:
    """Measure cases one by one; a failed one is reported, and the next continues.

    Args:
        cases: Key and spec of each.
        tell: Receives the result of a case.
        one: Returns the rows of a case for its key and spec.
    """
    for case in cases:
        key = str(case["key"])
        try:
            rows = one(key, case["spec"])
        except Exception as error:  # out of memory, no such model, a compiler that fails
            tell(key, error)
        else:
            tell(key, rows)
