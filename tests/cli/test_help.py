"""Helps: options are described and in sections, and what a help shows as examples runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from opcast.cli import app
from opcast.cli.lazy import SECTION_OF, Command, spelt
from opcast.cli.main import COMMANDS
from opcast.features.dataset import Dataset
from opcast.workflows.reports.accuracy import COMMITTED

from .test_lazy import entries

#: Commands with examples; those that make files for the others come first.
FIRST = ("zoo export",)


def with_examples() -> Iterator[tuple[str, Command]]:
    found = [
        (" ".join(words), entry)
        for words, entry in entries(COMMANDS)
        if isinstance(entry, Command) and entry.examples
    ]
    yield from sorted(found, key=lambda own: own[0] not in FIRST)


def test_every_option_is_described_and_long_helps_have_sections() -> None:
    names = set()
    for words, _ in entries(COMMANDS):
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]  # type: ignore[attr-defined]
        names.update(map(spelt, command.params))
        bare = [p.name for p in command.params if not getattr(p, "help", None)]
        assert bare in ([], ["help"]), words
    # A misspelt name would leave its option among the rest.
    assert set(SECTION_OF) <= names, set(SECTION_OF) - names
    text = CliRunner().invoke(app, ["simulate-serving", "--help"], env={"COLUMNS": "80"}).output
    titles = [
        line[:-1] for line in text.splitlines() if line and line[0] != " " and line[-1] == ":"
    ]
    assert titles == [
        "Model and data", "Device and plan", "Load", "Framework", "Estimates", "Run", "Output",
        "Options",
    ]  # fmt: skip
    load = text.split("\nLoad:\n")[1].split("\nFramework:\n")[0]
    assert "--rate" in load and "--watermark" not in load
    assert "[default: 1024]" in " ".join(load.split())


def test_examples_are_lines_of_eighty_columns_to_copy() -> None:
    for name, entry in with_examples():
        text = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
        for example in entry.examples:
            assert example.startswith(f"opcast {name} ") or example == f"opcast {name}"
            for line in example.splitlines():
                assert cell_len(line) <= 76 and line.strip() in text, line


@pytest.mark.slow
def test_examples_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a dataset ``data``, as ``opcast profile --out data`` makes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPCAST_MLRUNS", str(tmp_path / "mlruns"))
    whole = Dataset.load(COMMITTED)
    few = whole.frame[whole.frame["level"] != "program"].sample(500, random_state=0)
    Dataset(few.reset_index(drop=True), whole.runs).save(tmp_path / "data")
    for _, entry in with_examples():
        for example in entry.examples:
            words = shlex.split(example.replace("\\\n", " "))
            done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
            assert done.exit_code == 0, f"{example}: {done.output}"


def test_every_number_has_a_least() -> None:
    """Zero plans, minus one row and ``nan`` are refused where they are read, by their option."""
    loose = []
    for words, _ in entries(COMMANDS):
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]  # type: ignore[attr-defined]
        for param in command.params:
            kind = param.bare_type() if hasattr(param, "bare_type") else None
            if kind in (int, float) and not param.is_flag and param.min is None:
                loose.append((words, param.name))
            if kind is float:
                with pytest.raises(typer.BadParameter):
                    param.callback(math.nan)
    assert not loose
