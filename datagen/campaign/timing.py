"""Times of calls by the host's clock, whatever the framework."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ...common.types import JsonObject

Result = TypeVar("Result")

#: Seconds of a window of a long run, and of the pause before it, in which the device cools down.
_WINDOW_S, _PAUSE_S = 0.25, 2.0
#: Calls that are issued without waiting, and rounds of them, to see what a launch costs the host.
_CALLS, _ROUNDS = 100, 15
#: Loops of calls that are timed as a whole, and the seconds that one takes at least.
_LOOPS, _LOOP_S = 9, 2e-3
#: Calls of an anchor.
_REPEATS = 20


def time_calls(
    call: Callable[[], Result], settle: Callable[[Result], object], count: int = _REPEATS
) -> list[float]:
    """Microseconds of calls until their results are there, after one that warms up."""
    settle(call())
    times = []
    for _ in range(count):
        start = time.perf_counter()
        settle(call())
        times.append(round((time.perf_counter() - start) * 1e6, 3))
    return times


def time_launches(call: Callable[[], Result], settle: Callable[[Result], object]) -> JsonObject:
    """Microseconds that issuing a call takes the host, and a call until its result is there.

    Args:
        call: Launches something tiny.
        settle: Waits for what it returns.
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
    """Microseconds of a call, in loops that are long beside a look at the clock.

    Args:
        call: Launches the work.
        settle: Waits for what it returns.
        each_s: About how long one takes, in seconds.
    """
    count = max(1, round(_LOOP_S / max(each_s, 1e-6)))
    found = []
    for _ in range(_LOOPS):
        start = time.perf_counter()
        for _ in range(count - 1):
            call()
        settle(call())
        found.append(round((time.perf_counter() - start) / count * 1e6, 4))
    return found


def time_windows(
    call: Callable[[], Result], settle: Callable[[Result], object], each_s: float, seconds: float
) -> list[JsonObject]:
    """Call back to back for some time; microseconds of a call by windows of a quarter second.

    Args:
        call: Launches the work.
        settle: Waits for what it returns.
        each_s: About how long one takes, in seconds.
        seconds: How long to go on.
    """
    # From a cool device at its highest clock.
    time.sleep(min(_PAUSE_S, seconds))
    count = max(1, round(min(_WINDOW_S, seconds / 4) / max(each_s, 1e-6)))
    found: list[JsonObject] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began, start = time.time(), time.perf_counter()
        for _ in range(count - 1):
            call()
        settle(call())
        took = time.perf_counter() - start
        found.append({"begin": began, "executions": count, "us_each": took / count * 1e6})
    return found
