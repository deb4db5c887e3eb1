"""Campaigns on this CPU: killed, resumed, ended on time, imported."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import ProfileError
from opcast.common.files import locked
from opcast.common.paths import PACKAGE
from opcast.datagen.campaign import run as run_module
from opcast.datagen.campaign.archive import MOST_BYTES, read_archive
from opcast.datagen.campaign.client import Workers
from opcast.datagen.campaign.journal import Journal
from opcast.datagen.campaign.plan import CampaignSettings, load_plan
from opcast.datagen.campaign.run import DONE, MORE, run_campaign
from opcast.datagen.describe import noise_floor
from opcast.features.dataset import Dataset
from opcast.features.devices.device import local_device_name
from opcast.features.devices.identity import is_measured

from ...support.campaigns import fewer, slow_plan

MODULE = "opcast.tests.support.campaign_worker"
#: The command with workers that measure nothing.
BY_HAND = f"""
import sys
from functools import partial
from opcast.datagen.campaign import __main__, run
from opcast.datagen.campaign.client import Workers
from opcast.tests.support.campaigns import slow_plan
run.Workers = partial(Workers, module={MODULE!r})
run.load_plan = lambda *_: slow_plan(12)
sys.exit(__main__.main())
"""
#: The command with fewer programs and without long runs, which test_tasks.py has.
FEWER = """
import sys
from opcast.datagen.campaign import __main__, run
from opcast.tests.support.campaigns import fewer
whole = run.load_plan
run.load_plan = lambda *given: fewer(whole(*given))
sys.exit(__main__.main())
"""


def start(
    out: Path, *more: str, program: tuple[str, str] = ("-m", "opcast.datagen.campaign")
) -> subprocess.Popen[str]:
    """The command that needs nothing installed but its framework."""
    command = [sys.executable, "-P", *program, "--device", "cpu"]
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
    """A campaign of this CPU to its end, by workers that change as seldom as they can."""
    out = tmp_path_factory.mktemp("campaign")
    own = start(out, "--budget", "10m", program=("-c", FEWER))
    said, _ = own.communicate(timeout=200)
    assert own.returncode == DONE, said
    count = len(fewer(load_plan("cpu")).cases)
    assert f"{count} measured, 0 failed, 0 left; all is measured" in said
    assert "launches" in said
    return out


def test_kills_cost_what_was_under_way_alone(tmp_path: Path) -> None:
    first = start(tmp_path, program=("-c", BY_HAND))
    wait_for(tmp_path, "block", 1)
    wait_for(tmp_path, "begin", 2)
    first.kill()
    first.communicate()
    # As a machine that is taken away.
    second = start(tmp_path, program=("-c", BY_HAND))
    wait_for(tmp_path, "slice", 2)
    wait_for(tmp_path, "block", 3)
    second.send_signal(signal.SIGTERM)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 130, said
    assert "the same command goes on" in said
    assert read_archive(tmp_path)[1]["ended"] == "interrupted"
    third = start(tmp_path, program=("-c", BY_HAND))
    said, _ = third.communicate(timeout=60)
    assert third.returncode == DONE, said
    assert "12 measured, 0 failed, 0 left; all is measured" in said
    events = lines(tmp_path)
    assert sum(e["event"] == "slice" for e in events) == 3
    done = Counter(key for e in events if e["event"] == "block" for key in e["done"])
    assert done == dict.fromkeys((case.key for case in slow_plan(12).cases), 1)
    tables, record, _ = read_archive(tmp_path)
    assert record["slices"] == 3
    assert sorted(row["key"] for row in tables["t"]) == sorted(done)


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
    assert record["elapsed_s"] > sum(record["spent_s"].values()) / 2 > 0
    assert record["platform"] == "cpu"
    host = record["hosts"][-1]
    assert host["frameworks"]["jax"]["jax"] == host["libraries"]["jax"]


def test_what_was_measured_becomes_datasets(rehearsed: Path, tmp_path: Path, capsys) -> None:
    from opcast.cli.options import make_console
    from opcast.workflows.campaign import run_import_campaign

    out = tmp_path / "out"
    found = run_import_campaign(make_console(), rehearsed, out, device=None, tell=lambda _: None)
    said = capsys.readouterr().out
    assert found.digest in said
    assert found.contradictions == []
    assert found.without == {}
    dataset = Dataset.load(out / "kernels")
    frame = dataset.frame
    # The CPU by its own ceilings, which were measured with it.
    device = dataset.devices[local_device_name()]
    assert set(frame["device"]) == {device.name}
    assert is_measured(device)
    product = frame[frame["family"] == "op:qk"]
    # Two heads of 64 by 64 products over 16.
    assert set(product[product["kind"] == "gemm"]["flops"]) == {2 * 2 * 64 * 64 * 16}
    whole = frame[frame["level"] == "program"].set_index("program")["latency_us_p50"]
    parts = frame[frame["level"] == "kernel"].groupby("program")["latency_us_p10"].sum()
    assert len(whole) == 1
    assert (whole > 0.5 * parts.loc[whole.index]).all()
    assert noise_floor(frame)["kernels"]["replicates"]["pairs"] >= 2
    programs = pd.read_parquet(out / "tables" / "programs.parquet")
    assert (programs["us_median"].dropna() > 0).all()
    # Single runs: a busy machine may slow a warm one.
    assert (programs["cold_us"] / programs["warm_us"]).median() >= 1.0
    assert "hlo" not in programs


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that measure nothing; each case of the plan takes some tenths of a second."""
    monkeypatch.setattr(run_module, "Workers", partial(Workers, module=MODULE))
    monkeypatch.setattr(run_module, "load_plan", lambda *_: slow_plan(200))


