"""Forecasts: predictions that are dated before anyone has measured, and scored afterwards.

A file of questions is YAML. ``questions`` maps each name to the command that answers it, without
``opcast``. The answer is ``latency_us`` of the command's JSON, or the key given as ``figure``::

    questions:
      gemm-fp8-8192/rubin: predict --op 'linear m=8192 n=8192 k=8192 dtype=fp8' --device rubin.yaml
      decode-70b/rubin: {run: simulate-serving …, figure: median_tpot_ms}

Paths in the commands are relative to the file of questions.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import Option, json_file
from ..common.progress import counting, wrote
from .options import make_console, one_line

if TYPE_CHECKING:
    import pandas as pd

#: Default figure of a question.
_FIGURE = "latency_us"


def forecast(
    questions: Annotated[
        Path, Option("Questions, .yaml; with --measured a forecast, .json.", argument=True)
    ],
    out: Annotated[Path | None, Option("Write the forecast.", check=json_file)] = None,
    measured: Annotated[
        Path | None,
        Option("Score the forecast against a .csv table with columns question and measured."),
    ] = None,
) -> None:
    """Answer a file of questions before they are measured, or score the answers afterwards."""
    if (out is None) == (measured is None):
        raise typer.BadParameter("give either --out for a forecast or --measured to score one")
    if out is not None:
        _issue(questions, out)
    elif measured is not None:
        _score(questions, measured)


@dataclass(frozen=True)
class Question:
    """A question of a forecast.

    Attributes:
        words: The command line after ``opcast``.
        figure: Key of its JSON. The interval is ``<figure>_lo`` and ``<figure>_hi``; for
            ``latency_us`` it is ``lo_us`` and ``hi_us``.
    """

    words: tuple[str, ...]
    figure: str = _FIGURE

    @classmethod
    def of(cls, name: str, given: object) -> Question:
        """Read an entry of a file of questions.

        Raises:
            DatasetError: It is neither a command nor a mapping with ``run``.
        """
        from ..common.errors import DatasetError

        entry = {"run": given} if isinstance(given, str) else given
        if (
            not isinstance(entry, Mapping)
            or not isinstance(entry.get("run"), str)
            or {*entry} - {"run", "figure"}
        ):
            what = "a question is a command, or a mapping with run and figure"
            raise DatasetError(what, where=name)
        return cls(tuple(shlex.split(entry["run"])), str(entry.get("figure", _FIGURE)))

    def answer(self, name: str) -> dict[str, object]:
        """Run the command; return ``command``, ``figure``, ``predicted``, ``lo`` and ``hi``.

        Args:
            name: Name of the question, for messages.

        Raises:
            DatasetError: The command fails, or its JSON lacks the figure or its interval.
        """
        from ..common.errors import DatasetError, OpcastError
        from .main import app

        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                app([*self.words, "--json"], standalone_mode=False)
        except (OpcastError, typer.BadParameter) as error:
            raise DatasetError(f"question {name}: {one_line(error)}") from None
        found = json.loads(output.getvalue())
        bounds = (f"{self.figure}_lo", f"{self.figure}_hi")
        if self.figure == _FIGURE:
            bounds = ("lo_us", "hi_us")
        figures = [found.get(key) for key in (self.figure, *bounds)]
        if None in figures:
            raise DatasetError(f"question {name}: the answer has no {self.figure} with an interval")
        return {
            "command": shlex.join(("opcast", *self.words)),
            "figure": self.figure,
            **dict(zip(("predicted", "lo", "hi"), figures, strict=True)),
        }


def _issue(path: Path, out: Path) -> None:
    """Answer every question and write the forecast; an existing forecast is never overwritten."""
    from .. import __version__
    from ..common.errors import DatasetError, FileError
    from ..common.files import write_text
    from ..models.core.registry import PRETRAINED
    from ..workflows.training import digests

    if out.exists():
        raise FileError(
            "already exists, and a forecast is not overwritten",
            where=str(out),
            hint="give another name, such as one with the month",
        )
    questions = _questions(path)
    answers: dict[str, dict[str, object]] = {}
    faults: list[str] = []
    with contextlib.chdir(path.parent), counting("questions") as show:
        for name, question in questions.items():
            try:
                answers[name] = question.answer(name)
            except DatasetError as error:
                faults.append(one_line(error))
            show(len(answers) + len(faults), len(questions))
    if faults:
        raise DatasetError("; ".join(faults), where=str(path), hint="nothing was written")
    models = sorted(file for file in PRETRAINED.iterdir() if file.name != "cards")
    data = {
        "issued": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "models": {Path(file).name: digest for file, digest in digests(*models).items()},
        "answers": answers,
    }
    write_text(out, json.dumps(data, indent=1) + "\n")
    wrote(out, f"forecast of {len(answers)} questions")


def _questions(path: Path) -> dict[str, Question]:
    """Read the questions of a file, by name.

    Raises:
        DatasetError: The file cannot be read or has no questions.
    """
    from ..common.errors import DatasetError
    from ..common.files import parse_yaml

    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"the questions cannot be read: {error}", where=str(path)) from None
    found = data.get("questions") if isinstance(data, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        raise DatasetError("has no mapping 'questions' of names to commands", where=str(path))
    return {str(name): Question.of(str(name), given) for name, given in found.items()}


def _score(path: Path, measured: Path) -> None:
    """Print the forecast beside the measurements."""
    from ..common.tables_text import print_frame
    from ..workflows.judging import measured_rows

    frame = _scored(path, measured)
    rows = measured_rows(frame, "predicted", "measured", ("lo", "hi"))
    shown = rows[["question", "figure", "predicted", "lo", "hi", "measured", "inside"]].copy()
    shown["error %"] = 100 * (rows["predicted"] / rows["measured"] - 1)
    console = make_console()
    print_frame(console, shown, f"forecast of {path.name}")
    console.print(
        f"{len(rows)} of {len(frame)} questions measured: mean error {rows['error'].mean():.1%}, "
        f"median {rows['error'].median():.1%}, "
        f"{rows['inside'].mean():.0%} inside the 90 % interval",
        soft_wrap=True,
        highlight=False,
    )


def _scored(path: Path, measured: Path) -> pd.DataFrame:
    """Join the questions of a forecast with the measurements that exist.

    Raises:
        DatasetError: A file cannot be read, or the table has a question that was not forecast, or
            a measurement that is not a positive number.
    """
    import pandas as pd

    from ..common.errors import DatasetError
    from ..common.files import read_json
    from ..common.parquet import check_measured

    try:
        answers = read_json(path)["answers"]
        table = pd.read_csv(measured)[["question", "measured"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DatasetError(
            f"cannot read the forecast or its measurements: {error}",
            where=f"{path}, {measured}",
            hint="give a forecast written by --out, and a table with the columns question and "
            "measured, in the unit of the figure (latency_us: microseconds)",
        ) from None
    unknown = sorted({*table["question"].astype(str)} - {*answers})
    if unknown or table.empty:
        raise DatasetError(
            f"has measurements of questions that were not forecast: {', '.join(unknown)}"
            if unknown
            else "has no measurements",
            where=str(measured),
        )
    check_measured(table, ["measured"], str(measured), row="question")
    table = table.astype({"measured": float})
    frame = pd.DataFrame([{"question": name, **answer} for name, answer in answers.items()])
    return frame.merge(table, on="question", how="left")
