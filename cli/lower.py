"""Commands that lower and partition programs and manage target compilers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import DeviceOpt, Fallback, Json, LoweringOpt, Option, ProgramArg
from ..common.progress import wrote
from ..common.types import JsonObject
from .from_dataclass import names_of
from .options import WITHOUT_COMPILER, print_json, program_of, refuse

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..features.ir.reader import SourceProgram
    from ..features.kernels.kernel import LoweredProgram
    from ..features.lowering.target_compiler.process import CompileSettings


@dataclass(frozen=True)
class Compiler:
    """Limits and options of a target compiler, which runs in a separate process.

    The defaults are those of ``CompileSettings``. The time limit of an hour is for compilers that
    hang.
    """

    compile_timeout: Annotated[
        float, Option("Time limit of the compiler in seconds.", least=1e-3)
    ] = 3600.0
    compile_memory: Annotated[
        float, Option("Memory limit of the compiler in GiB; 0 for 80 % of this machine's memory.")
    ] = 0.0
    xla_flag: Annotated[Sequence[str], Option("XLA flag, NAME=VALUE; may be given again.")] = ()
    whole: Annotated[bool, Option("Compile every layer, even if layers repeat.", ("--whole",))] = (
        False
    )

    def settings(self) -> CompileSettings:
        """Convert to the settings of the compiler's process.

        Raises:
            typer.BadParameter: A flag has no value.
        """
        from ..features.lowering.target_compiler.process import CompileSettings

        given: dict[str, str | int | bool | float] = {}
        for flag in self.xla_flag:
            name, equals, value = flag.lstrip("-").partition("=")
            if not equals:
                raise typer.BadParameter(f"write --xla-flag NAME=VALUE, not {flag!r}")
            given[name] = _flag_value(value)
        memory = int(self.compile_memory * 2**30)
        return CompileSettings(self.compile_timeout, memory, given, repeats=not self.whole)


def lower(
    context: typer.Context,
    program: ProgramArg,
    compiler: Compiler,
    device: DeviceOpt = "local",
    lowering: LoweringOpt = "xla",
    out: Annotated[Path | None, Option("Write the optimised HLO to this file.")] = None,
    fallback: Fallback = "",
    cache: Annotated[bool, Option("Use the cache of compiled programs.")] = True,
    json_output: Json = False,
) -> None:
    """Lower a program to the kernels of a device.

    The device need not be attached: its compiler runs without it.
    """
    from ..common.errors import LoweringError
    from ..common.files import write_text
    from ..features.lowering.lower import lower as lower_program
    from ..predict.devices import find_anywhere

    spec = None if device == "local" else find_anywhere(device)
    if lowering in WITHOUT_COMPILER:
        refuse(context, f"--lowering {lowering}, which produces no HLO", {"out"})
    _refuse_compiler_options(context, lowering, spec, compiler.xla_flag)
    # ``False`` disables the cache; ``None`` is the default folder.
    lowered = lower_program(
        program_of(program),
        lowering,
        cache=None if cache else False,
        device=spec,
        fallback=fallback,
        settings=compiler.settings(),
    )
    if out is not None:
        if not lowered.hlo:
            raise LoweringError(
                f"lowering {lowered.lowering} was used, which produces no HLO",
                where=str(out),
                hint="leave --out out, or install the compiler: opcast compilers install",
            )
        write_text(out, lowered.hlo)
        wrote(out, "optimised HLO")
    data = summary(lowered, spec)
    if json_output:
        print_json(data)
    else:
        _print_summary(data)


def _refuse_compiler_options(
    context: typer.Context, lowering: str, device: DeviceSpec | None, flags: Sequence[str]
) -> None:
    """Refuse options of a target compiler if none will run."""
    # Options that apply only to a target compiler in a separate process.
    limits = names_of(Compiler) - {"xla_flag"} | {"fallback"}
    if lowering == "op":
        refuse(context, "--lowering op, which compiles nothing", limits | {"xla_flag", "cache"})
    elif lowering == "fused":
        from ..features.lowering.options import HEEDED

        refuse(context, "--lowering fused, which compiles nothing", limits | {"cache"})
        if any(flag.lstrip("-").partition("=")[0] not in HEEDED for flag in flags):
            raise typer.BadParameter(
                f"--lowering fused supports only --xla-flag {', '.join(HEEDED)}"
            )
    # The local device's compiler runs in this process, without limits.
    elif device is None or device.platform not in ("gpu", "tpu"):
        refuse(context, "this machine's own compiler", limits | {"xla_flag"})


def summary(lowered: LoweredProgram, device: DeviceSpec | None) -> dict[str, object]:
    """Summarise a lowering for ``opcast lower --json``."""
    kernels = [k for k in lowered.kernels if k.takes_time]
    memory = device.usable_bytes if device else 0.0
    return {
        "device": lowered.target,
        "lowering": lowered.lowering,
        "compiler": lowered.compiler,
        "compile_seconds": lowered.compile_seconds,
        "kernels": len(kernels),
        "executions": sum(k.multiplicity for k in kernels),
        "kinds": dict(Counter(k.kind for k in kernels).most_common()),
        "flops": sum(k.flops * k.multiplicity for k in kernels),
        "bytes": sum(k.bytes * k.multiplicity for k in kernels),
        "peak_memory_bytes": lowered.peak_memory_bytes,
        "memory_source": lowered.memory_source,
        "device_memory_bytes": memory,
        "fits": lowered.peak_memory_bytes <= memory if memory else None,
        "notes": lowered.notes,
        **_cycles(lowered, device),
    }


def _cycles(lowered: LoweredProgram, device: DeviceSpec | None) -> dict[str, float]:
    """The compiler's cost estimate, if any, and the number of kernels without one."""
    kernels = [k for k in lowered.kernels if k.takes_time]
    # Only libtpu gives estimates; zero means none.
    cycles = sum(k.cycles * k.multiplicity for k in kernels)
    if not cycles:
        return {}
    estimate: dict[str, float] = {
        "estimated_cycles": cycles,
        "kernels_without_estimate": sum(not k.cycles for k in kernels),
    }
    if device is not None and device.clock_hz:
        estimate["estimated_us"] = cycles / device.clock_hz * 1e6
    return estimate


