"""The report on clusters, on small models and few plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.workflows.reports import clusters as cluster_report
from opcast.workflows.reports.clusters import (
    collective_errors,
    print_collectives,
    run_cluster_report,
)
from opcast.workflows.reports.settings import ClusterReportSettings

TINY = ("layers=4", "d_model=512", "heads=8", "kv_heads=8", "d_ff=1024", "vocab=1024",
        "seq=512", "batch=64")  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_report, "MODELS", {"8B decoder": ("llama", *TINY)})
    monkeypatch.setattr(cluster_report, "SIZES", {16: "tp=8,pp=2,dp=1"})
    monkeypatch.setattr(cluster_report, "SCALING_GRID", {
        "schedule": ["1f1b"], "split": ["1"], "recompute": ["none"], "tp": ["1"], "pp": ["1"],
        "data": ["fsdp"],
    })  # fmt: skip
    measured = pd.DataFrame(cluster_report._measure_cost())
    monkeypatch.setattr(cluster_report, "simulation_cost", lambda: measured)


@pytest.mark.slow
def test_all_parts_are_printed_written_and_drawn(small: None, tmp_path: Path) -> None:
    console = Console(width=160, record=True)
    grid = {"schedule": ["1f1b"], "split": ["1"], "recompute": ["none"], "tp": ["1", "2"],
            "pp": ["1"], "data": ["dp", "fsdp"]}  # fmt: skip
    request = ClusterReportSettings(
        out=tmp_path / "c.json", models=("8B decoder",), scaling=(8, 16), grid=grid
    )
    found = run_cluster_report(console, request)
    assert json.loads((tmp_path / "c.json").read_text()) == json.loads(json.dumps(found))
    assert {p.name for p in (tmp_path / "c").glob("*.png")} == {"scaling.png", "8B-decoder.png"}
    text = console.export_text()
    assert "no measurements given" in text
    assert found["cost"][0]["seconds"] > 0
    # Fewer micro-batches may make twice the devices a little more than twice as fast.
    strong = {row["devices"]: row["strong"] for row in found["scaling"] if row["batch"] == 64}
    assert strong[8] == 1.0
    # Launches of so small a model take as long on any number of devices.
    assert 0.4 < strong[16] < 1.1
    (best,) = found["best"]
    assert best["plans"] == 4
    assert best["reasons"][0].startswith("second, ")


def test_collectives_are_judged_once_and_kept(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DatasetError, match="no collectives"):
        collective_errors(Console(), tmp_path, tmp_path)
    sizes = 2.0 ** np.arange(12, 30)
    rows = pd.concat([
        pd.DataFrame({"op": "all_reduce", "bytes": sizes, "world_size": world, "device": device,
                      "latency_us": 20 + sizes / 1e5})
        for device in ("a100-sxm-80gb", "h100-sxm") for world in (2, 8)
    ])  # fmt: skip
    (tmp_path / "data").mkdir()
    rows.to_csv(tmp_path / "data" / "collectives.csv", index=False)
    first = collective_errors(Console(), tmp_path, tmp_path)
    monkeypatch.setattr("opcast.models.collectives.study.study", None)
    pd.testing.assert_frame_equal(collective_errors(Console(), tmp_path, tmp_path), first)
    tables = print_collectives(Console(width=200), first)
    title = "collectives, held-out rows, error in % by fabric, world_size"
    assert [row["world_size"] for row in tables[title]] == [2, 8]


def test_the_report_takes_one_subject() -> None:
    result = CliRunner().invoke(app, ["report", "clusters", "--study", "estimators"])
    assert result.exit_code == 2
