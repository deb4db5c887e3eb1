"""Profiles of two Ray nodes of one machine: one dataset, though a worker and a node die."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.dataset_folder import RunWriter, read_failures, run_records
from opcast.datagen.profile import profile as fleet
from opcast.datagen.profile.plan import BATCH_SIZES, ProfileResult, ProfileSettings
from opcast.datagen.profile.profile import Measured, Piece, measure_piece, profile_fleet
from opcast.features.dataset import Dataset
from opcast.features.devices.device import DeviceSpec, MemoryLevel

SPEC = DeviceSpec("cpu-x", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e9, 1e10),), 1e-6)
#: Two pieces a host.
SETTINGS = ProfileSettings("cpu", 20.0, {"op": 1.0}, seed=7)


def rows_of(program: str, latency: float) -> dict[str, object]:
    return {
        "kernel_hash": program, "kernel_ir": "", "level": "op", "kind": "elementwise",
        "dtype": "f32", "latency_us_p10": latency, "latency_us_p50": latency,
        "latency_us_p90": latency, "repeats": 9, "flops": 1.0, "bytes": 8.0, "source": "measured",
        "family": "op:add", "program": program,
    }  # fmt: skip


def stand_in(flags: str):
    """A profiler whose latencies follow from the seed; its first worker of seed 7 dies."""

    def measure(piece: Piece) -> Measured:
        import tempfile

        own, flag = piece.settings, Path(flags) / "died"
        if own.seed == 7 and not flag.exists():
            flag.touch()
            os._exit(1)
        time.sleep(2.0 if own.seed == 7 else 4.0)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            number = sum(name.startswith("run-") for name in piece.known)
            run = RunWriter(folder, f"run{own.seed}{number}")
            run.record |= {"device": asdict(SPEC), "elapsed_s": 10.0}
            key = f"op-{own.seed}-{number:06d}"
            run.add_rows([rows_of(key, 1.0 + own.seed / 7 + number)], SPEC.name)
            run.add_failure(f"bad-{own.seed}-{number}", "too large")
            run.flush()
            run.save_record()
            files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".jsonl"}
            result = ProfileResult(folder, 1, 1, 1, 10.0, "budget", run.run_id)
            return Measured(files, read_failures(folder), result)

    return measure


def expected() -> pd.DataFrame:
    """Two rows a host, by program: to the bit what one process would have made."""
    rows = [(f"op-{s}-{n:06d}", 1.0 + s / 7 + n) for s in (7, 8) for n in range(2)]
    return pd.DataFrame(rows, columns=["program", "latency_us_p50"]).astype({"program": object})


def programs(folder: Path) -> pd.DataFrame:
    frame = Dataset.load(folder).frame[["program", "latency_us_p50"]]
    return frame.sort_values("program", ignore_index=True).astype({"program": object})


@pytest.mark.slow
def test_two_hosts_and_the_death_of_a_worker(tmp_path, ray_cluster, monkeypatch):
    ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    monkeypatch.setattr(fleet, "measure_piece", stand_in(str(tmp_path)))
    out = tmp_path / "out"
    result = profile_fleet(out, ray_cluster.address, SETTINGS, piece_s=10.0, progress=False)
    assert (tmp_path / "died").exists()
    assert (result.samples, result.programs, result.failed) == (4, 4, 4)
    pd.testing.assert_frame_equal(programs(out), expected(), check_exact=True)
    # Who measured what: host 0 with the first seed.
    hosts = {run: record["fleet"]["host"] for run, record in run_records(out).items()}
    assert hosts == {"run70": 0, "run71": 0, "run80": 1, "run81": 1}
    assert len({record["fleet"]["node"] for record in run_records(out).values()}) == 2
    assert len(read_failures(out)) == 4
    # Nothing is left to do.
    again = profile_fleet(out, ray_cluster.address, SETTINGS, piece_s=10.0, progress=False)
    assert (again.samples, again.stopped) == (0, "budget")


@pytest.mark.slow
def test_a_host_that_dies_keeps_what_it_returned(tmp_path, ray_cluster, monkeypatch):
    second = ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    monkeypatch.setattr(fleet, "measure_piece", stand_in(str(tmp_path)))
    kept = fleet._Fleet.keep

    def kill_after_first(self, host, made):
        kept(self, host, made)
        if host.node == second.node_id and len(run_records(self._folder)) < 4:
            ray_cluster.remove_node(second)

    monkeypatch.setattr(fleet._Fleet, "keep", kill_after_first)
    out = tmp_path / "out"
    result = profile_fleet(out, ray_cluster.address, SETTINGS, piece_s=10.0, progress=False)
    numbers = {record["fleet"]["host"] for record in run_records(out).values()}
    assert result.samples == 3 and numbers == {0, 1}
    # The same call with another node in its place measures what is missing, and that alone.
    ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    profile_fleet(out, ray_cluster.address, SETTINGS, piece_s=10.0, progress=False)
    pd.testing.assert_frame_equal(programs(out), expected(), check_exact=True)


@pytest.mark.slow
def test_devices_that_no_host_has(tmp_path, ray_cluster):
    settings = ProfileSettings("tpu", 20.0, {"op": 1.0})
    with pytest.raises(ProfileError, match="no host of the cluster has a device 'tpu'"):
        profile_fleet(tmp_path, ray_cluster.address, settings, progress=False)
    with pytest.raises(ProfileError, match="needs a budget"):
        profile_fleet(tmp_path, ray_cluster.address, ProfileSettings(), progress=False)


@pytest.mark.exhaustive  # two runs of a profiler
def test_a_piece_returns_what_is_new(monkeypatch):
    # A batch is the least that a run measures.
    monkeypatch.setitem(BATCH_SIZES, "op", 2)
    # Workers map the pages of their heap before they measure: a small one here.
    own = {"max_memory": 200e6, "patience": 0.0}
    settings = ProfileSettings("cpu", 2.0, {"op": 1.0}, seed=3, **own)
    first = measure_piece(Piece(settings, {}, SPEC))
    names = sorted(first.files)
    assert names[0].startswith("run-") and names[-1].startswith("samples-")
    assert first.result.samples and first.result.programs
    # With what is known the programs go on, and nothing is returned twice.
    longer = replace(settings, budget_s=first.result.elapsed_s + 2.0)
    second = measure_piece(Piece(longer, first.files, SPEC))
    assert second.result.samples and not set(second.files) & set(first.files)
