"""Spans on tracks as a Chrome trace: JSON for Perfetto and chrome://tracing.

Spans are complete events (``ph`` = ``X``), with names of processes and threads as
metadata (Trace Event Format, The Chromium Project). Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path

from .files import write_text


def free_tracks(starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Assign spans to tracks without overlap: each takes the first free track, else a new one.

    Args:
        starts: Starts of the spans, in any order.
        ends: Ends of the spans.
    """
    found = [0] * len(starts)
    busy: list[tuple[float, int]] = []
    for at in sorted(range(len(starts)), key=starts.__getitem__):
        free = bool(busy) and busy[0][0] <= starts[at]
        found[at] = heappop(busy)[1] if free else len(busy)
        heappush(busy, (ends[at], found[at]))
    return found


class ChromeTrace:
    """Collects spans; a process is a device or rank, a track one of its streams."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []

    def process(self, name: str, process: int = 0) -> None:
        """Name a process."""
        self._events.append(_label("process_name", name, process))

    def track(self, name: str, track: int, process: int = 0) -> None:
        """Name a track of a process."""
        self._events.append({**_label("thread_name", name, process), "tid": track})

    def span(
        self,
        name: str,
        category: str,
        start_us: float,
        length_us: float,
        *,
        track: int = 0,
        process: int = 0,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Add a span.

        Args:
            name: Name of the span.
            category: Viewers colour and filter spans by it.
            start_us: Start in microseconds.
            length_us: Duration in microseconds.
            track: Number of the track.
            process: Number of the process that the track belongs to.
            details: Values that viewers show for a selected span.
        """
        event: dict[str, object] = {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": process,
            "tid": track,
            "ts": float(start_us),
            "dur": float(length_us),
        }
        if details:
            event["args"] = dict(details)
        self._events.append(event)

    def counter(
        self, name: str, time_us: float, values: Mapping[str, float], process: int = 0
    ) -> None:
        """Add values that are valid from a time on.

        Args:
            name: Name of the counter.
            time_us: Time in microseconds.
            values: Values by series.
            process: Number of the process that it belongs to.
        """
        own = {"name": name, "ph": "C", "pid": process, "ts": float(time_us), "args": dict(values)}
        self._events.append(own)

    def to_dict(self) -> dict[str, object]:
        """Return the trace as plain data."""
        # displayTimeUnit only sets the viewer's axis; times stay in microseconds.
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}


def write_trace(trace: Mapping[str, object], path: Path) -> None:
    """Write a trace as JSON."""
    write_text(path, json.dumps(trace))


def _label(what: str, name: str, process: int) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "args": {"name": name}}
