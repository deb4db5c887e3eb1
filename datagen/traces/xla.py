"""Profiles of JAX and XLA (``*.xplane.pb``), and kernels of traces matched to XLA's programs.

Events are read by ``jax.profiler.ProfileData``. It omits the event metadata, which contains the
optimised modules
(https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto);
these are read from the message's fields, with everything else skipped. Kernels are matched to those
of a program by instruction.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ...common.errors import DatasetError
from ...common.wire import fields
from ...features.ir.hlo_reader import parse_hlo
from ...features.ir.program import Program
from ...features.ir.reader import read_program
from ...features.kernels.kernel import LoweredProgram
from ...features.lowering.lower import lower
from ..profile.executions import Event
from ..profile.trace import Executed, executed, expected
from .trace import DeviceTrace, RunTime, Trace, TraceKernel, by_run, chosen, run_time

#: Instructions whose events span the events of the computations that they call.
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-update", "async-done")
#: Characters that XLA replaces in the names of GPU kernels (``SanitizeFunctionName``).
_REPLACED = re.compile(r"[^0-9A-Za-z_]")
#: Plane of the profile with the executed modules.
_METADATA = b"/host:metadata"
# Field numbers, by message.
_PLANES, _PLANE_NAME, _EVENT_METADATA = 1, 2, 4
_VALUE, _EVENT_NAME, _STATS, _STAT_BYTES, _HLO_MODULE = 2, 2, 5, 6, 1
#: Statistics of a device's plane that name the device.
_DEVICE_NAMES = ("device_type_string", "gpu_device_name", "device_name")


def read_xplane(path: Path) -> Trace:
    """Read a profile.

    Raises:
        DatasetError: It is truncated or damaged, or contains no kernels.
    """
    from jax.profiler import ProfileData

    data = path.read_bytes()
    try:
        profile = ProfileData.from_serialized_xspace(data)
        hlo = dict(_modules(memoryview(data)))
    except (RuntimeError, ValueError) as error:
        raise DatasetError(
            f"the profile is cut off or damaged: {error}",
            where=str(path),
            hint="copy it again; a trace is whole once stop_trace() has returned",
        ) from None
    devices = [DeviceTrace(i, e) for i, e in enumerate(executed(profile, by_program=True))]
    devices = [d for d in devices if d.executed.events]
    if not devices:
        raise DatasetError(
            "the profile holds no kernels, only events of the host",
            where=str(path),
            hint="record executions of compiled functions: block_until_ready() before "
            "stop_trace(), and host_tracer_level at least 1 on a CPU",
        )
    names = [_device_name(dict(plane.stats)) for plane in profile.planes]
    return Trace(str(path), "xplane", devices, next(filter(None, names), ""), hlo)


def _device_name(stats: Mapping[str, object]) -> str:
    return next((str(stats[name]) for name in _DEVICE_NAMES if name in stats), "")


def _modules(space: memoryview) -> Iterator[tuple[str, str]]:
    """Name and text of each module in a profile."""
    for number, plane in fields(space):
        if number == _PLANES and isinstance(plane, memoryview) and _of_modules(plane):
            for of, entry in fields(plane):
                if of == _EVENT_METADATA and isinstance(entry, memoryview):
                    yield from _module(entry)


def _of_modules(plane: memoryview) -> bool:
    return any(n == _PLANE_NAME and _bytes(v) == _METADATA for n, v in fields(plane))


def _bytes(value: int | memoryview) -> bytes:
    return bytes(value) if isinstance(value, memoryview) else b""


def _module(entry: memoryview) -> Iterator[tuple[str, str]]:
    from ...features.ir.jax_compat import hlo_text

    event = dict(fields(entry)).get(_VALUE)
    if not isinstance(event, memoryview):
        return
    name = ""
    for number, value in fields(event):
        if not isinstance(value, memoryview):
            continue
        if number == _EVENT_NAME:
            name = bytes(value).decode(errors="replace")
        # Each statistic is a module's message, or only its key.
        stat = dict(fields(value)).get(_STAT_BYTES) if number == _STATS else None
        proto = dict(fields(stat)).get(_HLO_MODULE) if isinstance(stat, memoryview) else None
        if isinstance(proto, memoryview):
            yield name, hlo_text(bytes(proto))


@dataclass
class TracedProgram:
    """A program with its measurements from a trace.

    Attributes:
        module: Name of its module in the trace.
        lowered: Its kernels.
        durations: Seconds of each execution by kernel name.
        runs: Its runs; empty if the trace has no start times.
        unmatched: Total seconds of instructions that are not kernels of the program, by name.
    """

    module: str
    lowered: LoweredProgram
    durations: dict[str, list[float]]
    runs: list[RunTime]
    unmatched: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Total execution time of its kernels."""
        return sum(sum(own) for own in self.durations.values())


class _Known(NamedTuple):
    """A program that may have run, and the module that lists its instructions."""

    lowered: LoweredProgram
    program: Program | None


