"""Execution times of kernels from the events of a trace."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Durations in seconds of every execution, by (HLO module name, HLO instruction name).
Durations = dict[tuple[str, str], list[float]]
#: Fraction of an execution during which another kernel may run without it counting as shared: less
#: than the noise of the labels (engineering estimate).
_SHARED_PART = 0.05


@dataclass(slots=True)
class Event:
    """A part of an instruction's execution; times in nanoseconds of the trace's clock.

    Attributes:
        module: HLO module.
        op: HLO instruction.
        run: Identifies the run of the program; ``None`` if the trace does not separate runs.
        name: Name given by the profiler.
        start: Start.
        end: End.
        shared: Time during which another instruction ran.
    """

    module: str
    op: str
    run: object
    name: str
    start: float
    end: float
    shared: float = 0.0


class _Span(NamedTuple):
    """Nanoseconds of an execution or a part of it, and of the overlap with other kernels."""

    length: float
    shared: float


def grouped(events: Iterable[Event], combine: Callable[[list[Event]], list[float]]) -> Durations:
    """Combine the events of each instruction in each program run into executions, in seconds."""
    by_run: dict[tuple[str, str, object], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.start):
        by_run[event.module, event.op, event.run].append(event)
    durations: Durations = defaultdict(list)
    for (module, op, _), group in by_run.items():
        durations[module, op] += [ns * 1e-9 for ns in combine(group)]
    return dict(durations)


def merged(events: list[Event]) -> list[_Span]:
    """Merge overlapping intervals, which are one execution on several threads."""
    joined: list[Event] = []
    for event in events:
        if joined and event.start < joined[-1].end:
            last = joined[-1]
            end = max(last.end, event.end)
            joined[-1] = replace(last, end=end, shared=last.shared + event.shared)
        else:
            joined.append(event)
    return [_Span(e.end - e.start, e.shared) for e in joined]


def per_execution(spans: list[_Span], count: int) -> list[_Span]:
    """Add up the spans of each of ``count`` executions; 0 for an unknown number.

    If they cannot be distributed evenly, every execution is their mean.
    """
    if count <= 0 or len(spans) <= count:
        return spans
    size, left = divmod(len(spans), count)
    if left:
        whole = _sum(spans)
        return [_Span(whole.length / count, whole.shared / count)]
    return [_sum(spans[i : i + size]) for i in range(0, len(spans), size)]


def _sum(spans: list[_Span]) -> _Span:
    return _Span(sum(s.length for s in spans), sum(s.shared for s in spans))


def alone(spans: list[_Span]) -> list[float]:
    """Lengths of the executions during which no other kernel ran.

    Executions that overlap another kernel count only if the run has no others, and then without
    half of the shared time: two concurrent kernels take resources from each other.
    """
    own = [s.length for s in spans if s.shared <= _SHARED_PART * s.length]
    return own or [s.length - min(s.shared, s.length) / 2 for s in spans]


def sum_launches(events: list[Event], count: int) -> list[float]:
    """Sum the device kernels of each execution.

    Without a known ``count`` of executions, it is the greatest common divisor of the numbers of
    times that each device kernel ran: a GEMM and its split-K reduction, 10 times each, are 10
    executions of two.
    """
    if count <= 0 or len(events) % count:
        count = math.gcd(*Counter(event.name for event in events).values())
    size = len(events) // count
    chunks = (events[i : i + size] for i in range(0, len(events), size))
    return [sum(event.end - event.start for event in chunk) for chunk in chunks]