@pytest.mark.usefixtures("by_hand")
def test_a_slice_and_the_budget_end_on_time_and_say_how_to_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    begin = time.monotonic()
    first = run_campaign(CampaignSettings(tmp_path, 60.0, slice_s=5.0), said.append)
    assert time.monotonic() - begin < 8.0
    assert (first.status, first.why) == (MORE, "the slice has ended; the same command goes on")
    assert said[0] == (
        "rehearsal on a CPU: no accelerator was seen by torch (no driver); jax (no driver)"
    )
    assert first.done > 0
    used = Journal(tmp_path).elapsed_s
    second = run_campaign(CampaignSettings(tmp_path, used + 5.0))
    assert (second.status, second.why) == (DONE, "the budget is used up; raise --budget")
    # The same again says the same, and starts nothing.
    events = lines(tmp_path)
    again = run_campaign(CampaignSettings(tmp_path, used + 5.0))
    assert again == second
    assert again.left == 200 - second.done > 0
    assert lines(tmp_path) == events
    assert read_archive(tmp_path)[1]["ended"] == "the budget is used up"


@pytest.mark.usefixtures("by_hand")
def test_a_rest_too_short_to_start_a_framework_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_CAMPAIGN_START_S", "20")
    own = Journal(tmp_path)
    own.add("slice")
    own.add("block", stage="s", kind="k", worker="xla", seconds=1.0, failed={}, done=["s/k/0"],
            unfinished=[], rows=own.keep([{"table": "t", "key": "s/k/0"}]))  # fmt: skip
    own.add("host", platform="cpu", record={"frameworks": {"jax": {"platform": "cpu"}}})
    outcome = run_campaign(CampaignSettings(tmp_path, own.elapsed_s + 2.0))
    assert (outcome.status, outcome.left) == (DONE, 199)
    assert outcome.why == "the budget is used up; raise --budget"


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


@pytest.mark.usefixtures("by_hand")
def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ProfileError, match="no tpu is seen"):
        run_campaign(CampaignSettings(tmp_path / "a", 60.0, device="tpu"))
    with pytest.raises(ProfileError, match="unknown device"):
        run_campaign(CampaignSettings(tmp_path / "b", 60.0, device="fpga"))
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match="no framework can measure here"):
        run_campaign(CampaignSettings(tmp_path / "c", 60.0))


@pytest.mark.usefixtures("by_hand")
def test_a_full_disk_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, whole = [], Journal.keep

    def keep(self: Journal, rows: object) -> str:
        if len(kept) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept.append(whole(self, rows))
        return kept[-1]

    monkeypatch.setattr(Journal, "keep", keep)
    settings = CampaignSettings(tmp_path, 60.0, slice_s=20.0)
    with pytest.raises(ProfileError, match="No space left on device") as caught:
        run_campaign(settings)
    assert "make room" in str(caught.value)
    assert len(Journal(tmp_path).done) == 3
    monkeypatch.setattr(Journal, "keep", whole)
    assert run_campaign(CampaignSettings(tmp_path, 60.0, slice_s=2.0)).done > 3


def test_a_folder_that_cannot_be_written_is_no_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot write") as caught:
        run_campaign(CampaignSettings(tmp_path / "file" / "out", 60.0))
    assert "--out" in str(caught.value) and "make room" not in str(caught.value)


def test_a_folder_in_use_is_refused_at_once(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock"), pytest.raises(ProfileError, match="another campaign"):
        run_campaign(CampaignSettings(tmp_path, 60.0))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_campaign_that_finds_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ProfileError):
        run_campaign(CampaignSettings(tmp_path / "out", 60.0, device="tpu"))
    assert not (tmp_path / "out").exists()


def test_another_interrupt_does_not_stop_the_packing(tmp_path: Path) -> None:
    slow = BY_HAND.replace(
        "sys.exit(",
        "import time\n"
        "whole = run.pack\n"
        "def pack(*given):\n"
        "    print('packing', flush=True)\n"
        "    time.sleep(1.0)\n"
        "    return whole(*given)\n"
        "run.pack = pack\n"
        "sys.exit(",
    )
    own = start(tmp_path, program=("-c", slow))
    wait_for(tmp_path, "block", 1)
    own.send_signal(signal.SIGINT)
    assert own.stdout is not None
    while "packing" not in own.stdout.readline():
        assert own.poll() is None
    own.send_signal(signal.SIGINT)
    own.send_signal(signal.SIGTERM)
    said, _ = own.communicate(timeout=60)
    assert own.returncode == 130, said
    assert read_archive(tmp_path)[1]["ended"] == "interrupted"


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
