"""Campaigns on this CPU: killed, resumed, ended on time, imported."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import ProfileError
from opcast.common.paths import PACKAGE
from opcast.datagen.campaign import run as run_module
from opcast.datagen.campaign.archive import MOST_BYTES, read_archive
from opcast.datagen.campaign.journal import Journal
from opcast.datagen.campaign.plan import load_plan
from opcast.datagen.campaign.run import DONE, FAILED, MORE, CampaignSettings, run_campaign
from opcast.datagen.describe import noise_floor
from opcast.features.dataset import Dataset
from opcast.features.devices.device import DeviceSpec, MemoryLevel

SPEC = DeviceSpec("cpu-x", "cpu", {"f32": 1e13}, {"f32": 1e13}, (MemoryLevel(1e9, 1e13),), 1e-8)


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    """The command that needs nothing installed but its framework."""
    command = [sys.executable, "-P", "-m", "opcast.datagen.campaign", "--device", "cpu"]
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [*command, "--out", str(out), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def lines(out: Path) -> list[dict]:
    path = out / "journal.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written, or cut off
    return found


def wait_for(out: Path, what: str, count: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while sum(line["event"] == what for line in lines(out)) < count:
        assert time.monotonic() < end, f"no {count} {what} within {seconds} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that is killed in the middle of a block, goes on for a slice, and to its end."""
    out = tmp_path_factory.mktemp("campaign")
    first = start(out, "--budget", "2m")
    wait_for(out, "block", 1)
    wait_for(out, "begin", 2)
    first.kill()
    first.communicate()
    # A slice that ends on time: packing has two seconds, and a busy machine some more.
    begin = time.monotonic()
    second = start(out, "--budget", "2m", "--slice", "12s")
    said, _ = second.communicate(timeout=60)
    assert time.monotonic() - begin < 20.0
    # On a busy machine the frameworks may just have started.
    words = {MORE: "the slice has ended", FAILED: "time"}
    assert words.get(second.returncode, "none") in said or "too short" in said, said
    third = start(out, "--budget", "2m")
    said, _ = third.communicate(timeout=150)
    assert third.returncode == DONE, said
    assert "launches" in said
    assert "measured" in said
    return out


def test_a_kill_costs_what_was_under_way_alone(rehearsed: Path) -> None:
    events = lines(rehearsed)
    assert sum(e["event"] == "slice" for e in events) == 3
    done = Counter(key for e in events if e["event"] == "block" for key in e["done"])
    assert set(done.values()) == {1}
    journal = Journal(rehearsed)
    assert journal.failed == {}
    plan = {case.key for case in load_plan("cpu").cases}
    # On a busy machine the budget may end first; most of it is there in any case.
    assert journal.done <= plan
    assert len(journal.done) > len(plan) / 2


def test_the_archive_is_small_whole_and_without_names(rehearsed: Path) -> None:
    path = rehearsed / "campaign.zip"
    assert path.stat().st_size < MOST_BYTES / 10
    tables, record, _ = read_archive(path)
    assert {"programs", "events", "anchors", "telemetry"} <= set(tables)
    told = json.dumps([record, tables])
    assert str(rehearsed) not in told
    assert str(Path.home()) not in told
    assert f'"{socket.gethostname()}"' not in told
    assert "metadata={" not in told
    assert record["slices"] == 3
    assert record["elapsed_s"] > sum(record["spent_s"].values()) / 2 > 0
    assert record["platform"] == "cpu"
    host = record["hosts"][-1]
    assert host["frameworks"]["jax"]["jax"] == host["libraries"]["jax"]