def _print_summary(data: JsonObject) -> None:
    from ..common.errors import WARNING
    from ..common.units import duration, quantity, size

    echo = typer.echo
    echo(f"{data['device']}: {data['kernels']} kernels, {data['executions']:.0f} executions")
    echo(f"lowering {data['lowering']}; compiler {data['compiler'] or 'none'}")
    echo(f"kinds: {', '.join(f'{kind} {n}' for kind, n in data['kinds'].items())}")
    echo(f"{quantity(data['flops'], 'FLOP', 4)}, {quantity(data['bytes'], 'B', 4)} moved")
    fits = {True: ", fits", False: ", does NOT fit", None: ""}[data["fits"]]
    of = f" of {size(data['device_memory_bytes'])}" if data["device_memory_bytes"] else ""
    peak = size(data["peak_memory_bytes"])
    echo(f"peak memory {peak}{of}{fits} ({data['memory_source']})")
    if "estimated_cycles" in data:
        time = f", {duration(data['estimated_us'])}" if "estimated_us" in data else ""
        echo(
            f"the compiler's estimate: {data['estimated_cycles']:,.0f} cycles{time}, without "
            f"{data['kernels_without_estimate']} kernels"
        )
    if data["compile_seconds"]:
        echo(f"compiled in {data['compile_seconds']:.1f} s")
    for note in data["notes"]:
        echo(note if note.startswith(WARNING) else f"note: {note}")


