"""Answers of compilers are kept for equal jobs, and for nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from . import kept_compiles

#: A compile process that refuses one program, and says each time that it was started.
WORKER = """
import json, pathlib, sys
calls, folder = map(pathlib.Path, sys.argv[1:])
calls.write_text(calls.read_text() + "x")
for path in sorted(folder.glob("program*")):
    number, text = path.name[7:], path.read_text()
    done = {"error": "no"} if text == "bad" else {"seconds": 1.5}
    (folder / f"hlo{number}.txt").write_text(text.upper())
    (folder / f"result{number}.json").write_text(json.dumps(done))
"""


@pytest.fixture
def compile_job(tmp_path):
    """Compiles programs in a folder of their own; gives the text, the seconds and the starts."""
    calls = tmp_path / "calls"
    calls.write_text("")

    def run(*programs: str, token: str = "t", **changes: object) -> tuple[list[str], int]:
        folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        job = {"folder": str(tmp_path / "packages"), "flags": {}} | changes
        job["shapes"] = [(1, 1)] * len(programs)
        (folder / "job.json").write_text(json.dumps(job))
        for number, text in enumerate(programs):
            (folder / f"program{number}").write_text(text)
        command = [sys.executable, "-c", WORKER, str(calls), str(folder)]
        assert kept_compiles.main(tmp_path / "store", token, command) == 0
        results = sorted(folder.glob("result*.json"))
        assert len(results) == len(programs)
        return [p.read_text() for p in sorted(folder.glob("hlo*"))], len(calls.read_text())

    return run


def test_equal_jobs_are_compiled_once(compile_job) -> None:
    assert compile_job("a", "b") == (["A", "B"], 1)
    assert compile_job("a", "b") == (["A", "B"], 1)


def test_anything_else_is_compiled(compile_job, tmp_path: Path) -> None:
    compile_job("a")
    assert compile_job("b")[1] == 2
    assert compile_job("a", flags={"x": 1})[1] == 3
    assert compile_job("a", token="other")[1] == 4
    (tmp_path / "packages" / "libtpu-2.0.dist-info").mkdir(parents=True)
    assert compile_job("a")[1] == 5


def test_refusals_are_not_kept(compile_job) -> None:
    compile_job("a", "bad")
    assert compile_job("a", "bad")[1] == 2


def test_what_nothing_asks_for_goes(compile_job, tmp_path: Path) -> None:
    compile_job("a")
    (kept,) = (tmp_path / "store").iterdir()
    os.utime(kept, (0, 0))
    compile_job("b")
    assert kept not in (tmp_path / "store").iterdir()
    compile_job("a")
    assert kept in (tmp_path / "store").iterdir()
