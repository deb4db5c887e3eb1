"""A crash of native code ends every command in a message, but for those that name themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

import pytest
import typer.main

from opcast.cli import app
from opcast.cli.main import UNGUARDED, stopped_text

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's fork")
#: Runs command lines, each in a process whose command ends as native code does that crashes.
CRASHES = """
import json, os, signal, sys
from opcast import cli
from opcast.cli.main import guarded
assert not {"jax", "numpy", "pandas"} & set(sys.modules), "forked after heavy imports"
statuses = []
for line in json.loads(sys.argv[1]):
    try:
        guarded(line, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    except SystemExit as end:
        statuses.append(end.code)
print(json.dumps(statuses))
"""


def commands(group, above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    """Every command of the command line with the words that call it."""
    found = []
    for name, command in group.commands.items():
        words = (*above, name)
        found += commands(command, words) if hasattr(command, "commands") else [(words, command)]
    return found


EVERY = commands(typer.main.get_command(app))


def reads_files(command) -> bool:
    """Whether it takes what others wrote: a path of no result, a device or model file, and such."""
    results = {"out", "html", "timeline", "plot", "scaling", "save", "astra", "study"}
    named = {"workload", "cluster", "model", "models", "device", "devices"}
    kinds = get_type_hints(command.callback, include_extras=False)
    return any(
        name in named or ("Path" in str(kind) and name not in results)
        for name, kind in kinds.items()
    )


def test_commands_that_need_no_guard_exist_and_read_no_program() -> None:
    known = {words[0]: command for words, command in EVERY}
    assert set(UNGUARDED) <= set(known)
    for name in UNGUARDED:
        taken = {parameter.name for parameter in known[name].params}
        assert not taken & {"program", "programs", "data", "folder", "published", "config"}


@linux
def test_a_crash_in_any_command_that_reads_files_ends_in_a_message(tmp_path: Path) -> None:
    file = tmp_path / "given.bin"
    file.write_bytes(b"?")
    lines = [[*words, str(file)] for words, command in EVERY
             if reads_files(command) and words[0] not in UNGUARDED]  # fmt: skip
    called = {" ".join(line[:-1]) for line in lines}
    assert {"predict", "partition", "data agree", "data simulate", "data show", "fidelities",
            "export table", "import chakra", "train", "calibrate", "evaluate", "sweep",
            "calibrate-collectives", "hespas"} <= called  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, json.dumps(lines)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1] * len(lines)
    said = done.stderr.splitlines()
    start = f"opcast: error: {file}: native code crashed (SIGSEGV)"
    assert len(said) == len(lines) and all(line.startswith(start) for line in said)


@linux
def test_a_command_in_a_child_ends_as_it_would_by_itself() -> None:
    code = (
        "import sys; from opcast import cli; sys.argv = ['opcast', 'zoo', 'export', 'no-such', "
        "'--out', 'x']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("opcast: error: ") and "no-such" in done.stderr


#: A command that stops at Ctrl-C by itself, under the name of one that keeps its results.
OBEDIENT = """
import importlib, sys, time
import typer
from opcast import cli

probe = typer.Typer()

@probe.command()
def sweep():
    print("here", flush=True)
    time.sleep(60)

importlib.import_module("opcast.cli.main").app = lambda **options: probe([], **options)
sys.argv = ["opcast", "sweep"]
cli.main()
"""


@linux
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_of_a_command_that_obeys_it_says_what_is_kept(stop: signal.Signals) -> None:
    """Typer would end it without a word; SIGTERM goes to the parent alone, as of a scheduler."""
    with subprocess.Popen(
        [sys.executable, "-c", OBEDIENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        if stop == signal.SIGINT:
            os.killpg(process.pid, stop)
        else:
            process.send_signal(stop)
        assert process.wait(timeout=30) == 128 + stop
        said = process.stderr.read()
    assert "finished plans are kept in --out" in said and "Traceback" not in said


#: A command whose native code does not look for Ctrl-C, as a compiler's.
DEAF = """
import os, signal, sys, time
from importlib import import_module

main = import_module("opcast.cli.main")

def command():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(60)

main.GRACE_S = 1.0
main.guarded(sys.argv[1:], command)
"""


def test_a_stopped_campaign_says_how_to_go_on() -> None:
    said = stopped_text(["campaign", "--out", "x"])
    assert said.endswith("what was measured is kept in --out; the same command goes on from it\n")


@linux
@pytest.mark.parametrize(
    ("command", "kept"), [("predict", "stay in the cache"), ("sweep", "goes on from them")]
)
def test_ctrl_c_ends_a_compile_at_once_and_says_what_is_kept(command: str, kept: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 128 + signal.SIGINT
        # The grace, which is shortened here, and a busy machine.
        assert time.monotonic() - start < 15
        said = process.stderr.read()
    assert said.startswith("opcast: stopped: ")
    assert kept in said and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
