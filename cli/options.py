"""Helpers of the commands: console, JSON output, refused options, and option values."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from .lazy import LISTED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rich.console import Console

    from ..features.devices.device import DeviceSpec
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.torch.program import TorchProgram


class Answer(Protocol):
    """A result that ``--json`` can print."""

    def to_dict(self) -> Mapping[str, object]:
        """Convert to JSON-serialisable data."""


#: Longest error line in characters; native parsers quote whole programs.
LONGEST = 2000

#: Lowerings that do not run a compiler.
WITHOUT_COMPILER = ("op", "fused")


def named_out(out: Path | None, check: Callable[[Path | None], object]) -> None:
    """Check an ``--out`` whose file type depends on other options.

    Raises:
        typer.BadParameter: The name does not have that type.
    """
    try:
        check(out)
    except ValueError as error:
        raise typer.BadParameter(f"--out: {error}") from None


def make_console(width: int = 120) -> Console:
    """Make a console as wide as the terminal or ``COLUMNS``, else ``width`` columns.

    It prints text verbatim, without markup or control sequences (``PlainConsole``).
    """
    from ..common.console import PlainConsole

    # Rich assumes 80 columns for a pipe, where kernel tables would wrap.
    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PlainConsole(width=None if width_known else width)


def one_line(error: Exception) -> str:
    """Format an error as one printable line of at most :data:`LONGEST` characters."""
    from ..common.files import printable

    line = printable(" ".join(str(error).split()))
    # Keep both ends: the failed operation is named first, the reason often last.
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} […] {line[-LONGEST // 2 :]}"


def print_json(data: object) -> None:
    """Print data as one line of JSON."""
    sys.stdout.write(json.dumps(data) + "\n")


def print_answer(
    as_json: bool, answer: Answer, show: Callable[..., None], *settings: object
) -> None:
    """Print a result as JSON or as text.

    Args:
        as_json: Whether to print JSON.
        answer: The result.
        show: Function of ``predict/render``, called with a console, the result and ``settings``.
        settings: Further arguments of ``show``.
    """
    if as_json:
        print_json(answer.to_dict())
    else:
        show(make_console(), answer, *settings)


def given(context: typer.Context) -> dict[str, str]:
    """Parameters that the user gave, by name, with their spelling on the command line."""
    return {
        str(parameter.name): _spelling(context, parameter)
        for parameter in context.command.params
        if parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        # By source rather than value, since an option may be set to its default.
        and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }


def _spelling(context: typer.Context, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    negative = context.params.get(parameter.name) is False and parameter.secondary_opts
    return str((parameter.secondary_opts if negative else parameter.opts)[0])


def refuse_unused(context: typer.Context, mode: str, used: Collection[str]) -> None:
    """Refuse every given parameter that the command's current mode does not read.

    Args:
        context: Context of the command.
        mode: Mode of the command, for the message.
        used: Names of the parameters that the mode reads.

    Raises:
        typer.BadParameter: Another parameter was given.
    """
    refuse(context, mode, _names(context) - set(used), used)


def refuse(
    context: typer.Context, mode: str, spare: Collection[str], used: Collection[str] = ()
) -> None:
    """Refuse some parameters if the user gave them.

    Args:
        context: Context of the command.
        mode: Mode of the command, for the message.
        spare: Names of the parameters that the mode does not read.
        used: Names of parameters that it reads; only checked for existence.

    Raises:
        typer.BadParameter: One of these options was given.
    """
    unknown = {*spare, *used} - _names(context)
    # A misspelt name would never match a given parameter.
    assert not unknown, f"not parameters: {sorted(unknown)}"
    ignored = [spelt for name, spelt in given(context).items() if name in spare]
    if ignored:
        verb = "does" if len(ignored) == 1 else "do"
        raise typer.BadParameter(f"{', '.join(ignored)} {verb} not apply to {mode}")


def _names(context: typer.Context) -> set[str]:
    return {str(parameter.name) for parameter in context.command.params}


def program_of(program: Path) -> Path | FunctionCall:
    """Load the function if an argument has the form ``module.py:function``; else return it as is.

    This is left to the command line, not to the program reader, because importing runs code.

    Raises:
        ProgramError: The function cannot be imported, or has no example arguments.
    """
    from ..features.ir.jax_function import is_function_path, load_function

    text = str(program)
    return load_function(text) if is_function_path(text) and not program.exists() else program


def torch_program_of(
    program: Path | FunctionCall, train: str, loss: str
) -> Path | FunctionCall | TorchProgram:
    """Wrap a ``.pt2`` file or a PyTorch module as a PyTorch program; else return it unchanged.

    Args:
        program: The program's file or function.
        train: Optimiser of a full training step; empty for inference.
        loss: Loss function; empty if the module returns its loss.

    Raises:
        ProgramError: The optimiser or the loss is unknown, or they are given for a program that
            is not from PyTorch.
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
            "--train and --loss apply only to PyTorch (.pt2, or a module in a Python file)",
            where=program.origin if isinstance(program, FunctionCall) else str(program),
            hint="leave them out: write a JAX function as a whole training step",
        )
    return found or program