def traced_programs(
    trace: Trace, given: Sequence[LoweredProgram] = (), index: int | None = None
) -> list[TracedProgram]:
    """Match executions to programs, those with the largest total time first.

    Args:
        trace: The trace.
        given: Programs as they ran, for modules that are not in the trace.
        index: Device of the trace; by default all of them, if they ran the same kernels.

    Raises:
        DatasetError: Devices ran different kernels, or the program that ran is missing.
    """
    devices = chosen(trace, index)
    events = [e for device in devices for e in device.executed.events]
    others = [_Known(own, parse_hlo(own.hlo) if own.hlo else None) for own in given]
    if not any(e.op for e in events):
        devices = [_named(device, others) for device in devices]
    spent: dict[str, float] = defaultdict(float)
    ran: dict[str, set[str]] = defaultdict(set)
    for event in (e for device in devices for e in device.executed.events if e.op):
        spent[event.module] += event.end - event.start
        ran[event.module].add(event.op)
    known: dict[str, _Known] = {}
    for module in sorted(spent, key=lambda m: -spent[m]):
        texts = [t for name, t in trace.hlo.items() if module in (name, name.rpartition("(")[0])]
        candidates = [_as_it_ran(text) for text in texts] or others
        if candidates:
            # For events without a program id, the module whose instructions ran fits best.
            best = max(candidates, key=lambda own: _overlap(own.lowered, ran[module]))
            if _overlap(best.lowered, ran[module]) > 0.0:
                known[module] = best
    if not known:
        raise _unknown(trace, list(spent), bool(given))
    return [_program(trace, devices, module, own) for module, own in known.items()]


def _as_it_ran(text: str) -> _Known:
    source = read_program(text)
    # Optimised modules are taken as they are: no compiler runs.
    return _Known(lower(source, cache=False), source.program)


def _overlap(lowered: LoweredProgram, ran: set[str]) -> float:
    """Fraction of a program's kernels that ran."""
    names = {k.name for k in lowered.kernels if k.takes_time}
    return len(names & ran) / max(len(names), 1)


def _unknown(trace: Trace, modules: list[str], given: bool) -> DatasetError:
    if given:
        return DatasetError(
            "no kernel of the trace has the name of one of the program's",
            where=trace.path,
            hint="give the module that ran: compiled.as_text(), or *after_optimizations.txt of "
            "XLA_FLAGS=--xla_dump_to",
        )
    what = f"the trace holds no HLO of {', '.join(modules[:3])}" if modules else (
        "the trace does not state which instructions its kernels belong to"
    )  # fmt: skip
    return DatasetError(
        what,
        where=trace.path,
        hint="record with enable_hlo_proto (the default), or give the module that ran with "
        "--program: compiled.as_text()",
    )


def _named(device: DeviceTrace, programs: Sequence[_Known]) -> DeviceTrace:
    """Derive the instructions of events from the names of GPU kernels.

    Library kernels, whose names are not derived from instructions, keep their names and count
    towards the program that ran before them, so that their time is not lost.
    """
    kernels = {
        _REPLACED.sub("_", k.name): (str(number), k.name)
        for number, program in enumerate(programs)
        for k in program.lowered.kernels
        if k.takes_time
    }
    found = [kernels.get(_REPLACED.sub("_", e.name)) for e in device.executed.events]
    module = next((own[0] for own in found if own), "")
    events: list[Event] = []
    for event, own in zip(device.executed.events, found, strict=True):
        module = own[0] if own else module
        if own or (module and not (isinstance(event, TraceKernel) and event.copy)):
            events.append(replace(event, module=module, op=own[1] if own else event.name))
    return DeviceTrace(device.index, Executed(device.executed.platform, events))


def _program(
    trace: Trace,
    devices: Sequence[DeviceTrace],
    module: str,
    known: _Known,
) -> TracedProgram:
    lowered = known.lowered
    kernels = {k.name: k for k in lowered.kernels}
    labelled = {name for name, k in kernels.items() if k.takes_time}
    computations = known.program.computations.values() if known.program else ()
    opcodes = {op.name: op.opcode for c in computations for op in c.ops}
    collectives = {name for name, k in kernels.items() if k.kind == "collective"}
    durations: dict[str, list[float]] = defaultdict(list)
    unmatched: dict[str, float] = defaultdict(float)
    runs: list[RunTime] = []
    executions, reads = expected(module, lowered)
    for device in devices:
        own = [
            e
            for e in device.executed.events
            if e.module == module
            and (e.op in labelled or (e.op not in kernels and opcodes.get(e.op) not in _CONTAINERS))
        ]
        found = Executed(device.executed.platform, own).durations(executions, reads)
        for (_, name), seconds in found.items():
            if name in labelled:
                durations[name] += [s for s in seconds if s > 0]
            else:
                unmatched[name] += sum(seconds)
        if trace.ordered:
            runs += [
                run_time(run, lambda e: e.op in collectives, device.index) for run in by_run(own)
            ]
    counted = _counted(lowered, durations, len(runs))
    return TracedProgram(module, counted, dict(durations), runs, dict(unmatched))


def _counted(
    lowered: LoweredProgram, durations: Mapping[str, Sequence[float]], runs: int
) -> LoweredProgram:
    """Take the trip counts of loops of unknown length from the trace."""
    notes = [n for n in lowered.notes if "no known trip count" not in n]
    if not runs or len(notes) == len(lowered.notes):
        return lowered
    kernels = [
        replace(k, multiplicity=max(1.0, round(len(durations[k.name]) / runs)))
        if k.scope and k.multiplicity == 1 and k.name in durations
        else k
        for k in lowered.kernels
    ]
    return replace(lowered, kernels=kernels, notes=notes)


def anonymous(lowered: LoweredProgram) -> LoweredProgram:
    """The program without loop names, source lines, and notes, which contain both."""
    scopes: dict[str, str] = {}

    def hidden(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(scopes.setdefault(name, f"loop.{len(scopes)}") for name in names)

    kernels = [replace(k, sources=(), scope=hidden(k.scope)) for k in lowered.kernels]
    return replace(lowered, kernels=kernels, notes=[], hlo="", module=None)