def test_what_was_measured_becomes_datasets(rehearsed: Path, tmp_path: Path, capsys) -> None:
    from opcast.cli.options import make_console
    from opcast.workflows.campaign import run_import_campaign

    device = tmp_path / "cpu.json"
    device.write_text(SPEC.to_json())
    out = tmp_path / "out"
    found = run_import_campaign(
        make_console(), rehearsed, out, device=str(device), tell=lambda _: None
    )
    said = capsys.readouterr().out
    assert found.digest in said
    assert found.contradictions == []
    assert found.without == {}
    frame = Dataset.load(out / "kernels").frame
    product = frame[frame["family"] == "op:qk"]
    # Two heads of 64 by 64 products over 16.
    assert set(product[product["kind"] == "gemm"]["flops"]) == {2 * 2 * 64 * 64 * 16}
    whole = frame[frame["level"] == "program"].set_index("program")["latency_us_p50"]
    parts = frame[frame["level"] == "kernel"].groupby("program")["latency_us_p10"].sum()
    assert len(whole) >= 2
    assert (whole > 0.5 * parts.loc[whole.index]).all()
    assert noise_floor(frame)["kernels"]["replicates"]["pairs"] >= 2
    walls = pd.read_parquet(out / "tables" / "walls.parquet")
    assert (walls["us_median"].dropna() > 0).all()
    assert (walls["cold_us"] >= walls["warm_us"]).all()


def test_a_machine_that_is_taken_away_leaves_an_archive(tmp_path: Path) -> None:
    own = start(tmp_path, "--budget", "10m")
    wait_for(tmp_path, "block", 1)
    own.send_signal(signal.SIGTERM)
    said, _ = own.communicate(timeout=60)
    assert own.returncode == 130, said
    assert "the same command goes on" in said
    assert read_archive(tmp_path)[1]["ended"] == "interrupted"


def test_a_used_up_budget_measures_nothing_more(tmp_path: Path) -> None:
    own = Journal(tmp_path)
    own.add("slice")
    own.add(
        "block", stage="launches", kind="launches", worker="xla", seconds=1.0, failed={},
        done=["launches/launches/arguments2"], unfinished=[],
        rows=own.keep([{"table": "launches", "key": "launches/launches/arguments2"}]),
    )  # fmt: skip
    outcome = run_campaign(CampaignSettings(tmp_path, 0.5, device="cpu"))
    assert (outcome.status, outcome.done, outcome.why) == (DONE, 1, "the budget is used up")
    assert outcome.archive is not None
    assert Journal(tmp_path).slices == 1


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ProfileError, match="no tpu is seen"):
        run_campaign(CampaignSettings(tmp_path / "a", 60.0, device="tpu"))
    with pytest.raises(ProfileError, match="unknown device"):
        run_campaign(CampaignSettings(tmp_path / "b", 60.0, device="fpga"))
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match="no framework can measure here"):
        run_campaign(CampaignSettings(tmp_path / "c", 60.0))


@pytest.mark.exhaustive
def test_random_kills(tmp_path: Path) -> None:
    """Three minutes of kills at random moments: nothing is lost or measured twice."""
    draw = random.Random(0)
    end = time.monotonic() + 180.0
    finished = 0
    while time.monotonic() < end:
        finished += _killed_until_done(tmp_path / str(finished), draw, end)
    last = max(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    own = start(last, "--budget", "10m", "--slice", "20s")
    own.communicate(timeout=60)
    assert own.returncode in (DONE, MORE)
    read_archive(last)


def _killed_until_done(out: Path, draw: random.Random, end: float) -> bool:
    """Kill a campaign again and again until it is done, or the time is; whether it is done."""
    known: set[str] = set()
    done = False
    while time.monotonic() < end and not done:
        own = start(out, "--budget", "10m")
        try:
            own.communicate(timeout=draw.uniform(3.0, 25.0))
            done = own.returncode == DONE
        except subprocess.TimeoutExpired:
            own.send_signal(signal.SIGKILL)
            own.communicate()
        journal = Journal(out)
        assert known <= journal.done
        known = set(journal.done)
    counts = Counter(k for e in lines(out) if e["event"] == "block" for k in e["done"])
    assert all(count == 1 for count in counts.values())
    return done
