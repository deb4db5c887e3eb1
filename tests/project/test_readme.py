"""Every command and example of the README is run, with less time to measure.

So are, in ``make test-all``, the commands of the page that its section on one's own device
continues on.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.workflows.reports.accuracy import COMMITTED

from ..support.commands import changed, opcast

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OWN_DEVICE = (ROOT / "docs/own-device.md").read_text()


def commands_of(page: str) -> list[str]:
    """In the order of the page."""
    lines = (line for line in page.splitlines() if line.startswith("$ "))
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines]


#: Replaced, so that the test takes minutes.
FASTER = {"30m": "1s", "depth=50": "depth=18"}
MAKE = re.findall(r"`?make (\w+)", README)


def run(command: list[str], cwd: Path, env: dict[str, str], budget: str = "") -> str:
    assert command[0] == "opcast"
    words = [FASTER.get(word, word) for word in command[1:]]
    if words[0] == "profile":
        words += ["--suite", "quick", "--quiet"]
        words = [budget or word if word == "1s" else word for word in words]
    done = opcast(*words, cwd=cwd, env=changed(env, ("OPCAST_CACHE", "OPCAST_MLRUNS")))
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return shown(done.stdout, done.stderr)


def shown(stdout: str, stderr: str) -> str:
    """What a page shows of a command: its result, and what it wrote; notes and progress not."""
    wrote = (line for line in stderr.splitlines(keepends=True) if line.startswith("wrote "))
    return stdout + "".join(wrote)


def test_readme_has_the_right_length_and_names_real_make_targets():
    assert 100 <= len(README.splitlines()) <= 200
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(MAKE) <= set(targets)
    assert {"demo", "test", "report", "bench"} <= set(MAKE)


def test_readme_links_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_readme_figures_are_filled_in():
    assert not re.findall(r"^@\w+@$", README, re.MULTILINE)


@pytest.mark.slow
def test_commands_of_the_readme_work_in_order(tmp_path):
    # What an absent chip's compiler makes of this one, test_tutorials.py compares with the page.
    compiled = "opcast predict decoder.mlir --device h100-sxm --top 4"
    commands = commands_of(README)
    assert len(commands) == 7 and compiled in commands
    output = run_all([own for own in commands if own != compiled], tmp_path, "1s")
    assert "unseen_family" in output("opcast train --data data")
    assert registered(tmp_path)["estimator"] == "xgboost"


@pytest.mark.slow
@pytest.mark.exhaustive  # several minutes: it measures for more than one
def test_commands_of_ones_own_device_work_in_order(tmp_path, op_rows):
    published_tables(tmp_path / "published-latency", op_rows)
    commands = commands_of(OWN_DEVICE)
    assert len(commands) == 12
    output = run_all(commands, tmp_path, "75s")
    assert "90 % interval" in output("opcast predict step.mlir")
    assert (tmp_path / "data.png").stat().st_size > 10_000
    assert "noise" in output("opcast data show")
    assert "unseen_family" in output("opcast train --data data")
    assert "each chip left out" in output("opcast train --data operators")
    assert "active" in output("opcast calibrate")
    assert len(pd.read_parquet(tmp_path / "predictions.parquet")) == 450
    assert len(pd.read_parquet(tmp_path / "calibrated.parquet")) == 450
    assert "xgboost" in output("opcast compare")
    assert registered(tmp_path)["estimator"] == "xgboost"
    serves_the_runs(tmp_path, environment(tmp_path))


def environment(folder: Path) -> dict[str, str]:
    """Own caches and stores."""
    own = {"OPCAST_CACHE": str(folder / "cache"), "OPCAST_MLRUNS": str(folder / "mlruns")}
    return os.environ | own


def registered(folder: Path) -> dict[str, object]:
    """Manifest of the model that the commands register."""
    return json.loads((folder / "cache/models/mine/manifest.json").read_text())


def run_all(commands: list[str], folder: Path, budget: str) -> Callable[[str], str]:
    """Run commands in order; gives what those that begin with given words print."""
    outputs: dict[str, str] = {}
    for command in commands:
        outputs[command] = run(shlex.split(command), folder, environment(folder), budget)
        if command.startswith("opcast profile") and budget == "1s":
            measured_longer(folder / "data")
    return lambda start: "".join(text for own, text in outputs.items() if own.startswith(start))


def measured_longer(folder: Path) -> None:
    """Adds what half an hour gives and seconds do not: programs of several families."""
    found = Dataset.load(COMMITTED)
    part = found.frame.groupby(["family", "level"]).head(15).reset_index(drop=True)
    Dataset(part, found.runs).save(folder, "samples-longer.parquet")


def published_tables(folder: Path, op_rows: Callable[..., pd.DataFrame]) -> None:
    """A folder as published: one family on three devices, each a factor slower than physics."""
    parts = []
    for factor, device in enumerate(["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"], 2):
        rows = op_rows("graph/linear", 150, factor).assign(device=device)
        base = op_features(rows, "graph/linear", {device: find_device(device)}).base_s
        parts.append(rows.assign(latency_us=base * 1e6 * (1 + factor / 10)))
    table = pd.concat(parts, ignore_index=True).assign(op="linear", source="aiconfigurator")
    table["id"] = [f"T{i}" for i in range(len(table))]
    table["split"] = ["val" if i % 4 == 0 else "train" for i in range(len(table))]
    folder.mkdir()
    table.drop(columns=["key", "method"]).to_parquet(folder / "ops_tc.parquet")


def serves_the_runs(cwd: Path, env: dict[str, str]) -> None:
    """``opcast ui`` answers on its port."""
    command = [sys.executable, "-m", "opcast", "ui", "--port", "5077"]
    server = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(480):  # minutes on a busy machine: it starts several processes of its own
            assert server.poll() is None, "opcast ui ended"
            try:
                with urllib.request.urlopen("http://127.0.0.1:5077/", timeout=2) as page:
                    assert page.status == 200
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail("no answer from opcast ui")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.mark.slow
def test_python_example_of_the_readme_prints_a_prediction(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert re.fullmatch(r"\d+ µs \(\d+ to \d+\)", lines[0])
    assert "gemm" in lines[1]
