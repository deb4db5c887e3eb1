"""Common result of all trace readers: the kernels of each device, and their grouping into runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ...common.errors import DatasetError
from ..profile.executions import Event
from ..profile.trace import Executed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operator:
    """A call of an operator by the host, as PyTorch's profiler records it.

    Attributes:
        name: Such as ``aten::addmm``.
        shapes: Dimensions of each argument, and of each tensor in a list; empty for arguments that
            are not tensors.
        dtypes: Type of each argument by PyTorch's name, such as ``c10::BFloat16``.
        values: Arguments that are not tensors, as text.
        call: Number of the call.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    call: int = -1


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as its library reports it.

    Attributes:
        op: Name as in :mod:`opcast.simulate.collectives.choose`, such as ``all_reduce``.
        bytes: Bytes as nccl-tests counts them; 0 if the trace lacks them.
        ranks: Number of participating devices; 0 if the trace lacks it.
        dtype: Element type by PyTorch's name, or empty.
    """

    op: str
    bytes: int = 0
    ranks: int = 0
    dtype: str = ""


@dataclass(slots=True)
class TraceKernel(Event):
    """A kernel or copy on a device, in nanoseconds of the trace's clock.

    Attributes:
        stream: Stream that it ran on.
        launched: Time of the host's call; nan if the trace lacks it.
        operators: Operators around the call, innermost first.
        collective: The collective, if it is one.
        copy: Whether it is a copy or fill by the driver, not a kernel.
    """

    stream: str = ""
    launched: float = math.nan
    operators: tuple[Operator, ...] = ()
    collective: Collective | None = None
    copy: bool = False

    @classmethod
    def of(cls, name: str, start: float, end: float, **others: Any) -> TraceKernel:
        """A kernel whose program and run are not known yet."""
        return cls("", "", None, name, start, end, **others)


@dataclass
class DeviceTrace:
    """Executions on one device.

    Attributes:
        index: Number of the device in the trace.
        executed: Kernels, with their instruction if XLA generated them.
    """

    index: int
    executed: Executed


@dataclass
class Trace:
    """A trace.

    Attributes:
        path: File that it was read from.
        format: ``xplane``, ``kineto`` or ``nsys``.
        devices: Executions on each device.
        device_name: Name of the device in the trace, or empty.
        hlo: Text of optimised modules, by ``name(program id)``; events may have only the name.
        ordered: Whether start times are known, and with them runs, gaps and overlap.
        notes: Information that the trace lacks.
    """

    path: str
    format: str
    devices: list[DeviceTrace]
    device_name: str = ""
    hlo: dict[str, str] = field(default_factory=dict)
    ordered: bool = True
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_gpus(
        cls,
        path: Path,
        format: str,
        devices: Mapping[int, list[Event]],
        names: Iterable[str] = (),
        **others: Any,
    ) -> Trace:
        """Trace of several GPUs; it has a device name if all ``names`` are equal."""
        found = [DeviceTrace(i, Executed("gpu", own)) for i, own in sorted(devices.items())]
        distinct = set(names)
        name = distinct.pop() if len(distinct) == 1 else ""
        return cls(str(path), format, found, name, **others)

    @property
    def of_xla(self) -> bool:
        """Whether events name HLO instructions."""
        return any(e.op for d in self.devices for e in d.executed.events)


@dataclass(frozen=True)
class RunTime:
    """One run of a program, or one step; times in seconds.

    Attributes:
        start: Start of its first kernel.
        span: Time from there to the end of the last one.
        busy: Time during which a kernel ran.
        kernels: Total time of the kernels, without collectives.
        collectives: Total time of the collectives.
        exposed: Time during which only collectives ran.
        device: Number of the device.
    """

    start: float
    span: float
    busy: float
    kernels: float
    collectives: float
    exposed: float
    device: int = 0

    @property
    def gaps(self) -> float:
        """Time during which nothing ran."""
        return self.span - self.busy

    @property
    def overlap(self) -> float:
        """Time saved by running kernels at once, including collectives beside kernels."""
        return self.kernels + self.collectives - self.busy


def chosen(trace: Trace, index: int | None) -> list[DeviceTrace]:
    """The selected device, or all devices if they ran the same kernels.

    Raises:
        DatasetError: There is no such device, or several ran different kernels.
    """
    known = ", ".join(str(d.index) for d in trace.devices)
    if index is not None:
        own = [d for d in trace.devices if d.index == index]
        if not own:
            raise DatasetError(
                f"no device {index} in the trace", where=trace.path, hint=f"it has: {known}"
            )
        return own
    counts = [
        Counter((e.module, e.op) if e.op else ("", e.name) for e in d.executed.events)
        for d in trace.devices
    ]
    if any(count != counts[0] for count in counts[1:]):
        raise DatasetError(
            f"{len(counts)} devices ran different kernels",
            where=trace.path,
            hint=f"choose one with --device-index; the trace has: {known}",
        )
    return trace.devices


def by_run(events: Iterable[Event]) -> list[list[Event]]:
    """Group events into runs: by their run, otherwise by repetition.

    Without marked runs, a sequence of kernels that repeats a shorter sequence is split into its
    repetitions; any other is one run.
    """
    marked: dict[object, list[Event]] = defaultdict(list)
    loose = []
    for event in sorted(events, key=lambda e: e.start):
        if event.run is None:
            loose.append(event)
        else:
            marked[event.run].append(event)
    if marked:
        # With marked runs, loose events are warm-up and activities between steps.
        return list(marked.values())
    names = [e.op or e.name for e in loose]
    count = math.gcd(*Counter(names).values())
    size = len(names) // count if count else 0
    # Periods that divide all counts, the shortest first.
    for pieces in sorted((n for n in range(2, count + 1) if count % n == 0), reverse=True):
        size = len(names) // pieces
        if names[size:] == names[:-size]:
            return [loose[i : i + size] for i in range(0, len(loose), size)]
    return [loose] if loose else []


def run_time(
    events: Sequence[Event], is_collective: Callable[[Event], bool], device: int = 0
) -> RunTime:
    """Measure a run on a device."""
    own = [e for e in events if not is_collective(e)]
    others = [e for e in events if is_collective(e)]
    start, end = min(e.start for e in events), max(e.end for e in events)
    busy, alone = _covered(events), _covered(own)
    return RunTime(
        start=start * 1e-9,
        span=(end - start) * 1e-9,
        busy=busy * 1e-9,
        kernels=sum(e.end - e.start for e in own) * 1e-9,
        collectives=sum(e.end - e.start for e in others) * 1e-9,
        exposed=(busy - alone) * 1e-9,
        device=device,
    )


def _covered(events: Iterable[Event]) -> float:
    """Nanoseconds during which at least one event ran."""
    total, until = 0.0, -math.inf
    for start, end in sorted((e.start, e.end) for e in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def typical(runs: Sequence[RunTime]) -> RunTime:
    """The run with the median span: medians of the parts would not add up.

    The first of several is left out, since it may wait for memory and code.
    """
    own = sorted(runs[1:] if len(runs) > 2 else runs, key=lambda r: r.span)
    return own[(len(own) - 1) // 2]


def host_seconds(runs: Sequence[RunTime]) -> float:
    """Median time from the end of a run to the start of the next; 0 for a single one."""
    ordered = sorted(runs, key=lambda r: (r.device, r.start))
    waits = [
        max(0.0, b.start - a.start - a.span) for a, b in pairwise(ordered) if a.device == b.device
    ]
    return float(np.median(waits)) if waits else 0.0


class Nested(Generic[T]):
    """Ranges of one thread, each nested in the one that began before it and is still open.

    Args:
        ranges: Start, end and content of each range.
    """

    def __init__(self, ranges: Iterable[tuple[float, float, T]]) -> None:
        # Of ranges with one start the longest is the outermost.
        self._ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))
        self._starts = [r[0] for r in self._ranges]
        self._outer: list[int] = []
        open_: list[int] = []
        for place, (_, end, _) in enumerate(self._ranges):
            while open_ and self._ranges[open_[-1]][1] < end:
                open_.pop()
            self._outer.append(open_[-1] if open_ else -1)
            open_.append(place)

    def around(self, at: float) -> list[T]:
        """Contents of the ranges open at a time, innermost first."""
        place = bisect_right(self._starts, at) - 1
        found = []
        while place >= 0:
            _, end, what = self._ranges[place]
            if end >= at:
                found.append(what)
            place = self._outer[place]
        return found
