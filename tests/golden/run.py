"""Predictions as users ask for them, compared with the committed answers.

``cases.yaml`` holds the commands, ``answers.jsonl`` what each printed when it was last written::

    make golden-diff                                        # all cases: a table of what moved
    make golden                                             # the same, and writes the new answers
    python -m opcast.tests.golden.run --only 'serving/*'    # by name, or by a part of the command
    python -m opcast.tests.golden.run --only step --write   # writes the answers of these alone

The status is 1 where a prediction moved and was not written. Whoever moves one writes the answers
in the same commit, and says why in its body.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import math
import runpy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
import yaml

from ..conftest import kept_compilers
from ..support.commands import opcast

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.jsonl"
#: What an answer consists of: figures and short texts by their path in the output.
Leaf = float | int | str | bool | None
Answer = dict[str, Leaf]

#: Significant digits of the figures that are kept.
_DIGITS = 7
#: Figures smaller than this are residues of differences, and equal.
_NOTHING = 1e-10
#: Entries of a list that are kept one by one, where a case does not say otherwise.
_FIRST = 2
#: Longer texts are sentences for people, which may be reworded.
_LONGEST_TEXT = 48


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        words: The command line, without ``opcast``.
        tolerance: Relative difference up to which a figure has not moved.
        read: Files that the command writes and whose contents belong to the answer.
        status: Exit status that it ends with.
        first: Entries of a list that are kept one by one; the others count in sums alone.
    """

    words: tuple[str, ...]
    tolerance: float
    read: tuple[str, ...] = ()
    status: int = 0
    first: int = _FIRST


@dataclass(frozen=True)
class Move:
    """One leaf that differs; None for one that is absent on that side."""

    leaf: str
    old: Leaf
    new: Leaf

    @property
    def share(self) -> float:
        """Change relative to the old figure; infinite where there is none."""
        old, new = _number(self.old), _number(self.new)
        return new / old - 1 if old and new is not None else math.inf


@dataclass
class Cases:
    """The content of ``cases.yaml``.

    Attributes:
        cases: By name, sorted.
        made: Commands that write the files which cases read, by file name.
        left_out: Keys of outputs that are no predictions.
    """

    cases: dict[str, Case] = field(default_factory=dict)
    made: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path = HERE / "cases.yaml") -> Cases:
        """Read the file; a case is its command, or a mapping with ``run`` and what it needs."""
        data = yaml.safe_load(path.read_text())
        cases = {}
        for name, given in sorted(data["cases"].items()):
            entry = {"run": given} if isinstance(given, str) else given
            cases[name] = Case(
                tuple(shlex.split(entry["run"])),
                float(entry.get("tolerance", data["tolerance"])),
                tuple(entry.get("read", ())),
                entry.get("status", 0),
                entry.get("first", _FIRST),
            )
        made = {file: tuple(shlex.split(words)) for file, words in data["files"].items()}
        return cls(cases, made, frozenset(data["left_out"]))

    def only(self, pattern: str) -> dict[str, Case]:
        """Cases of which the name matches, or the command has the pattern in it."""
        return {
            name: case
            for name, case in self.cases.items()
            if fnmatch.fnmatch(name, pattern) or pattern in f"{name} {shlex.join(case.words)}"
        }


# --- answers ------------------------------------------------------------------------------------


def answers(cases: Cases, chosen: Iterable[str], *, told: bool = False) -> dict[str, Answer]:
    """Run cases in this process, each in an empty folder with the inputs.

    Args:
        cases: All of them.
        chosen: Names of those to run.
        told: Print the name and the seconds of each to stderr.

    Returns:
        By case what it answered; where it failed, the message as ``error``.
    """
    found: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory(prefix="opcast-golden-") as made:
        shutil.copytree(HERE / "inputs", made, dirs_exist_ok=True)
        for name in chosen:
            start = time.perf_counter()
            try:
                found[name] = _answer(cases, cases.cases[name], Path(made))
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            if told:
                print(f"{time.perf_counter() - start:7.2f} s  {name}", file=sys.stderr)
    return found


def _answer(cases: Cases, case: Case, made: Path) -> Answer:
    _make(cases, case.words, made)
    with tempfile.TemporaryDirectory(prefix="opcast-golden-") as name:
        folder = Path(name)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        said = _run(case.words, folder, case.status).replace(f"{folder}/", "")
        read = _written(case, folder)
    try:
        read[""] = json.loads(said)
    except ValueError:
        # Text for people, where nothing else is read.
        read = read or {"": _numbers(said)}
    answer: Answer = {}
    for path, value in read.items():
        _collect(value, path, case.first, cases.left_out, answer)
    return {path: _rounded(leaf) for path, leaf in answer.items()}


