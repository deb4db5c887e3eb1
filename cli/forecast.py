"""Forecasts: predictions that are dated before anybody has measured, and scored when somebody has.

A file of questions is YAML: ``questions`` maps a name to the command that answers it, as it is
typed after ``opcast``, and where the answer is not ``latency_us`` of its JSON to that figure::

    questions:
      gemm-fp8-8192/rubin: predict --op 'linear m=8192 n=8192 k=8192 dtype=fp8' --device rubin.yaml
      decode-70b/rubin: {run: simulate-serving …, figure: median_tpot_ms}

Files that commands name lie beside the file of questions.
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

#: The figure of a question that names none.
_FIGURE = "latency_us"


def forecast(
    questions: Annotated[
        Path, Option("Questions, .yaml; with --measured a forecast, .json.", argument=True)
    ],
    out: Annotated[Path | None, Option("Write the forecast.", check=json_file)] = None,
    measured: Annotated[
        Path | None,
        Option("Score the forecast by a table with the columns question and measured, .csv."),
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
    """What is asked.

    Attributes:
        words: The command line after ``opcast``.
        figure: Of its JSON; ``<figure>_lo`` and ``<figure>_hi`` are its interval, of a latency
            ``lo_us`` and ``hi_us``.
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
        """Ask it: ``command``, ``figure``, and the figure's ``predicted``, ``lo`` and ``hi``.

        Args:
            name: Of the question, for messages.

        Raises:
            DatasetError: The command fails, or its answer has no such figure with an interval.
        """
        from ..common.errors import DatasetError, OpcastError
        from .main import app

        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                app([*self.words, "--json"], standalone_mode=False)
        except (OpcastError, typer.BadParameter) as error:
            raise DatasetError(f"question {name}: {one_line(error)}") from None
        found = json.loads(said.getvalue())
        ends = ("lo_us", "hi_us") if self.figure == _FIGURE else _ends(self.figure)
        figures = [found.get(key) for key in (self.figure, *ends)]
        if None in figures:
            raise DatasetError(f"question {name}: the answer has no {self.figure} with an interval")
        return {
            "command": shlex.join(("opcast", *self.words)),
            "figure": self.figure,
            **dict(zip(("predicted", "lo", "hi"), figures, strict=True)),
        }


def _ends(figure: str) -> tuple[str, str]:
    return f"{figure}_lo", f"{figure}_hi"


def _issue(path: Path, out: Path) -> None:
    """Answer every question; a file that is there is dated, and stays as it is."""
    from .. import __version__
    from ..common.errors import DatasetError, FileError
    from ..common.files import write_text
    from ..models.core.registry import PRETRAINED
    from ..workflows.training import digests

    if out.exists():
        raise FileError(
            "is there already, and a forecast is not rewritten",
            where=str(out),
            hint="give another name, such as that of the month",
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
    """Questions of a file by name.

    Raises:
        DatasetError: The file cannot be read, or holds no questions.
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
    """Print what was forecast beside what was measured."""
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
    """The questions of a forecast, with what was measured where it was.

    Raises:
        DatasetError: A file cannot be read, or the table measures what was not forecast, or states
            what is no positive number.
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
            f"no forecast, or no table of it: {error}",
            where=f"{path}, {measured}",
            hint="a forecast of --out, and a table with the columns question and measured, numbers "
            "in the unit of the figure (latency_us: microseconds)",
        ) from None
    unknown = sorted({*table["question"].astype(str)} - {*answers})
    if unknown or table.empty:
        raise DatasetError(
            f"measures {', '.join(unknown) or 'nothing'}, which was not forecast",
            where=str(measured),
        )
    check_measured(table, ["measured"], str(measured), row="question")
    table = table.astype({"measured": float})
    frame = pd.DataFrame([{"question": name, **answer} for name, answer in answers.items()])
    return frame.merge(table, on="question", how="left")
