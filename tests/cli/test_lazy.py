"""Commands are imported when they run, and listed without being imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main
from typer.testing import CliRunner

from opcast.cli import app
from opcast.cli.lazy import Command, Group
from opcast.cli.main import COMMANDS, PANELS

#: Prints the modules of opcast and pandas that a command line imports.
IMPORTED = """
import sys
from opcast.cli import app
try:
    app(sys.argv[1:], prog_name="opcast")
except SystemExit:
    pass
print("MODULES", *(name for name in sys.modules if name.startswith(("opcast.", "pandas"))))
"""
ALWAYS = {"opcast.cli.main", "opcast.cli.lazy", "opcast.cli.options"}


def entries(
    table: dict[str, Command | Group], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Command | Group]]:
    for name, entry in table.items():
        yield (*above, name), entry
        if isinstance(entry, Group):
            yield from entries(dict(entry.commands), (*above, name))


def imported(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("MODULES")[1].split())


def imported_of_cli(*arguments: str) -> set[str]:
    return {name for name in imported(*arguments) if name.startswith("opcast.cli.")}


@pytest.mark.parametrize("arguments", [("--help",), ("report", "--help"), ("no-such-command",)])
def test_listing_commands_imports_none(arguments: tuple[str, ...]) -> None:
    assert imported_of_cli(*arguments) == ALWAYS


def test_a_command_imports_its_own_module_only() -> None:
    assert imported_of_cli("serve", "--help") == ALWAYS | {
        "opcast.cli.from_dataclass",
        "opcast.cli.serving",
    }


def test_what_takes_long_to_import_is_left_to_who_needs_it() -> None:
    op = "linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"
    assert "pandas" not in imported("predict", "--op", op, "--device", "h100-sxm")
    step = imported("simulate", "--workload", "llama", "--cluster", "h100-sxm-x4")
    assert not any(
        name.startswith(("opcast.predict.plan", "opcast.features.ir.mlir")) for name in step
    )


def test_the_help_of_each_command_is_the_first_line_of_its_own() -> None:
    group = typer.main.get_command(app)
    for words, entry in entries(COMMANDS):
        command = group
        for word in words:
            command = command.commands[word]  # type: ignore[attr-defined]
        assert command.name == words[-1]
        assert (command.help or "").splitlines()[0] == entry.help, words
        assert len(" ".join(words)) + len(entry.help) <= 96, words


def test_help_lists_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    text = " ".join(text.split()).replace("- ", "-")
    for name, entry in COMMANDS.items():
        assert f"{name} {entry.help}" in text


def test_help_lists_each_command_in_one_panel() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    titles = [line[:-1] for line in text.splitlines() if line[:1].strip() and line[-1] == ":"]
    assert titles == ["Options", *PANELS]
    for title, panel in PANELS.items():
        section = text.split(f"\n{title}:\n")[1].split("\n\n")[0]
        names = [line.split()[0] for line in section.splitlines() if line[2].strip()]
        assert names == list(panel), title
    assert len(COMMANDS) == sum(map(len, PANELS.values()))


def test_a_misspelt_command_is_told_the_closest() -> None:
    done = CliRunner().invoke(app, ["predct"])
    assert done.exit_code == 2 and "predict" in done.output
