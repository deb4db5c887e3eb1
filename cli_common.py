"""What commands share: the console, JSON on standard output, options as values."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .predict.predictor import Predictor

#: Characters of an error.
LONGEST = 2000
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def make_console(width: int = 120) -> Console:
    """A console as wide as the terminal or ``COLUMNS`` says, else ``width`` columns.

    It prints text as it is: no markup, no control sequences (:class:`.PlainConsole`).
    """
    from .predict.terminal import PlainConsole

    own = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PlainConsole(width=None if own else width)


def one_line(error: Exception) -> str:
    """What an error says, in one line of at most :data:`LONGEST` characters to print."""
    from .features.files import printable

    line = printable(" ".join(str(error).split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} […] {line[-LONGEST // 2 :]}"


def print_json(data: Any) -> None:
    """Print plain data as one line of JSON."""
    sys.stdout.write(json.dumps(data) + "\n")


def seconds_of(text: str) -> float:
    """Seconds of a time such as ``90s``, ``10m`` or ``2h``.

    Raises:
        typer.BadParameter: It is no time, or none at all.
    """
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in scale else (text, "s")
    try:
        seconds = float(number) * scale[unit]
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise typer.BadParameter(f"{text!r} is not a time: write 90s, 10m or 2h")
    return seconds


def measure_once(device: str, predictor: Predictor) -> None:
    """Measure the local machine if neither the model nor the user's folder describes it."""
    from .predict.devices import is_known

    if device == "local" and not is_known(device, predictor.model.devices):
        from .workflows import measure_device

        typer.echo("measuring this machine's ceilings, once", err=True)
        measure_device(save=True)


def trips_of(values: list[str] | None) -> dict[str, int] | int | None:
    """Trip counts of loops given as ``LOOP=N``, or one ``N`` for all.

    Raises:
        typer.BadParameter: They are none.
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
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def require_plots() -> None:
    """Refuse before the work where plots cannot be drawn.

    Raises:
        ModelError: matplotlib is missing.
    """
    from importlib.util import find_spec

    from .features.errors import ModelError

    if find_spec("matplotlib") is None:
        raise ModelError("matplotlib is missing", hint="pip install 'opcast[track]'")
