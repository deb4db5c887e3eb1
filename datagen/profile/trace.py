"""Durations of single kernels, by HLO instruction, from ``jax.profiler`` traces.

Host timing cannot resolve kernels below the dispatch time, so labels come from the profiler's
events, which name the HLO instruction that they ran. Their meaning depends on the platform:

* CPU: host lines have one event per executed thunk. A thunk that hands work to other threads
  returns early; its true end is then a second event ``end: <name>`` linked by a flow id.
* GPU: device planes, ``Stream #n`` lines, one event per device kernel or copy. One instruction may
  launch several kernels, whose times add up.
* TPU: device planes, ``XLA Ops`` line.

Module and step spans of the same trace contain others and are never used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ProfileError
from ...common.types import JsonMapping
from .executions import Durations, Event, alone, grouped, merged, per_execution, sum_launches
from .xplane import FileProfile, read_planes

if TYPE_CHECKING:
    from jax.profiler import ProfileData

    from ...features.kernels.kernel import LoweredProgram

#: For every kernel, by (HLO module name, HLO instruction name), the names of its operands.
Reads = Mapping[tuple[str, str], Collection[str]]

#: Prefix of the event that marks the true end of a thunk with work on other threads.
_END = "end: "
#: Kind of flow id that links a thunk's event to its end (others link thread-pool events).
_THUNK_FLOW = 0


@dataclass
class Executed:
    """Executions on one device.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``, which determines how events make up an execution.
        events: Events in any order.
    """

    platform: str
    events: list[Event]

    def durations(
        self, executions: Mapping[tuple[str, str], int] | None = None, reads: Reads | None = None
    ) -> Durations:
        """Durations of the kernels; arguments as for :func:`trace`."""
        if self.platform == "cpu":
            return _host_durations(self.events, reads, executions or {})
        if self.platform == "tpu":
            return grouped(self.events, lambda group: alone(merged(group)))
        return _stream_durations(self.events, executions or {})


def trace(
    run: Callable[[], object],
    executions: Mapping[tuple[str, str], int] | None = None,
    reads: Reads | None = None,
) -> Durations:
    """Run ``run`` under the profiler and return the durations of the kernels it executed.

    Args:
        run: Executes one or several programs, any number of times each, and waits for them.
            Programs that share a session need different HLO module names.
        executions: Executions per program run by (module, instruction), where known. They
            distinguish loop iterations from the several device kernels, or thunks, of one
            instruction: a sort on a CPU first copies each of its inputs, in events of its name.
        reads: The kernels among the instructions, by (module, instruction), with the names of the
            instructions that each reads. If given, a kernel on a CPU ends at the latest when a
            reader of its result starts (the runtime runs the reader before it reports the end), and
            executions that overlap another kernel are left out; if a run has no others, half of the
            shared time is.

    Returns:
        For each (module, instruction) the seconds of every execution, in order of time.
        Instructions in loop bodies have one entry per iteration.

    Raises:
        ProfileError: The profiler wrote no trace, for instance because another one was active.
    """
    return durations(recorded(run), executions, reads)


def recorded(run: Callable[[], object]) -> ProfileData | FileProfile:
    """Run ``run`` under the profiler and return the recorded profile.

    Raises:
        ProfileError: The profiler wrote no trace, for instance because another one was active.
    """
    from jax import profiler

    options = profiler.ProfileOptions()
    # No Python events and no HLO: they slow down the host and are not needed. Level 1 of the host
    # tracer is the lowest that records thunks.
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory(prefix="opcast-trace-") as folder:
        try:
            profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise ProfileError(
                f"the profiler cannot start: {error}", hint="stop the other trace first"
            ) from None
        try:
            run()
        finally:
            profiler.stop_trace()  # type: ignore[no-untyped-call]
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise ProfileError("the profiler wrote no trace", hint="is another trace active?")
        if profiler.ProfileData is None:  # before JAX 0.7
            return FileProfile(read_planes(files[-1].read_bytes()))
        return profiler.ProfileData.from_file(str(files[-1]))


def expected(
    module: str, lowered: LoweredProgram
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], set[str]]]:
    """Arguments of :func:`trace` for a program: executions and reads of its kernels."""
    kernels = lowered.kernels
    own = [k for k in kernels if k.takes_time]
    executions = {
        (module, k.name): int(k.multiplicity)
        for k in own
        if not k.scope or k.multiplicity > 1  # else a loop of unknown length, or a branch
    }
    reads = {(module, k.name): {kernels[i].name for i in k.operands} - {k.name} for k in own}
    return executions, reads


def durations(
    data: ProfileData | FileProfile,
    executions: Mapping[tuple[str, str], int] | None = None,
    reads: Reads | None = None,
) -> Durations:
    """Durations of the kernels in a recorded trace; see :func:`trace`."""
    # Programs run on one device.
    return executed(data)[0].durations(executions, reads)


def executed(data: ProfileData | FileProfile, *, by_program: bool = False) -> list[Executed]:
    """Executions on each device of a trace; without accelerators, those on the host.

    Args:
        data: The trace.
        by_program: Whether modules are named ``name(program id)`` if the trace has the id:
            programs with other shapes have the same name.
    """
    planes = list(data.planes)
    # Accelerators, not custom counters.
    device = [p for p in planes if p.name.startswith(("/device:GPU:", "/device:TPU:"))]
    # If there are devices, the host's planes only show launches.
    if device:
        return [_device_events(plane, by_program) for plane in device]
    return [Executed("cpu", _host_events(planes, by_program))]


def _host_events(planes: Iterable[Any], by_program: bool) -> list[Event]:
    events: list[tuple[Event, object]] = []
    ends: dict[object, float] = {}
    for plane in planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:  # small programs run on the thread that called them
            _read_host_line(line, events, ends, by_program)
    # Only now: the end of a thunk may be on a line that is read before its event.
    for event, flow in events:
        event.end = max(event.end, ends.get(flow, 0.0))
    return [event for event, _ in events]


def _host_durations(
    events: list[Event], reads: Reads | None, executions: Mapping[tuple[str, str], int]
) -> Durations:
    if reads is not None:
        kernels = sorted((e for e in events if (e.module, e.op) in reads), key=lambda e: e.start)
        _end_before_readers(kernels, reads)
        _measure_sharing(kernels)

    def each(group: list[Event]) -> list[float]:
        # Without a run id the events of several runs are mixed: the count of one does not apply.
        count = executions.get((group[0].module, group[0].op), 0)
        return alone(per_execution(merged(group), count if group[0].run is not None else 0))

    return grouped(events, each)


def _end_before_readers(events: list[Event], reads: Reads) -> None:
    """End every execution at the latest when a reader of its result starts.

    The thread that completes a multi-threaded thunk first runs the thunks that wait for it, and
    only then reports the end.
    """
    latest: dict[tuple[str, object, str], Event] = {}
    for event in events:
        for name in reads[event.module, event.op]:
            source = latest.get((event.module, event.run, name))
            if source is not None:
                source.end = min(source.end, event.start)
        latest[event.module, event.run, event.op] = event


def _measure_sharing(events: list[Event]) -> None:
    """Record for every event the time during which another instruction ran.

    Args:
        events: Sorted by start.
    """
    # A sweep over the starts; ``active`` holds the events that have not ended.
    active: list[Event] = []
    for event in events:
        active = [other for other in active if other.end > event.start]
        for other in active:
            if (other.module, other.op) != (event.module, event.op):
                both = max(0.0, min(other.end, event.end) - event.start)
                event.shared += both
                other.shared += both
        active.append(event)


def _read_host_line(
    line: Any,
    events: list[tuple[Event, object]],
    ends: dict[object, float],
    by_program: bool,
) -> None:
    for event in line.events:
        name = event.name
        if "::" in name:  # thread-pool, executor and client events
            continue
        stats = dict(event.stats)
        # Flow statistics: "_c" consumes what "_p" of another event produced; "_ct" and "_pt" are
        # their kinds.
        if name.startswith(_END):
            if stats.get("_ct") == _THUNK_FLOW:
                ends[stats.get("_c")] = event.start_ns
        elif "hlo_op" in stats:
            flow = stats.get("_p") if stats.get("_pt") == _THUNK_FLOW else None
            events.append((_read_event(event, stats, by_program), flow))


def _read_event(event: Any, stats: Mapping[str, object], by_program: bool = False) -> Event:
    start = float(event.start_ns)
    module = str(stats.get("hlo_module", ""))
    if by_program and "program_id" in stats:
        module = f"{module}({stats['program_id']})"
    return Event(
        module=module,
        op=str(stats.get("hlo_op", event.name)),
        run=stats.get("run_id"),
        name=event.name,
        start=start,
        end=start + float(event.duration_ns),
    )


def _device_events(plane: Any, by_program: bool) -> Executed:
    lines = {line.name: line for line in plane.lines}
    # GPU planes also have a derived "XLA Ops" line; the streams hold the actual kernels.
    if "XLA Ops" in lines and not any(name.startswith("Stream") for name in lines):
        return Executed("tpu", _tpu_events(lines, by_program))
    events = []
    for name, line in lines.items():
        if name.startswith("Stream"):
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    events.append(_read_event(event, stats, by_program))
    return Executed("gpu", events)


def _stream_durations(
    events: Iterable[Event], executions: Mapping[tuple[str, str], int]
) -> Durations:
    def total(group: list[Event]) -> list[float]:
        count = executions.get((group[0].module, group[0].op), 0)
        return sum_launches(group, count if group[0].run is not None else 0)

    return grouped(events, total)


def _tpu_events(lines: JsonMapping, by_program: bool) -> list[Event]:
    """Read the ops of the ``XLA Ops`` line; module and run come from the enclosing span."""
    spans = [_read_event(e, dict(e.stats)) for e in getattr(lines.get("XLA Modules"), "events", ())]
    spans.sort(key=lambda e: e.start)
    events = []
    for event in lines["XLA Ops"].events:
        stats = dict(event.stats)
        read = _read_event(event, stats, by_program)
        # The event's name may be the whole instruction: "%fusion.1 = f32[8] fusion(...)".
        read.op = str(stats.get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
        inside = [s for s in spans if s.start <= read.start < s.end]
        if inside and "hlo_module" not in stats:
            # The span is named after the module, with the program's id in brackets.
            name = inside[-1].name
            read.module, read.run = name if by_program else name.split("(")[0], inside[-1].start
        events.append(read)
    return events
