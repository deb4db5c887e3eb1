"""The report on published tables, on operators drawn from the physics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError, ModelError
from opcast.common.tables_text import percent
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.models.tracking.tracked_runs import read_runs, runs
from opcast.workflows.reports.operator_tables import left_out_errors, metric_names, pooled
from opcast.workflows.reports.settings import OperatorReportSettings

DEVICES = {"Tesla T4": 1.2, "Tesla V100-PCIE-32GB": 1.4, "NVIDIA A100 80GB PCIe": 1.6}
KEY = "eager/linear"
#: Of each device: enough for 100 samples and as many rows to judge them on.
ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, op_rows: Callable[..., pd.DataFrame]) -> Path:
    """Products on two GPUs, and on a third that only a test split has."""
    tables = []
    for seed, (device, factor) in enumerate(DEVICES.items()):
        rows = op_rows(KEY, ROWS, seed).assign(device=device, source="neusight")
        base = op_features(rows, KEY, {device: find_device(device)}).base_s
        split = np.where(np.arange(ROWS) % 3 == 0, "val", "train")
        rows["split"] = "dev_unseen_gpu" if "A100" in device else split
        tables.append(rows.assign(latency_us=base * 1e6 * factor))
    table = pd.concat(tables, ignore_index=True).drop(columns=["key", "method"])
    table["id"] = [f"N{i}" for i in range(len(table))]
    root = tmp_path_factory.mktemp("tables")
    table.to_parquet(root / "ops_neusight.parquet")
    return root


def report(*arguments: object) -> str:
    result = CliRunner().invoke(
        app, ["report", "operators", *(str(a) for a in arguments)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("report") / "figures.json"
    options = ("--published", folder, "--model", "roofline", "--model", "ridge", "--out", out)
    return out, report(*options)


@pytest.mark.slow
def test_it_prints_estimators_side_by_side(first: tuple[Path, str]) -> None:
    out, text = first
    assert "estimators side by side: val" in text
    assert "inside the 90 % interval" in text
    assert "each chip left out, fp32 and fp16: t4" in text
    figures = pd.DataFrame(json.loads(out.read_text())["figures"])
    own = figures[(figures["study"] == "estimators") & (figures["split"] == "val")]
    assert set(own["estimator"]) == {"roofline", "ridge"}
    assert set(own["device"]) == {"t4", "v100-pcie"}
    # The labels are the physics times a factor for each device, which slopes take up.
    assert (own["mape"] < 0.05).all()
    unseen = figures[(figures["split"] == "dev_unseen_gpu") & (figures["samples"] == 0)]
    assert (unseen["mape"] > 0.05).all()


@pytest.mark.slow
def test_samples_help_a_left_out_device(first: tuple[Path, str]) -> None:
    figures = pd.DataFrame(json.loads(first[0].read_text())["figures"])
    own = figures[(figures["study"] == "left-out") & (figures["left_out"] == "t4")]
    own = own[own["estimator"] == "ridge"].set_index("samples")["mape"]
    assert own[100] <= own[50] < 0.3 * own[0]


@pytest.mark.slow
def test_a_second_run_fits_nothing(folder: Path, first: tuple[Path, str]) -> None:
    out, text = first
    kept = sorted(OperatorReportSettings(out.parent, out).folder.iterdir())
    again = report(
        "--published", folder, "--model", "roofline", "--model", "ridge", "--out", out, "--no-track"
    )
    assert f"{len(kept)} parts were already finished" in again
    assert "fitting" not in again and " of " not in again.split("parts were already finished")[0]
    assert sorted(OperatorReportSettings(out.parent, out).folder.iterdir()) == kept
    tables = text.split("estimators side by side", 1)[1].split("figures; parts in")[0]
    assert tables in again


@pytest.mark.slow
def test_one_run_holds_a_run_for_each_estimator(first: tuple[Path, str]) -> None:
    run_id = first[1].split("logged to MLflow as ")[1].split(";")[0]
    found = runs()
    own = found[found["tags.mlflow.parentRunId"] == run_id]
    assert set(own["params.model"]) == {"roofline", "ridge"}
    assert (own["metrics.estimators/val/eager.linear/mape"] < 0.05).all()
    assert own["metrics.left-out/t4/val/eager.linear/50 samples/coverage"].notna().all()
    judged = read_runs(run_id)
    assert {run.name for run in judged} == {"roofline", "ridge"}
    assert all("eager/linear" in set(run.predictions["kind"]) for run in judged)
    assert all(
        run.predictions["split"].str.startswith(("estimators", "left-out")).all() for run in judged
    )


def test_a_folder_without_tables(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no operator table here"):
        report("--published", tmp_path, "--out", tmp_path / "x.json")


def test_wrong_names_list_the_choices(folder: Path, tmp_path: Path) -> None:
    common = ("--published", folder, "--out", tmp_path / "x.json")
    with pytest.raises(ModelError, match="tensor-core-left-out"):
        report(*common, "--study", "all")
    with pytest.raises(ModelError, match="xgboost"):
        report(*common, "--study", "estimators", "--model", "magic")
    with pytest.raises(DatasetError, match="there are: eager/linear"):
        report(*common, "--study", "estimators", "--family", "eager/ln")
    with pytest.raises(DatasetError, match="another --study"):
        report(*common, "--study", "tensor-core")


def test_its_options_need_the_tables() -> None:
    result = CliRunner().invoke(app, ["report", "operators", "--study", "estimators"])
    assert result.exit_code != 0
    assert "--published" in result.output


def test_names_that_mlflow_allows() -> None:
    row = {"study": "left-out", "left_out": "a+b", "samples": 50, "split": "val", "key": "eager/ln",
           "mape": 0.1, "median_ape": 0.2, "coverage": 0.9}  # fmt: skip
    assert metric_names(pd.DataFrame([row])) == {
        "left-out/a b/val/eager.ln/50 samples/mape": 0.1,
        "left-out/a b/val/eager.ln/50 samples/median_ape": 0.2,
        "left-out/a b/val/eager.ln/50 samples/coverage": 0.9,
    }


def test_missing_figures_are_dashes() -> None:
    wide = pd.DataFrame({"key": ["a"], "n": [3], "x": [0.1234], "w": [float("nan")]})
    assert percent(wide, ("key", "n")).to_dict("records") == [
        {"key": "a", "n": 3, "x": "12.3", "w": "–"}
    ]


def test_figures_of_groups_are_pooled_by_their_rows() -> None:
    parts = pd.DataFrame(
        {"key": "a", "dtype": ["x", "y"], "n": [30, 10], "mape": [0.1, 0.3], "coverage": [0.9, 0.5]}
    )
    (found,) = pooled(parts, ("key",)).to_dict("records")
    assert found["n"] == 40
    assert found["mape"] == pytest.approx((30 * 0.1 + 10 * 0.3) / 40)
    assert found["coverage"] == pytest.approx((30 * 0.9 + 10 * 0.5) / 40)


@pytest.mark.slow
def test_the_shipped_models_own_figures_are_printed(first: tuple[Path, str]) -> None:
    own = first[1].split("fitted to all rows of split train: dev_unseen_gpu")[1]
    assert "eager/linear" in own and "graph/" not in own


def test_errors_on_left_out_chips_by_family_and_chip() -> None:
    families = {
        "eager/ln": {"left_out": {"t4": {"mape": 0.1, "rows": 9}, "p4": {"mape": 0.2, "rows": 9}}},
        "eager/conv": {"left_out": {"t4": {"mape": 0.3, "rows": 9}}},
        "eager/bmm": {},
    }
    table = left_out_errors(families).set_index("key")
    assert table.loc["eager/ln"].to_dict() == {"t4": 0.1, "p4": 0.2}
    assert table.loc["eager/conv", "t4"] == 0.3 and np.isnan(table.loc["eager/conv", "p4"])
    assert not len(left_out_errors({"eager/bmm": {}}))
