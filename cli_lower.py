"""Commands about target compilers: install them, lower a program, show what came out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_common import Json, print_json

if TYPE_CHECKING:
    from .features.compile_process import CompileSettings
    from .features.device import DeviceSpec
    from .features.kernel import LoweredProgram

compilers_app = typer.Typer(
    no_args_is_help=True, help="Compilers of devices that are not here.", rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add the commands ``lower`` and ``compilers``."""
    app.command()(lower)
    app.add_typer(compilers_app, name="compilers")


def lower(
    program: Annotated[Path, typer.Argument(help="StableHLO text, bytecode, export, or HLO text.")],
    device: Annotated[str, typer.Option(help="Name, device file, or 'local'.")] = "local",
    lowering: Annotated[str, typer.Option(help="auto, xla, fused or op.")] = "xla",
    out: Annotated[Path | None, typer.Option(help="Write the optimised HLO.")] = None,
    fallback: Annotated[
        str, typer.Option(help="Lowering where the compiler is missing or fails.")
    ] = "",
    compile_timeout: Annotated[float, typer.Option(help="Most seconds of the compiler.")] = 3600.0,
    compile_memory: Annotated[
        float, typer.Option(help="Most GiB of the compiler; 0: four fifths of the machine's.")
    ] = 0.0,
    xla_flag: Annotated[
        list[str] | None, typer.Option(help="Option of XLA, NAME=VALUE; may be given again.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile all layers, even if they are equal.")
    ] = False,
    cache: Annotated[bool, typer.Option(help="Use the cache of compiled programs.")] = True,
    json_output: Json = False,
) -> None:
    """Lower a program to the kernels of a device, which need not be here."""
    from .features.files import write_text
    from .features.lowering import lower as lower_program
    from .features.reader import read_program
    from .predict.devices import resolve_device

    spec = None if device == "local" else resolve_device(device, {})
    found = lower_program(
        read_program(program), lowering, cache=None if cache else False, device=spec,
        fallback=fallback,
        settings=_settings(compile_timeout, compile_memory, xla_flag or [], whole),
    )  # fmt: skip
    if out is not None:
        write_text(out, found.hlo)
    data = summary(found, spec)
    if json_output:
        print_json(data)
    else:
        _print_summary(data)


def summary(lowered: LoweredProgram, device: DeviceSpec | None) -> dict[str, Any]:
    """What came out of a lowering, as ``opcast lower --json`` prints it."""
    kernels = [k for k in lowered.kernels if k.takes_time]
    memory = device.memory_bytes if device else 0.0
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


def _cycles(lowered: LoweredProgram, device: DeviceSpec | None) -> dict[str, Any]:
    """The compiler's own estimate, if it gives one, and how much it leaves out."""
    kernels = [k for k in lowered.kernels if k.takes_time]
    cycles = sum(k.cycles * k.multiplicity for k in kernels)
    if not cycles:
        return {}
    found: dict[str, Any] = {
        "estimated_cycles": cycles,
        "kernels_without_estimate": sum(not k.cycles for k in kernels),
    }
    if device is not None and device.clock_hz:
        found["estimated_us"] = cycles / device.clock_hz * 1e6
    return found


def _print_summary(data: dict[str, Any]) -> None:
    from .predict.render import size

    echo = typer.echo
    echo(f"{data['device']}: {data['kernels']} kernels, {data['executions']:.0f} executions")
    echo(f"lowering {data['lowering']}; compiler {data['compiler'] or 'none'}")
    echo(f"kinds: {', '.join(f'{kind} {n}' for kind, n in data['kinds'].items())}")
    echo(f"{data['flops'] / 1e9:.4g} GFLOP, {data['bytes'] / 1e6:.4g} MB moved")
    fits = {True: ", fits", False: ", does NOT fit", None: ""}[data["fits"]]
    of = f" of {size(data['device_memory_bytes'])}" if data["device_memory_bytes"] else ""
    peak = size(data["peak_memory_bytes"])
    echo(f"peak memory {peak}{of}{fits} ({data['memory_source']})")
    if "estimated_cycles" in data:
        time = f", {data['estimated_us']:.4g} µs" if "estimated_us" in data else ""
        echo(
            f"the compiler's own estimate: {data['estimated_cycles']:.4g} cycles{time}, without "
            f"{data['kernels_without_estimate']} kernels"
        )
    if data["compile_seconds"]:
        echo(f"compiled in {data['compile_seconds']:.1f} s")
    for note in data["notes"]:
        echo(f"note: {note}")


@compilers_app.command("install")
def install(
    platform: Annotated[list[str], typer.Argument(help="gpu, tpu, or both.")],
) -> None:
    """Install compilers into a folder of their own, at versions that fit the jaxlib in use."""
    from rich.console import Console

    from .features.compilers import install_compiler, packages

    console = Console(stderr=True)
    for name in platform:
        wanted = packages(name)
        with console.status(f"installing {', '.join(wanted)}"):
            found = install_compiler(name)
        typer.echo(f"{name}: {found.version} in {found.folder}")


@compilers_app.command("list")
def list_compilers() -> None:
    """List the compilers that are installed."""
    from .features.compilers import PLATFORMS, find_compiler
    from .features.errors import CompilerError

    for name in PLATFORMS:
        try:
            found = find_compiler(name)
        except CompilerError as error:
            typer.echo(f"{name}: {error}")
        else:
            typer.echo(f"{name}: {found.version} in {found.folder or 'this environment'}")


def _settings(
    timeout_s: float, memory_gib: float, flags: list[str], whole: bool
) -> CompileSettings:
    from .features.compile_process import CompileSettings

    given: dict[str, Any] = {}
    for flag in flags:
        name, equals, value = flag.lstrip("-").partition("=")
        if not equals:
            raise typer.BadParameter(f"write --xla-flag NAME=VALUE, not {flag!r}")
        given[name] = _flag_value(value)
    return CompileSettings(timeout_s, int(memory_gib * 2**30), given, repeats=not whole)


def _flag_value(text: str) -> str | int | bool | float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
