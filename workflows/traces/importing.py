"""Import traces as a dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import DatasetError, DeviceError

if TYPE_CHECKING:
    from rich.console import Console

    from ...datagen.traces.importer import ImportedTrace
    from ...datagen.traces.trace import Trace
    from ...features.devices.device import DeviceSpec
    from ...features.ir.jax_function import FunctionCall
    from ...features.kernels.kernel import LoweredProgram

#: Most names that are printed with the share of the time that has no label.
_SHOWN = 8


def read_one(path: Path, what: str = "reading") -> Trace:
    """Read a trace, on a terminal with a bar.

    Raises:
        DatasetError: It cannot be read, or is a directory with profiles of several hosts.
    """
    from ...common.progress import counting
    from ...datagen.traces.importer import read_trace, trace_files

    files = trace_files([path])
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:4])
        raise DatasetError(
            f"profiles of {len(files)} hosts", where=str(path), hint=f"give one of: {names}"
        )
    if not sys.stderr.isatty():
        return read_trace(files[0])
    with counting(what) as moved:
        return read_trace(files[0], moved)


def refuse_program(trace: Trace, given: bool) -> None:
    """Refuse a program beside a trace of PyTorch's profiler.

    Raises:
        DatasetError: A program is given beside such a trace.
    """
    if given and trace.format == "kineto":
        raise DatasetError(
            "a trace of PyTorch itself lists the operators that ran",
            where=trace.path,
            hint="leave the program out",
        )


def device_of(trace: Trace, device: str | None, tell: Callable[[str], None]) -> DeviceSpec:
    """Describe the device of a trace: as given, as the trace names it, or this machine.

    Args:
        trace: The trace.
        device: Name, file or ``local``; ``None`` for the trace's device.
        tell: Called with a line if this machine is taken.

    Raises:
        DeviceError: The device is unknown, or neither given nor named in the trace.
    """
    from ...features.devices.catalogue import find_device
    from ...predict.devices import resolve_device

    on_host = trace.devices[0].executed.platform == "cpu"
    if device is not None and device != "local":
        spec = resolve_device(device, _trained())
        if on_host != (spec.platform == "cpu"):
            held = "of a host's CPU alone" if on_host else "of an accelerator"
            raise DeviceError(
                f"the trace holds kernels {held}, and {spec.name} is none",
                where=trace.path,
                hint="record on the device itself, or leave --device out",
            )
        return spec
    if device == "local" or on_host:
        # The machine is not in the trace: the ceilings of the one at hand are taken.
        from ..profile import local_device

        if device is None:
            tell("taken as a trace of this machine; name another with --device")
        return local_device(_trained(), tell)
    if trace.device_name:
        try:
            return find_device(trace.device_name)
        except DeviceError as error:
            raise DeviceError(error.what, where=trace.path, hint="name it with --device") from None
    raise DeviceError(
        "the trace does not state what it ran on", where=trace.path, hint="name it with --device"
    )


def _trained() -> dict[str, DeviceSpec]:
    from ...predict.program.predictor import load

    return dict(load("default").devices)


def lowered_programs(
    paths: Sequence[Path | FunctionCall], device: DeviceSpec
) -> list[LoweredProgram]:
    """Lower programs that a trace may be of, for its device; optimised HLO is taken as it is."""
    from ...features.ir.platforms import platform_of
    from ...features.ir.reader import read_program
    from ...features.lowering.lower import lower

    lowered = []
    for path in paths:
        source = read_program(path, platform=platform_of(device))
        ran = source.kind == "hlo" and source.program.is_scheduled
        lowered.append(lower(source, cache=False) if ran else lower(source, "auto", device=device))
    return lowered


def run_import_traces(
    console: Console,
    paths: Sequence[Path],
    out: Path,
    *,
    device: str | None,
    programs: Sequence[Path],
    index: int | None,
    keep_names: bool,
    tell: Callable[[str], None],
) -> list[ImportedTrace]:
    """Import traces one by one, and print what became of each.

    Args:
        console: Where to print.
        paths: Files, or log directories of ``jax.profiler``.
        out: The dataset's folder.
        device: Name, file or ``local``; by default the trace's device, and for a CPU this machine.
        programs: Programs that ran, where the traces do not hold them.
        index: Device of the traces.
        keep_names: Keep names in the run's record.
        tell: Called with a line for each note.

    Raises:
        OpcastError: A trace cannot be read or labelled, or its device is unknown.
    """
    from ...datagen.traces.importer import import_trace, trace_files

    results = []
    for path in trace_files(paths):
        trace = read_one(path, f"reading {path.name}")
        refuse_program(trace, bool(programs))
        spec = device_of(trace, device, tell)
        given = lowered_programs(programs, spec)
        result = import_trace(trace, out, spec, given=given, index=index, keep_names=keep_names)
        results.append(result)
        _print(console, result, spec.name)
        for note in result.notes:
            tell(f"note: {note}")
    return results


def _print(console: Console, result: ImportedTrace, device: str) -> None:
    from ...common.units import duration

    what = "there already" if result.kept else f"{result.samples} samples"
    parts = [
        f"{Path(result.path).name}: {what} of {device}, {result.matched:.1%} of the time labelled"
    ]
    for name, runs in result.programs.items():
        parts.append(f"  program {name}: {runs} runs")
    if result.collectives:
        parts.append(f"  {result.collectives} collectives with sizes, for calibrate-collectives")
    step = result.step
    if step is not None:
        parts.append(
            f"  a run takes {duration(step.span * 1e6)}: kernels {duration(step.kernels * 1e6)}, "
            + (
                f"collectives {duration(step.collectives * 1e6)} "
                f"({duration(step.exposed * 1e6)} exposed), "
                if step.collectives
                else ""
            )
            + f"gaps {duration(step.gaps * 1e6)}, at once {duration(step.overlap * 1e6)}; "
            f"between runs {duration(result.host_s * 1e6)}"
        )
    for name, share in result.unmatched[:_SHOWN]:
        parts.append(f"  without a label: {share:.1%} {name[:80]}")
    if len(result.unmatched) > _SHOWN:
        rest = sum(share for _, share in result.unmatched[_SHOWN:])
        parts.append(f"  and {len(result.unmatched) - _SHOWN} others, {rest:.1%}")
    for line in parts:
        console.print(line)