def _make(cases: Cases, words: tuple[str, ...], made: Path) -> None:
    """Write the files that a command names, and those that they are made of."""
    for file in words:
        if file in cases.made and not (made / file).exists():
            _make(cases, cases.made[file], made)
            _run((*cases.made[file], "--out", file), made, 0)


def _run(words: tuple[str, ...], folder: Path, status: int) -> str:
    """What a command or a script prints, in a wide terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        if words[0] == "python":
            patch.chdir(folder)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                runpy.run_path(words[1], run_name="__main__")
            return out.getvalue()
        done = opcast(*words, cwd=folder)
    if done.returncode != status:
        said = done.stderr.strip()[-500:]
        raise RuntimeError(f"opcast {shlex.join(words)} ended with {done.returncode}: {said}")
    return done.stdout


def _written(case: Case, folder: Path) -> dict[str, object]:
    """Contents of the files that a case reads, by their path; tables by column."""
    found: dict[str, object] = {}
    for pattern in case.read:
        paths = sorted(folder.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"{shlex.join(case.words)} wrote no {pattern}")
        for path in paths:
            found[str(path.relative_to(folder))] = _content(path)
    return found


def _content(path: Path) -> object:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix in (".csv", ".parquet"):
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        return json.loads(frame.to_json(orient="records", double_precision=15))
    if path.suffix in (".yaml", ".yml"):
        return yaml.safe_load(path.read_text())
    data = path.read_bytes()
    try:
        return _numbers(data.decode())
    except UnicodeDecodeError:
        return {"bytes": len(data)}


def _numbers(text: str) -> list[float]:
    """The numbers of a text in the order in which they stand; its words may change."""
    return [number for number in map(_as_number, text.split()) if number is not None]


def _as_number(word: str) -> float | None:
    try:
        number = float(word.strip("(),;%"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _collect(value: object, path: str, first: int, left_out: frozenset[str], found: Answer) -> None:
    """Add figures and short texts by path; of long lists the first entries, the count, and sums."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in left_out:
                _collect(inner, f"{path}.{key}".strip("."), first, left_out, found)
    elif isinstance(value, list):
        found[f"{path}.#".strip(".")] = len(value)
        for number, inner in enumerate(value[:first]):
            if not isinstance(inner, str):
                _collect(inner, f"{path}.{number}".strip("."), first, left_out, found)
        if len(value) > first:
            _collect_sums(value, path, first, left_out, found)
    elif isinstance(value, str):
        if len(value) <= _LONGEST_TEXT:
            found[path] = value
    elif value is None or isinstance(value, bool | int | float):
        found[path] = value


def _collect_sums(
    entries: list[object], path: str, first: int, left_out: frozenset[str], found: Answer
) -> None:
    """Add the sum of each figure over a list, and the root of its squares, which moves of two signs
    change, too."""
    sums: dict[str, list[float]] = {}
    for entry in entries:
        own: Answer = {}
        _collect(entry, "", first, left_out, own)
        for name, leaf in own.items():
            number = _number(leaf)
            if number is not None and math.isfinite(number):
                sums.setdefault(name, []).append(number)
    for name, numbers in sums.items():
        where = f"{path}.*.{name}".strip(".")
        found[f"{where} sum"] = math.fsum(numbers)
        found[f"{where} norm"] = math.sqrt(math.fsum(n * n for n in numbers))


def _rounded(leaf: Leaf) -> Leaf:
    if isinstance(leaf, float):
        if not math.isfinite(leaf):
            return str(leaf)
        leaf = float(f"{leaf:.{_DIGITS}g}")
        return int(leaf) if leaf.is_integer() and abs(leaf) < 1e15 else leaf
    return leaf


def _number(leaf: Leaf) -> float | None:
    return None if leaf is None or isinstance(leaf, bool | str) else float(leaf)


# --- comparison ---------------------------------------------------------------------------------


def read_answers(path: Path = ANSWERS) -> dict[str, Answer]:
    """Read the committed answers by case."""
    if not path.is_file():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["case"]: line["answer"] for line in lines}


def write_answers(found: Mapping[str, Answer], path: Path = ANSWERS) -> None:
    """Write answers, one line a case, sorted, so that a diff shows what moved."""
    lines = (
        json.dumps({"case": name, "answer": found[name]}, ensure_ascii=False, sort_keys=True)
        for name in sorted(found)
    )
    path.write_text("".join(f"{line}\n" for line in lines))


def moves(old: Answer, new: Answer, tolerance: float) -> list[Move]:
    """Leaves of a case that differ by more than its tolerance, or stand on one side alone."""
    found = []
    for leaf in sorted(old.keys() | new.keys()):
        before, after = old.get(leaf), new.get(leaf)
        if leaf in old and leaf in new and _equal(before, after, tolerance):
            continue
        found.append(Move(leaf, before, after))
    return found