def workload_of(workload: str, hf: Path | None, served: bool = False) -> str:
    """The workload's name or file from two options; prints what it leaves out of the model.

    Args:
        workload: Name or file.
        hf: File of Hugging Face.
        served: Whether the model is served; otherwise a step of it is trained.

    Raises:
        typer.BadParameter: None or both were given, or ``--hf`` is not a ``.json`` file.
    """
    from ..simulate.step.named_workloads import workload_notes

    if bool(workload) == (hf is not None):
        raise typer.BadParameter("give either --workload NAME or --hf config.json")
    if hf is not None and hf.suffix.lower() != ".json":
        raise typer.BadParameter(f"--hf takes a model's config.json, not {hf.name}")
    chosen = workload or str(hf)
    for note in workload_notes(chosen, served):
        typer.echo(f"note: {note}", err=True)
    return chosen


def measured_device(device: str, known: Mapping[str, DeviceSpec]) -> str | DeviceSpec:
    """Name of the device to predict for; ``local`` becomes this machine at its present speed."""
    if device != "local":
        return device
    from ..workflows.profile import local_now

    return local_now(known, lambda what: typer.echo(what, err=True))


def require_plots() -> None:
    """Fail early if plots cannot be drawn.

    Raises:
        ModelError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    from ..common.errors import ModelError

    # find_spec, because importing is slow.
    if find_spec("matplotlib") is None:
        raise ModelError("matplotlib is not installed", hint="pip install 'matplotlib>=3.8,<4'")


@dataclass(frozen=True)
class Kind:
    """How a command processes one kind of table, such as that of ``train --steps``.

    Attributes:
        subject: Description of the action, for messages.
        run: Function in ``workflows`` that performs it, as ``module:function``.
        reads: Parameters of the command that it reads, which are fields of the settings.
        out: Default output file; empty for folders.
        settings: Class in ``workflows/settings.py``, whose field ``tables`` holds the tables.
        rest: Further settings.
    """

    subject: str
    run: str
    reads: Sequence[str]
    out: str = ""
    settings: str = "TableSettings"
    rest: Mapping[str, object] = field(default_factory=dict)


def kinds_of(command: str) -> dict[str, Kind]:
    """Kinds of tables that a command accepts, by option name."""
    return {name: Kind(**own) for name, own in LISTED["tables"][command].items()}


def run_kind(context: typer.Context, kinds: Mapping[str, Kind], *others: str) -> bool:
    """Process the table that was given with one of several options.

    Args:
        context: Context of the command.
        kinds: Kinds of tables by parameter.
        others: Parameters that may be given instead.

    Returns:
        Whether one of ``kinds`` was given rather than one of ``others``.

    Raises:
        typer.BadParameter: None or several were given, or an option that this kind does not read.
    """
    params = context.params
    chosen = [name for name in (*others, *kinds) if params[name]]
    if len(chosen) != 1:
        *most, last = (f"--{name}" for name in (*others, *kinds))
        raise typer.BadParameter(f"give one of {', '.join(most)} and {last}")
    kind = kinds.get(chosen[0])
    if kind is None:
        return False
    made = getattr(import_module("..workflows.settings", __package__), kind.settings)
    refuse_unused(context, kind.subject, {*chosen, *kind.reads})
    own = {name: params[name] for name in kind.reads if params[name] is not None}
    if kind.out:
        own["out"] = own.get("out", Path(kind.out))
    module, _, function = kind.run.partition(":")
    run = getattr(import_module(f"..workflows.{module}", __package__), function)
    given = params[chosen[0]]
    tables = tuple(given) if isinstance(given, list) else (given,)
    run(make_console(), made(tables=tables, **own, **kind.rest))
    return True
