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

#: Maximum number of unlabelled kernels that are printed.
_SHOWN = 8


def read_one(path: Path, what: str = "reading") -> Trace:
    """Read a trace, with a progress bar on a terminal.

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
    """Refuse a program for a trace of PyTorch's profiler.

    Raises:
        DatasetError: A program is given for such a trace.
    """
    if given and trace.format == "kineto":
        raise DatasetError(
            "a program does not apply to a trace of PyTorch, which lists its operators",
            where=trace.path,
            hint="leave the program out",
        )


def device_of(trace: Trace, device: str | None, tell: Callable[[str], None]) -> DeviceSpec:
    """Describe the device of a trace: as given, as recorded in the trace, or this machine.

    Args:
        trace: The trace.
        device: Name, file or ``local``; ``None`` for the trace's device.
        tell: Called with a message if this machine is assumed.

    Raises:
        DeviceError: The device is unknown, or neither given nor recorded in the trace.
    """
    from ...features.devices.catalogue import find_device
    from ...predict.devices import resolve_device

    on_host = trace.devices[0].executed.platform == "cpu"
    if device is not None and device != "local":
        spec = resolve_device(device, _trained())
        if on_host != (spec.platform == "cpu"):
            held = "a CPU" if on_host else "an accelerator"
            raise DeviceError(
                f"the kernels of the trace ran on {held}, which {spec.name} is not",
                where=trace.path,
                hint="record on the device itself, or leave --device out",
            )
        return spec
    if device == "local" or on_host:
        # A trace does not identify a CPU; this machine's peaks are used.
        from ..profile import local_device

        if device is None:
            tell("assuming that the trace is of this machine; else give --device")
        return local_device(_trained(), tell)
    if trace.device_name:
        try:
            return find_device(trace.device_name)
        except DeviceError as error:
            raise DeviceError(error.what, where=trace.path, hint="give --device") from None
    raise DeviceError(
        "the trace does not record its device", where=trace.path, hint="give --device"
    )


def _trained() -> dict[str, DeviceSpec]:
    from ...predict.program.predictor import load

    return dict(load("default").devices)


def lowered_programs(
    paths: Sequence[Path | FunctionCall], device: DeviceSpec
) -> list[LoweredProgram]:
    """Lower the candidate programs of a trace for its device; optimised HLO is used as it is."""
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
    """Import traces one by one, and print a summary of each.

    Args:
        console: Console to print to.
        paths: Files, or log directories of ``jax.profiler``.
        out: Folder of the dataset.
        device: Name, file or ``local``; by default the trace's device, and for a CPU this machine.
        programs: Programs that ran, if the traces do not contain them.
        index: Index of the device in the traces.
        keep_names: Whether to keep names in the run's record.
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

    what = "already imported" if result.kept else f"{result.samples} samples"
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
            + f"gaps {duration(step.gaps * 1e6)}, overlap {duration(step.overlap * 1e6)}; "
            f"between runs {duration(result.host_s * 1e6)}"
        )
    for name, share in result.unmatched[:_SHOWN]:
        parts.append(f"  without a label: {share:.1%} {name[:80]}")
    if len(result.unmatched) > _SHOWN:
        rest = sum(share for _, share in result.unmatched[_SHOWN:])
        parts.append(f"  and {len(result.unmatched) - _SHOWN} others, {rest:.1%}")
    for line in parts:
        console.print(line)
