"""Shared by commands: the console, JSON output, declarations and parsing of options."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import options as common
from .from_dataclass import told

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rich.console import Console

    from ..features.devices.device import DeviceSpec
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.torch.program import TorchProgram

#: Longest error line to print, in characters: native parsers quote whole programs.
LONGEST = 2000

PriceOpt = Annotated[
    float | None,
    typer.Option(min=0.0, help="Price of a device for an hour, in any currency: prints the cost."),
]

seconds_of, bytes_of, watts_of = (
    told(common.seconds_of),
    told(common.bytes_of),
    told(common.watts_of),
)
PowerCapOpt = Annotated[
    float | None,
    typer.Option(
        "--power-cap",
        parser=watts_of,
        metavar="WATTS",
        help="Sustained power of a device, such as 400W.",
    ),
]
PricesOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        help="Price of a device for an hour, 2.5, or of one by name, h100-sxm=2.5; may be given "
        "again. Prints the cost.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def named_out(out: Path | None, check: Callable[[Path | None], Path | None]) -> None:
    """Check an ``--out`` whose kind depends on other options.

    Raises:
        typer.BadParameter: Its name is not one of that kind.
    """
    try:
        check(out)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--out: {error.message}") from None


json_file, page_file, yaml_file = map(told, (common.json_file, common.page_file, common.yaml_file))
table_file, plot_file, folder = map(told, (common.table_file, common.plot_file, common.folder))


def called(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """As :func:`..common.options.called`, for Typer."""
    return told(common.called(*suffixes))


Out = Annotated[Path, typer.Option("--out", callback=folder, help="Folder to write.")]
Data = Annotated[list[Path], typer.Option("--data", help="Dataset folder; may be given again.")]
OptionalData = Annotated[
    list[Path] | None, typer.Option("--data", help="Dataset folder; may be given again.")
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Threads = Annotated[int, typer.Option("--threads", help="Threads for training.")]
Top = Annotated[int, typer.Option(min=1, help="Number of kernels to print.")]
Timeline = Annotated[
    Path | None, typer.Option(callback=json_file, help="Write a Chrome trace, .json.")
]

_PROGRAM = (
    "StableHLO text, bytecode, export, or HLO text; module.py:function; or PyTorch's model.pt2."
)
ProgramArg = Annotated[Path, typer.Argument(help=_PROGRAM)]
ProgramOrNone = Annotated[Path | None, typer.Argument(help=_PROGRAM)]
ProgramsOrNone = Annotated[
    list[Path] | None, typer.Argument(metavar="PROGRAM...", help=_PROGRAM, show_default=False)
]
OpOpt = Annotated[
    str | None,
    typer.Option(
        "--op",
        help="Instead of a program, a library operator: 'linear m=1 n=4096 k=4096 dtype=bf16'.",
    ),
]
TrainOpt = Annotated[
    str,
    typer.Option(
        "--train",
        help="Of a PyTorch program, a full training step by: adamw, adam, sgd or momentum.",
    ),
]
LossOpt = Annotated[
    str,
    typer.Option(
        "--loss", help="With --train: cross_entropy or sum; else the module returns its loss."
    ),
]
TorchFrameworkOpt = Annotated[
    str,
    typer.Option(
        "--framework",
        help="Whose kernels a PyTorch program has: xla, torch-eager or torch-compiled.",
    ),
]
DeviceOpt = Annotated[
    str, typer.Option("--device", help="Name (opcast device --list), device file, or 'local'.")
]
ManyDevicesOpt = Annotated[
    str,
    typer.Option(
        "--device",
        help="Name (opcast device --list), device file, or 'local'; several with commas.",
    ),
]
Devices = Annotated[
    list[str] | None, typer.Option("--device", help="Device name or file; may be given again.")
]
OwnDevices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="File of a device of the table that is not in the catalogue; may be given again.",
    ),
]
ModelOpt = Annotated[str, typer.Option("--model", help="Model name or folder (opcast models).")]
TracedDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="What a trace ran on: name or device file; by default as it says, or this machine.",
    ),
]
DeviceIndex = Annotated[
    int | None,
    typer.Option(
        "--device-index",
        min=0,
        help="Device of a trace of several; by default all, if they ran the same.",
    ),
]
OperatorModelOpt = Annotated[
    str, typer.Option("--model", help="Operator model; 'roofline' for the plain roofline.")
]
FrameworkOpt = Annotated[
    str,
    typer.Option("--framework", help="Framework that runs it, such as nanotron; else an average."),
]
SourceOpt = Annotated[
    str,
    typer.Option(
        "--source", help="Whose cluster it is, as in tables of steps, such as one of 'calibrate'."
    ),
]
CompiledOpt = Annotated[
    bool, typer.Option("--compiled", help="Steps are compiled, or replayed as CUDA graphs.")
]
StepModelOpt = Annotated[
    str, typer.Option("--steps", help="File of 'opcast calibrate --steps', for your own cluster.")
]
LoweringOpt = Annotated[str, typer.Option("--lowering", help="auto, xla, fused or op.")]
Fallback = Annotated[
    str, typer.Option(help="Lowering to use if the device's compiler is missing or fails.")
]
Trips = Annotated[
    list[str] | None,
    typer.Option(
        "--trip-count", help="Trip count of a loop, LOOP=N, or N for all loops of unknown count."
    ),
]

Workload = Annotated[
    str,
    typer.Option(
        help="Model such as llama-3-8b or deepseek-v3 (docs/simulate.md); llama, moe, gpt or bert "
        "with --set; or a YAML file with family and sizes."
    ),
]
HfOpt = Annotated[
    Path | None, typer.Option("--hf", help="Instead of --workload: a model's config.json.")
]
ClusterOpt = Annotated[
    str, typer.Option(help="Name such as dgx-h100-x128 or tpu-v5e-x16, or a YAML file.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Model sizes, such as layers=32,d_model=4096; may be given again."),
]

#: Lowerings that run no compiler, so that none can be missing or fail.
WITHOUT_COMPILER = ("op", "fused")


def make_console(width: int = 120) -> Console:
    """Make a console as wide as the terminal or ``COLUMNS``, else ``width`` columns.

    It prints text verbatim: no markup, no control sequences (``PlainConsole``).
    """
    from ..common.console import PlainConsole

    # Rich assumes 80 columns for a pipe, where tables of kernels would wrap.
    own = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PlainConsole(width=None if own else width)


def one_line(error: Exception) -> str:
    """Format an error as one printable line of at most :data:`LONGEST` characters."""
    from ..common.files import printable

    line = printable(" ".join(str(error).split()))
    # Both ends: what failed comes first, the reason often last.
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} […] {line[-LONGEST // 2 :]}"


def print_json(data: object) -> None:
    """Print plain data as one line of JSON."""
    sys.stdout.write(json.dumps(data) + "\n")


def given(context: typer.Context) -> dict[str, str]:
    """Parameters that the user gave: name to spelling on the command line."""
    return {
        str(parameter.name): _spelling(context, parameter)
        for parameter in context.command.params
        if parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        # By source, not by value: an option set to its default was still given.
        and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }


def _spelling(context: typer.Context, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    negative = context.params.get(parameter.name) is False and parameter.secondary_opts
    return str((parameter.secondary_opts if negative else parameter.opts)[0])


def refuse_unused(context: typer.Context, mode: str, used: Collection[str]) -> None:
    """Refuse every given parameter that the command's current mode ignores.

    Args:
        context: Context of the command.
        mode: Mode of the command, as the message names it.
        used: Names of the parameters that the mode reads.

    Raises:
        typer.BadParameter: Another parameter was given.
    """
    refuse(context, mode, _names(context) - set(used), used)


def refuse(
    context: typer.Context, mode: str, spare: Collection[str], used: Collection[str] = ()
) -> None:
    """Refuse some parameters, if the user gave them.

    Args:
        context: Context of the command.
        mode: Mode of the command, as the message names it.
        spare: Names of the parameters that the mode ignores.
        used: Names of parameters that it reads; only checked for existence.

    Raises:
        typer.BadParameter: One of these options was given.
    """
    unknown = {*spare, *used} - _names(context)
    # A misspelt name here would never refuse anything.
    assert not unknown, f"not parameters: {sorted(unknown)}"
    ignored = [spelt for name, spelt in given(context).items() if name in spare]
    if ignored:
        verb = "does" if len(ignored) == 1 else "do"
        raise typer.BadParameter(f"{', '.join(ignored)} {verb} not apply to {mode}")


def _names(context: typer.Context) -> set[str]:
    return {str(parameter.name) for parameter in context.command.params}


def program_of(program: Path) -> Path | FunctionCall:
    """Take an argument as a function with its example arguments if it is ``module.py:function``.

    Only the command line does so, never the reader of programs: importing runs code.

    Raises:
        ProgramError: The function cannot be imported, or has no example arguments.
    """
    from ..features.ir.jax_function import is_function_path, load_function

    text = str(program)
    return load_function(text) if is_function_path(text) and not program.exists() else program


def torch_program_of(
    program: Path | FunctionCall, train: str, loss: str
) -> Path | FunctionCall | TorchProgram:
    """Take a ``.pt2`` file, or a module of a Python file, as PyTorch's; anything else as it is.

    Raises:
        ProgramError: The optimiser or the loss is unknown, or the program is to be trained but
            is not PyTorch's.
    """
    from ..common.errors import ProgramError
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.torch.program import as_torch_program

    named = None if loss == "" else loss
    if isinstance(program, FunctionCall):
        own, args, kwargs, origin = (
            program.function,
            program.args,
            program.kwargs,
            program.origin,
        )
        found = as_torch_program(own, args, kwargs, train, named, origin)
    else:
        found = as_torch_program(program, train=train, loss=named)
    if found is None and (train or loss):
        raise ProgramError(
            "--train and --loss are for programs of PyTorch (.pt2, or a module in a Python file)",
            where=program.origin if isinstance(program, FunctionCall) else str(program),
            hint="leave them out: a function in JAX is its own training step",
        )
    return found or program


def sizes_of(settings: Sequence[str] | None) -> dict[str, object]:
    """Sizes of a workload from texts such as ``layers=32,d_model=4096``.

    Raises:
        PlanError: A part is not a pair.
    """
    from ..simulate.step.settings import read_pairs

    return {k: v for part in settings or () for k, v in read_pairs(part, "--set").items()}


def workload_of(workload: str, hf: Path | None, served: bool = False) -> str:
    """The workload's name or file from two options; prints what it leaves out of the model.

    Args:
        workload: Name or file.
        hf: File of Hugging Face.
        served: Whether the model is served; otherwise a step of it is trained.

    Raises:
        typer.BadParameter: None or both were given, or ``--hf`` is not a ``.json`` file.
    """
    from ..simulate.step.workload import workload_notes

    if bool(workload) == (hf is not None):
        raise typer.BadParameter("give either --workload NAME or --hf config.json")
    if hf is not None and hf.suffix.lower() != ".json":
        raise typer.BadParameter(f"--hf takes a model's config.json, not {hf.name}")
    chosen = workload or str(hf)
    for note in workload_notes(chosen, served):
        typer.echo(f"note: {note}", err=True)
    return chosen


def measured_device(device: str, known: Mapping[str, DeviceSpec]) -> str | DeviceSpec:
    """The device to predict for; for ``local`` this machine as it was measured, and runs now."""
    if device != "local":
        return device
    from ..workflows.device import local_now

    return local_now(known, lambda what: typer.echo(what, err=True))


def trips_of(values: list[str] | None) -> dict[str, int] | int | None:
    """Parse trip counts: ``LOOP=N`` for each loop, or a single ``N`` for all.

    Raises:
        typer.BadParameter: A trip count is malformed or negative.
    """
    if not values:
        return None
    try:
        if len(values) == 1 and "=" not in values[0]:
            return _trips(values[0])
        return {name: _trips(count) for name, count in (v.split("=", 1) for v in values)}
    except ValueError:
        raise typer.BadParameter("write --trip-count N or --trip-count LOOP=N, N ≥ 0") from None


def _trips(text: str) -> int:
    # Zero is allowed: a loop that never runs.
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def require_plots() -> None:
    """Fail early if plots cannot be drawn.

    Raises:
        ModelError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    from ..common.errors import ModelError

    # Looked for, not imported, which would be slow.
    if find_spec("matplotlib") is None:
        raise ModelError("matplotlib is not installed", hint="pip install 'matplotlib>=3.8,<4'")


def prices_of(values: Collection[str]) -> dict[str, float]:
    """Parse prices: ``DEVICE=2.5`` of one device, ``2.5`` of all others (under an empty name).

    Raises:
        typer.BadParameter: One is no number, or below zero.
        DeviceError: A device is not in the catalogue.
    """
    prices = {}
    for text in values:
        name, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0.0 <= price < math.inf:
            raise typer.BadParameter(f"{text!r} is not a price: write 2.5, or h100-sxm=2.5")
        if name:
            from ..features.devices.catalogue import find_typed

            name = find_typed(name).name
        prices[name] = price
    return prices
