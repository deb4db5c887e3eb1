"""Every command of the tutorials is run, in order; what it prints is what the page says.

Fenced blocks with a ``title`` are files that the reader writes; ``console`` blocks are commands and
their output. Words may not differ from the page, figures by a tenth at most, in whatever unit they
are printed; on pages that measure this machine by any amount. ``[…]`` is anything.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import opcast as package
from opcast.common.errors import CompilerError
from opcast.features.lowering.target_compiler.install import find_compiler

from .test_readme import FASTER, environment, run, shown

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that measure print other lines each time: they only have to work.
MEASURED = ("profile", "train", "check", "compare", "data show", "device --save")
FASTER |= {"15m": "15s"}
#: Relative tolerance of figures: a model that is trained anew moves them by less.
TOLERANCE = 0.1
#: Prefixes of units to one of their kind; all other words stand for themselves.
SCALE = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9,
         "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "J": 1.0, "kJ": 1e3,
         "MJ": 1e6}  # fmt: skip
FIGURE = re.compile(r"([-+−]?\d[\d.,]*(?:e[-+]?\d+)?)(?: ?([a-zA-Zµ]+)(?!\w))?")


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


def figures(line: str) -> list[tuple[float, float]]:
    """Figures of a line in seconds, bytes, joules or as they are, each with its last digit's."""
    found = []
    for text, unit in FIGURE.findall(line):
        plain = text.replace("−", "-").replace(",", "").rstrip(".")
        try:
            value, scale = float(plain), SCALE.get(unit, 1.0)
        except ValueError:  # a version, a date
            continue
        decimals = len(plain.partition("e")[0].partition(".")[2])
        found.append((value * scale, 10.0**-decimals * scale))
    return found


def close(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether figures agree within the tolerance, or within two of the last digit printed."""
    return len(one) == len(other) and all(
        abs(a - b) <= max(TOLERANCE * max(abs(a), abs(b)), 2 * max(last_a, last_b))
        for (a, last_a), (b, last_b) in zip(one, other, strict=True)
    )


def agrees(printed: str, line: str, *, measured: bool) -> bool:
    """Whether a printed line is the documented one."""
    have = words(printed)
    start, anything, end = line.partition("[…]")
    if not anything:
        return have == words(line) and (measured or close(figures(printed), figures(line)))
    if not (have.startswith(words(start)) and have.endswith(words(end))):
        return False
    own, first, last = figures(printed), figures(start), figures(end)
    return measured or (
        close(own[: len(first)], first) and close(own[max(len(own) - len(last), 0) :], last)
    )


def says(printed: str, lines: list[str], *, measured: bool = False) -> str:
    """The first documented line that was not printed, in their order; empty if there is none."""
    have = printed.splitlines()
    at = 0
    for line in lines:
        if line.strip().startswith("[…]"):
            continue
        while at < len(have) and not agrees(have[at], line, measured=measured):
            at += 1
        if at == len(have):
            return line
        at += 1
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_tutorial_is_short_and_has_commands(page):
    assert 50 <= len(page.read_text().splitlines()) <= 150
    assert sum(len(commands(text)) for kind, _, text in blocks(page) if kind == "console") >= 3


def test_figures_may_differ_a_little_and_words_may_not():
    assert says("a 980 µs b\nc\nd 1.5 GiB x\n", ["a 1.04 ms b", "d 1.6 GiB x"]) == ""
    assert says("a 980 µs b\n", ["a 1.2 ms b"]) == "a 1.2 ms b"
    assert says("a 980 µs b\n", ["a 1.2 ms b"], measured=True) == ""
    assert says("gemm 3% and 1,000 b\n", ["gemm 5% and 1,050 b"]) == ""  # two of the last digit
    assert says("gemm 3% and 1,000 b\n", ["gemm 9% and 1,000 b"]) != ""
    assert says("step 12 ms 46%\n", ["step 12 ms […] 47%"]) == ""
    assert says("step 12 ms x 46%\n", ["step 12 ms […] 77%"]) != ""
    assert says("a 12 µs b\nc\n", ["a 12 µs c"]) == "a 12 µs c"
    assert says("a\nb\n", ["b", "a"]) == "a"
    assert says("first word, rest\n", ["[…]", "first […] rest", "[…]"]) == ""
    assert says("first word, rest\n", ["first […] other"]) == "first […] other"


#: Pages that measure and train for a minute or more; test_readme.py does the same in less.
LONG = ("compare-models", "own-gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.exhaustive] if p.stem in LONG else []) for p in PAGES],
    ids=lambda p: p.stem,
)
def test_commands_of_a_tutorial_work_and_print_what_it_says(page, tmp_path):
    env = on_a_page(tmp_path)
    measured = False
    for kind, title, content in blocks(page):
        if title:
            path = tmp_path / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            continue
        assert kind == "console"
        for command, lines in commands(content):
            printed = execute(shlex.split(command), tmp_path, env)
            if command.removeprefix("opcast ").startswith(MEASURED):
                measured = True
                continue
            missing = says(printed, lines, measured=measured)
            assert not missing, f"{command}: {missing}\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/predict.md"])
def test_a_page_prints_what_it_says(page, tmp_path):
    """Its examples that measure nothing; with the compilers that it installs, as it says."""
    try:
        find_compiler("gpu")
    except CompilerError as error:
        pytest.skip(f"XLA's compiler for GPUs is not installed: {error}")
    text = (ROOT / page).read_text()
    shown = re.findall(r"^```\n(\$ .*?)^```", text, re.MULTILINE | re.DOTALL)
    examples = [found for found in map(commands, shown) if any(lines for _, lines in found)]
    assert len(examples) == 1 and sum(len(own) for own in examples) == 2
    for command, lines in (pair for found in examples for pair in found):
        printed = execute(shlex.split(command), tmp_path, on_a_page(tmp_path))
        missing = says(printed, lines)
        assert not missing, f"{command}: {missing}\n{printed}"


def on_a_page(folder: Path) -> dict[str, str]:
    """Own caches and stores; what is installed on the way; HESPAS's stand-in."""
    paths = [folder / "site", Path(package.__file__).parent.parent]
    paths += [ROOT / "tests/plugins/hespas_stand_in"]
    given = os.environ.get("PYTHONPATH", "")
    return environment(folder) | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), given]),
        "JAX_PLATFORMS": "cpu",
    }


def execute(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """What a command prints."""
    # What was installed on the way, and the stand-in of HESPAS, are found by a new process only.
    if command[0] == "opcast" and command[1] != "hespas" and not (folder / "site").exists():
        return run(command, folder, env)
    if command[0] == "opcast":
        command = ["python", "-m", "opcast", *command[1:]]
    if command[:2] == ["pip", "install"]:
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command = ["python", *pip, "--no-build-isolation", "--target", "site", *command[2:]]
    assert command[0] in ("python", "ls"), command
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return shown(done.stdout, done.stderr)
