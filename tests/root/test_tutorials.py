"""Every command of the tutorials is run, in order; what it prints is what the page says.

Fenced blocks with a ``title`` are files that the reader writes; ``console`` blocks are commands and
their output. Figures and units may differ from the page, words may not; ``[…]`` is anything.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import opcast as package

from .test_readme import FASTER, run

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that measure print other lines each time: they only have to work.
MEASURED = ("profile", "train", "check", "compare", "data show", "device --save")
FASTER |= {"15m": "60s"}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Kind, title and content of the blocks that are to be run or written."""
    found = BLOCK.findall(page.read_text())
    return [block for block in found if block[0] == "console" or block[1]]


def commands(content: str) -> list[tuple[str, list[str]]]:
    """Commands of a console block with the lines that they print."""
    found: list[tuple[str, list[str]]] = []
    for line in content.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].split("  #")[0].strip(), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def words(line: str) -> str:
    """A line without figures, units and spaces, which depend on models and machines."""
    plain = re.sub(r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?", "#", line)
    plain = re.sub(r"# ?(?:ns|µs|ms|s|B|KiB|MiB|GiB|kB|MB|GB|J|kJ|MJ|%)(?!\w)", "#", plain)
    return re.sub(r"[\s#─━┃│]+", "", plain)


def says(printed: str, lines: list[str]) -> str:
    """The first documented line that was not printed, in their order; empty if there is none."""
    have = [words(line) for line in printed.splitlines()]
    at = 0
    for line in lines:
        start, anything, end = map(words, line.partition("[…]"))
        if not start and anything:
            continue
        while at < len(have) and not (
            have[at].startswith(start) and have[at].endswith(end) if anything else have[at] == start
        ):
            at += 1
        if at == len(have):
            return line
        at += 1
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_tutorial_is_short_and_has_commands(page):
    assert 50 <= len(page.read_text().splitlines()) <= 150
    assert sum(len(commands(text)) for kind, _, text in blocks(page) if kind == "console") >= 3


def test_figures_may_differ_and_words_may_not():
    assert says("a 12 µs b\nc\nd 1.5 GiB x\n", ["a 3.4 ms b", "d 2 GiB x"]) == ""
    assert says("a 12 µs b\nc\n", ["a 12 µs c"]) == "a 12 µs c"
    assert says("a\nb\n", ["b", "a"]) == "a"
    assert says("first word, rest\n", ["[…]", "first […] rest", "[…]"]) == ""
    assert says("first word, rest\n", ["first […] other"]) == "first […] other"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_of_a_tutorial_work_and_print_what_it_says(page, tmp_path):
    env = environment(tmp_path)
    for kind, title, content in blocks(page):
        if title:
            path = tmp_path / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            continue
        assert kind == "console"
        for command, lines in commands(content):
            printed = execute(shlex.split(command), tmp_path, env)
            if not command.removeprefix("opcast ").startswith(MEASURED):
                assert not (missing := says(printed, lines)), f"{command}: {missing}\n{printed}"


def environment(folder: Path) -> dict[str, str]:
    """Own caches and stores; what is installed on the way; HESPAS's stand-in."""
    paths = [folder / "site", Path(package.__file__).parent.parent]
    paths += [ROOT / "tests/plugins/hespas_stand_in"]
    given = os.environ.get("PYTHONPATH", "")
    return os.environ | {
        "OPCAST_CACHE": str(folder / "cache"),
        "OPCAST_MLRUNS": str(folder / "mlruns"),
        "PYTHONPATH": os.pathsep.join([*map(str, paths), given]),
        "JAX_PLATFORMS": "cpu",
    }


def execute(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """What a command prints."""
    if command[0] == "opcast":
        return run(command, folder, env)
    if command[:2] == ["pip", "install"]:
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command = ["python", *pip, "--no-build-isolation", "--target", "site", *command[2:]]
    assert command[0] in ("python", "ls"), command
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