def install(
    platform: Annotated[Sequence[str], Option("gpu, tpu, or both.", argument=True)],
) -> None:
    """Install compilers that match this jaxlib, in a separate folder."""
    from rich.console import Console

    from ..features.lowering.target_compiler.install import install_compiler, packages

    console = Console(stderr=True)
    for name in platform:
        wanted = packages(name)
        with console.status(f"installing {', '.join(wanted)}"):
            compiler = install_compiler(name)
        typer.echo(f"{name}: {compiler.version} in {compiler.folder}")


def list_compilers() -> None:
    """List the installed compilers."""
    from ..common.errors import CompilerError
    from ..features.lowering.target_compiler.install import PLATFORMS, find_compiler

    for name in PLATFORMS:
        try:
            compiler = find_compiler(name)
        except CompilerError as error:
            typer.echo(f"{name}: {error}")
        else:
            typer.echo(f"{name}: {compiler.version} in {compiler.folder or 'this environment'}")


def _flag_value(text: str) -> str | int | bool | float:
    # XLA's compile options are typed: it refuses a string in place of a bool or a number.
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    # int first: a number without a decimal point is an integer flag.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _batch_found(source: SourceProgram) -> list[int] | None:
    """Find the arguments whose first dimension is the batch, and print them to stderr."""
    from ..predict.plan.program import read_planned

    own = read_planned(source).arguments
    found = [n for n, argument in enumerate(own) if argument.batch == 0]
    if found:
        names = ", ".join(own[n].name for n in found)
        typer.echo(f"taking {names} as the batch; to change this, give --batch-args", err=True)
    return found or None


def partition(
    context: typer.Context,
    program: Annotated[
        Path, Option("StableHLO program for one device, or with shardings.", argument=True)
    ],
    out: Annotated[Path, Option("File to write.")],
    mesh: Annotated[
        str,
        Option("Mesh such as dp=8, fsdp=4 or dp=2,fsdp=4; default: the program's own shardings."),
    ] = "",
    batch_args: Annotated[
        str,
        Option("Indices of the batch arguments, such as 3,4; default: found automatically."),
    ] = "",
    format: Annotated[str, Option("text or bytecode.")] = "text",
    device: Annotated[str, Option("Device to lower a module.py:function for.")] = "local",
) -> None:
    """Partition a program over a mesh or by its own shardings, with explicit collectives.

    The result can be given to opcast predict --cluster.
    """
    from ..common.errors import WARNING
    from ..common.files import write_bytes
    from ..common.units import size
    from ..datagen.partition.program import partition_annotated, partition_program
    from ..features.ir.platforms import platform_of
    from ..features.ir.reader import read_program
    from ..predict.devices import find_anywhere

    try:
        chosen = [int(n) for n in batch_args.split(",")] if batch_args else None
    except ValueError:
        raise typer.BadParameter("write --batch-args 3,4") from None
    if format not in ("text", "bytecode"):
        raise typer.BadParameter("--format must be text or bytecode")
    opened = program_of(program)
    if isinstance(opened, Path):
        refuse(context, "a program from a file, which is already lowered", {"device"})
    place = platform_of(find_anywhere(device)) if device != "local" else None
    source = read_program(opened, platform=place)
    if not mesh:
        if chosen is not None:
            raise typer.BadParameter("--batch-args goes with --mesh")
        write_bytes(out, partition_annotated(source, format))
        wrote(out, f"{out.stat().st_size} bytes")
        return
    if chosen is None and not source.program.aliases and "fsdp" not in mesh:
        # Donated arguments would distinguish the state from the batch; there are none.
        chosen = _batch_found(source)
    written = partition_program(source, mesh, out, chosen, format)
    wrote(out, f"{out.stat().st_size} bytes")
    parameters = f"; parameters {size(written.parameter_bytes)}" if written.parameter_bytes else ""
    typer.echo(f"collectives move {size(written.moved_bytes)} per run{parameters}")
    if written.note:
        typer.echo(f"{WARNING}{written.note}", err=True)
