"""Options of dataclass fields, for command lines, the server and table readers.

A request is a frozen dataclass, whose fields are annotated with an :class:`Option`::

    @dataclass(frozen=True)
    class Load:
        section: ClassVar[str] = "Load"
        rate: Annotated[float, Option("Requests per second.", least=0.0)] = 0.0
        budget_s: Budget = 600.0
        price: Annotated[Mapping[str, float], Option("Price.", collect=prices_of)] = …
        spec: DeviceSpec | None = None  # without an Option: not on the command line

``cli/from_dataclass.py`` makes a command's options from it, and the server its request schemas.
Modules that define requests are imported for ``--help``, so they import little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from .parquet import TABLES

T = TypeVar("T")

#: Units of option values, as factors to the stored unit; the stored unit without one.
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1.0, "GiB": 2.0**30, "MiB": 2.0**20, "GB": 1e9, "MB": 1e6}
_WATTS = {"": 1.0, "W": 1.0, "kW": 1e3}
_PROGRAM = (
    "StableHLO text, bytecode, export, or HLO text; module.py:function; or PyTorch's model.pt2."
)
_ROOFLINE = "Operator model; 'roofline' for the plain roofline."


@dataclass(frozen=True)
class Option:
    """A field that users set.

    Attributes:
        help: Description in one sentence for ``--help`` and the server's document.
        names: Spellings on the command line, such as ``("--prefix-cache/--no-prefix-cache",)``; by
            default ``--`` and the field's name. A flag without an off switch has one name.
        section: Section of a long help; by default the attribute ``section`` of the dataclass.
        parse: Converts text to the field's value, such as :func:`seconds_of`. Raises a
            ``ValueError`` whose message states the valid form.
        shown: With ``parse``: formats the default for ``--help``, such as :func:`duration_text`.
        collect: Like ``parse``, for all texts of a repeatable option.
        check: Takes the value and returns it, or raises a ``ValueError``, such as :func:`folder`.
        least: Smallest number, in the option's unit.
        most: Largest number, also for the server.
        choices: Allowed texts, which the server's schema lists.
        unit: Factor from the number on the command line to the field's, such as ``2.0**30`` for a
            size in GiB; an ``int`` unit takes whole numbers.
        metavar: Placeholder of the value in ``--help``.
        argument: Whether it is positional.
        shows_default: Whether ``--help`` prints the default.
        environment: Environment variable for the value if the command line does not give it.
    """

    help: str
    names: tuple[str, ...] = ()
    section: str = ""
    parse: Callable[[str], object] | None = None
    shown: Callable[[Any], str] | None = None
    collect: Callable[[Sequence[str]], object] | None = None
    check: Callable[[Any], object] | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    unit: float | None = None
    metavar: str | None = None
    argument: bool = False
    shows_default: bool = True
    environment: str | None = None


def described(case: type) -> tuple[tuple[Field[Any], Any, Option | None], ...]:
    """Fields of a dataclass, with their types and options."""
    return _described(case)


@cache
def _described(case: Hashable) -> tuple[tuple[Field[Any], Any, Option | None], ...]:
    assert isinstance(case, type)
    hints = get_type_hints(case, include_extras=True)
    found = []
    for field in fields(case):
        hint, option = hints[field.name], None
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            option = next((mark for mark in marks if isinstance(mark, Option)), None)
        found.append((field, hint, option))
    return tuple(found)


def flat_options(case: type) -> Iterator[tuple[Field[Any], Any, Option]]:
    """Fields with options, including those of nested dataclasses."""
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            yield from flat_options(hint)
        elif option is not None:
            yield field, hint, option


def made(case: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from values by name, as of :func:`flat_options`, in the options' units."""
    values: dict[str, Any] = {}
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            values[field.name] = made(hint, given)
        elif option is not None and field.name in given:
            own = given[field.name]
            values[field.name] = own if option.unit is None else own * option.unit
    return case(**values)


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    number = text.rstrip("".join({*"".join(units), " "}))
    try:
        value = float(number) * units[text[len(number) :].strip()]
    except (ValueError, KeyError):
        value = math.nan
    # Also rejects NaN.
    if not 0.0 < value < math.inf:
        raise ValueError(f"{text!r} is not a {what}: write {example}")
    return value


def seconds_of(text: str) -> float:
    """Parse a duration such as ``90s``, ``10m`` or ``2h`` into seconds.

    Raises:
        ValueError: It is not a positive, finite duration.
    """
    return _quantity(text, _SECONDS, "duration", "90s, 10m or 2h")


def duration_text(seconds: float) -> str:
    """Format a duration as :func:`seconds_of` reads it, in the largest unit that divides it."""
    unit = next(u for u in ("h", "m", "s") if seconds % _SECONDS[u] == 0.0 or u == "s")
    return f"{seconds / _SECONDS[unit]:g}{unit}"


def bytes_of(text: str) -> float:
    """Parse an amount of memory such as ``60GiB`` or ``80GB`` into bytes.

    Raises:
        ValueError: It is not a finite amount of a MiB or more.
    """
    value = _quantity(text, _BYTES, "memory size", "60GiB or 64GB")
    if value < _BYTES["MiB"]:
        raise ValueError(f"{text!r} is less than 1 MiB: write a unit, as in 60GiB")
    return value


def watts_of(text: str) -> float:
    """Parse a power such as ``400``, ``400W`` or ``0.4kW`` into watts.

    Raises:
        ValueError: It is not a positive, finite power.
    """
    return _quantity(text, _WATTS, "power", "400W")