def _equal(old: Leaf, new: Leaf, tolerance: float) -> bool:
    before, after = _number(old), _number(new)
    if before is None or after is None:
        return old == new and type(old) is type(new)
    return math.isclose(before, after, rel_tol=tolerance, abs_tol=_NOTHING)


def table(moved: Mapping[str, list[Move]], compared: Iterable[str], rows: int = 12) -> str:
    """Say what moved: for each case its leaves, then by group of cases, then the largest.

    Args:
        moved: By case; those without moves may be absent.
        compared: Names of all cases that were compared.
        rows: Leaves of a case that are listed, the largest changes first.
    """
    lines = []
    for name, found in moved.items():
        lines.append(f"{name}: {len(found)} moved")
        for move in sorted(found, key=_by_size)[:rows]:
            lines.append("    " + _row(move))
        if len(found) > rows:
            lines.append(f"    and {len(found) - rows} more")
    heading = f"{'group':24} {'cases':>6} {'moved':>6} {'median':>9} {'lowest':>9} {'highest':>9}"
    lines += ["", heading]
    groups: dict[str, list[str]] = {}
    for name in compared:
        groups.setdefault(name.split("/")[0], []).append(name)
    for group, names in groups.items():
        # One figure a case, its first by size, so that long answers do not count more.
        heads = [_head(moved[n]) for n in names if moved.get(n)]
        shares = sorted(s for s in heads if math.isfinite(s))
        spread = (
            f"{shares[len(shares) // 2]:+9.2%} {shares[0]:+9.2%} {shares[-1]:+9.2%}"
            if shares
            else ""
        )
        lines.append(f"{group:24} {len(names):6} {len(heads):6} {spread}".rstrip())
    tops = (
        (name, max(finite, key=lambda move: abs(move.share)))
        for name, found in moved.items()
        if (finite := [move for move in found if math.isfinite(move.share)])
    )
    largest = sorted(tops, key=lambda top: -abs(top[1].share))[:10]
    if largest:
        lines += ["", "largest move of a case"]
        lines += [f"    {m.share:+9.2%}  {name}  {m.leaf}" for name, m in largest]
    return "\n".join(lines)


#: Figures that stand for a case, in the order of preference.
_HEADS = ("latency_us", "step_us", "output_throughput")


def _head(found: list[Move]) -> float:
    """Change of a case's main figure if that moved, else of what moved most."""
    by_leaf = {move.leaf: move.share for move in found}
    named = [by_leaf[h] for h in _HEADS if h in by_leaf]
    sized = sorted((m.share for m in found if math.isfinite(m.share)), key=abs)
    return named[0] if named else sized[-1] if sized else math.inf


def _by_size(move: Move) -> tuple[bool, float]:
    return (move.leaf not in _HEADS, -abs(move.share))


def _row(move: Move) -> str:
    share = f"{move.share:+9.3%}" if math.isfinite(move.share) else ""
    return f"{move.leaf:48} {move.old!s:>16} -> {move.new!s:>16}  {share}".rstrip()


def compare(found: Mapping[str, Answer], cases: Cases) -> dict[str, list[Move]]:
    """Moves of the cases that moved, from the committed answers to these."""
    old = read_answers()
    moved = {
        name: moves(old.get(name, {}), answer, cases.cases[name].tolerance)
        for name, answer in found.items()
    }
    return {name: found for name, found in moved.items() if found}


def main(words: list[str] | None = None) -> int:
    """Run the command; returns 1 if a prediction moved and the answers were not written."""
    parser = argparse.ArgumentParser(description="Compare predictions with the committed answers.")
    parser.add_argument("--only", default="*", help="pattern of names, or a part of the command")
    parser.add_argument("--write", action="store_true", help="write the new answers")
    parser.add_argument("--rows", type=int, default=12, help="leaves of a case to list")
    parser.add_argument("--times", action="store_true", help="print each case's seconds")
    given = parser.parse_args(words)
    cases = Cases.read()
    chosen = cases.only(given.only)
    with kept_compilers():
        found = answers(cases, chosen, told=given.times)
    moved = compare(found, cases)
    print(table(moved, chosen, given.rows))
    gone = [] if given.only != "*" else sorted(read_answers().keys() - cases.cases.keys())
    if gone:
        print(f"answers without a case: {', '.join(gone)}")
    failed = sorted(name for name, answer in found.items() if "error" in answer)
    if failed:
        print(f"failed, and not written: {', '.join(failed)}")
    if given.write:
        kept = {n: a for n, a in read_answers().items() if n in cases.cases}
        write_answers(kept | {n: a for n, a in found.items() if n not in failed})
    return int(bool(failed) or (bool(moved or gone) and not given.write))


if __name__ == "__main__":
    sys.exit(main())