def trips_of(texts: Sequence[str]) -> dict[str, int] | int:
    """Parse trip counts: ``LOOP=N`` for each loop, or a single ``N`` for all.

    Raises:
        ValueError: A trip count is malformed or negative.
    """
    try:
        if len(texts) == 1 and "=" not in texts[0]:
            return _trips(texts[0])
        return {name: _trips(count) for name, count in (v.split("=", 1) for v in texts)}
    except ValueError:
        raise ValueError("write --trip-count N or --trip-count LOOP=N, N ≥ 0") from None


def _trips(text: str) -> int:
    # Zero is allowed: a loop that never runs.
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def called(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Make a check that a file's suffix names a supported format.

    Args:
        suffixes: Suffixes of the supported formats.
    """

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            kinds = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise ValueError(f"{str(path)!r} has to be called {kinds}")
        return path

    return check


def folder(path: Path | None) -> Path | None:
    """Check the name of a folder: reject a file, and a name with a file suffix.

    Raises:
        ValueError: It is a file, or named like one.
    """
    if path is not None and (path.is_file() or path.suffix.lower() in (*TABLES, ".html", ".png")):
        raise ValueError(f"{str(path)!r} is called as a file, but a folder is written")
    return path


json_file, page_file, yaml_file = called(".json"), called(".html", ".htm"), called(".yaml", ".yml")
table_file, plot_file = called(*TABLES), called(".png", ".svg", ".pdf", ".jpg")


# Options of several commands.
Json = Annotated[bool, Option("Print JSON.", ("--json",))]
Out = Annotated[Path, Option("Folder to write.", check=folder)]
Data = Annotated[Sequence[Path], Option("Dataset folder; may be given again.")]
Seed = Annotated[int, Option("Random seed.", least=0)]
Threads = Annotated[int, Option("Threads for training.", least=1)]
Budget = Annotated[
    float,
    Option(
        "Time to spend, such as 90s, 10m or 2h.",
        ("--budget",),
        parse=seconds_of,
        shown=duration_text,
    ),
]
Top = Annotated[int, Option("Number of kernels to print.", least=1)]
Timeline = Annotated[Path | None, Option("Write a Chrome trace, .json.", check=json_file)]
Ray = Annotated[str, Option("Address of a Ray cluster; 'local' starts one.")]
ProgramArg = Annotated[Path, Option(_PROGRAM, argument=True)]
ProgramOrNone = Annotated[Path | None, Option(_PROGRAM, argument=True)]
ProgramsOrNone = Annotated[
    Sequence[Path],
    Option(_PROGRAM, metavar="PROGRAM...", argument=True, shows_default=False),
]
OpOpt = Annotated[
    str,
    Option("Instead of a program, a library operator: 'linear m=1 n=4096 k=4096 dtype=bf16'."),
]
TrainOpt = Annotated[
    str, Option("Full training step of a PyTorch program by adamw, adam, sgd or momentum.")
]
LossOpt = Annotated[
    str, Option("With --train: cross_entropy or sum; else the module returns its loss.")
]
TorchFrameworkOpt = Annotated[
    str, Option("Kernels of a PyTorch program: xla, torch-eager, torch-compiled; or several, a,b.")
]
DeviceOpt = Annotated[str, Option("Name (opcast device --list), device file, or 'local'.")]
DeviceList = Annotated[
    str,
    Option("Name (opcast device --list), device file, or 'local'; several with commas."),
]
AbsentDevice = Annotated[str, Option("Device name or file.")]
Devices = Annotated[
    Sequence[str], Option("Device name or file; may be given again.", ("--device",))
]
OwnDevices = Annotated[
    Sequence[str],
    Option(
        "File of a device in the table, if not in the catalogue; may be given again.",
        ("--device",),
    ),
]
ModelOpt = Annotated[str, Option("Model name or folder (opcast models).")]
OperatorModelOpt = Annotated[str, Option(_ROOFLINE)]
DeviceIndex = Annotated[
    int | None,
    Option(
        "Index of the device in a trace of several; by default all, if they ran the same.", least=0
    ),
]
NextOpt = Annotated[
    int,
    Option("Number of runs to suggest that would narrow the interval most.", ("--next",), least=0),
]
PriceOpt = Annotated[
    float | None,
    Option("Price of a device per hour, in any currency; prints the cost.", least=0.0),
]
PowerCapOpt = Annotated[
    float | None,
    Option(
        "Sustained power of a device, such as 400W.",
        ("--power-cap",),
        parse=watts_of,
        metavar="WATTS",
    ),
]
FrameworkOpt = Annotated[str, Option("Framework, such as nanotron; by default an average.")]
SourceOpt = Annotated[
    str, Option("Owner of the cluster, as in tables of steps, such as one of 'calibrate'.")
]
CompiledOpt = Annotated[
    bool, Option("Steps are compiled, or replayed as CUDA graphs.", ("--compiled",))
]
StepModelOpt = Annotated[
    str, Option("File written by 'opcast calibrate --steps' for your own cluster.")
]
LoweringOpt = Annotated[str, Option("auto, xla, fused or op.")]
Fallback = Annotated[str, Option("Lowering to use if the device's compiler is missing or fails.")]
Trips = Annotated[
    Mapping[str, int] | int | None,
    Option(
        "Trip count of a loop, LOOP=N, or N for all loops of unknown count.",
        ("--trip-count",),
        collect=trips_of,
    ),
]
Workload = Annotated[
    str,
    Option(
        "Model such as llama-3-8b or deepseek-v3 (docs/simulate.md); llama, moe, gpt or bert with "
        "--set; or a YAML file with family and sizes."
    ),
]
HfOpt = Annotated[Path | None, Option("Instead of --workload: a model's config.json.")]
ClusterOpt = Annotated[str, Option("Name such as dgx-h100-x128 or tpu-v5e-x16, or a YAML file.")]
Settings = Annotated[
    Sequence[str],
    Option("Model sizes, such as layers=32,d_model=4096; may be given again.", ("--set",)),
]
