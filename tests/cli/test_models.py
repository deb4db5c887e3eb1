"""Training, tuning and explaining as a user calls them, on a small part of the shipped dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from opcast.cli import app
from opcast.common.errors import ModelError, ProgramError
from opcast.features.dataset import Dataset
from opcast.models.cost_model import CostModel
from opcast.models.tracking.tracked_runs import compare, runs
from opcast.workflows.reports.accuracy import COMMITTED

DEVICE = "cpu-amd-epyc-2c"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = Dataset.load(COMMITTED)
    frame = dataset.frame[dataset.frame["level"] != "program"]
    wanted = frame["family"].isin(["mlp", "dlrm", "gnn", "lstm", "vit"])
    part = frame[wanted].groupby("family").head(90)
    folder = tmp_path_factory.mktemp("data") / "small"
    Dataset(part.reset_index(drop=True), dataset.runs).save(folder)
    return folder


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "mlp.mlir"
    settings = ["--set", "batch=8", "--set", "mode=train"]
    assert call("zoo", "export", "mlp", *settings, "--out", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "ridge"
    done = call("train", "--data", data, "--model", "ridge", "--out", folder, "--no-track")
    assert done.exit_code == 0, done.output
    return folder


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def test_neighbour_table_is_small(model: Path) -> None:
    table = CostModel.load(model).neighbours
    assert table is not None and len(table) > 100
    assert (model / "neighbours.npz").stat().st_size < 1_000_000


def test_explain_prints_a_screen(program: Path, model: Path) -> None:
    done = call("explain", program, "--device", DEVICE, "--model", model, "--top", "2")
    assert done.exit_code == 0, done.output
    for text in ("roofline", "floor", "learned factor by group", "op mix", "together",
                 "training domain", "nearest kernels of the", "predicted unseen"):  # fmt: skip
        assert text in done.output


def test_explain_gives_json_that_adds_up(program: Path, model: Path) -> None:
    done = call("explain", program, "--device", DEVICE, "--model", model, "--json")
    found = json.loads(done.output)
    assert found["device"] == DEVICE
    assert [k["share"] for k in found["kernels"]] == sorted(
        (k["share"] for k in found["kernels"]), reverse=True
    )
    for k in found["kernels"]:
        parts = k["baseline"] + sum(c["log_ratio"] for c in k["contributions"])
        assert parts == pytest.approx(k["log_ratio"], abs=1e-4)
        assert k["latency_us"] == pytest.approx((k["roofline_us"] + k["floor_us"]) * k["factor"])
        assert len(k["neighbours"]) == 3


def test_explain_takes_a_kernel_by_name(program: Path) -> None:
    every = json.loads(call("explain", program, "--device", DEVICE, "--json").output)
    name = every["kernels"][1]["name"]
    own = json.loads(
        call("explain", program, "--device", DEVICE, "--json", "--kernel", name).output
    )
    assert [k["name"] for k in own["kernels"]] == [name]
    assert own["kernels"][0]["contributions"] == every["kernels"][1]["contributions"]
    done = call("explain", program, "--device", DEVICE, "--kernel", "no_such_kernel")
    assert isinstance(done.exception, ProgramError)
    assert "no_such_kernel" in str(done.exception) and name in str(done.exception)


def test_tune_searches_and_train_takes_what_it_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPCAST_MLRUNS", str(tmp_path / "mlruns"))
    file, study = tmp_path / "ridge.json", tmp_path / "study.db"
    common = ("tune", "--data", data, "--model", "ridge", "--folds", "2", "--study", study)
    done = call(*common, "--trials", "2", "--out", file)
    assert done.exit_code == 0, done.output
    assert "not used for choosing" in done.output.replace("\n", " ")
    assert json.loads(file.read_text())["trials"] == 2
    again = call(*common, "--trials", "3", "--out", file, "--no-track")
    assert again.exit_code == 0, again.output
    assert json.loads(file.read_text())["trials"] == 3

    tracked = runs()
    parents = tracked[tracked["tags.mlflow.runName"] == "tune-ridge-unseen_family"]
    assert len(parents) == 1  # the second search was not tracked
    children = tracked[tracked["tags.mlflow.parentRunId"] == parents["run_id"].iloc[0]]
    assert set(children["tags.mlflow.runName"]) == {"trial-0", "trial-1"}
    assert children["metrics.error"].notna().all() and children["params.alpha"].notna().all()
    assert list(compare()["run"]) == ["tune-ridge-unseen_family"]

    params = tmp_path / "own.json"
    params.write_text(json.dumps({"alpha": 0.25}))
    out = tmp_path / "model"
    done = call("train", "--data", data, "--model", "ridge", "--params", params, "--final",
                "--out", out, "--no-track")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads((out / "estimator" / "manifest.json").read_text())["params"]["alpha"] == 0.25


def test_params_for_another_model_are_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"model": "forest", "params": {}}))
    done = call("train", "--data", data, "--model", "ridge", "--params", file)
    assert isinstance(done.exception, ModelError) and "forest" in str(done.exception)


def test_training_an_ensemble_says_what_was_kept(data: Path, tmp_path: Path) -> None:
    params = tmp_path / "p.json"
    params.write_text(json.dumps({"members": ["ridge", "roofline"], "shrinkage": 1e9}))
    out = tmp_path / "model"
    done = call("train", "--data", data, "--model", "ensemble", "--params", params, "--out", out,
                "--final", "--no-track")  # fmt: skip
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    kept = CostModel.load(out)
    choice = kept.info["ensemble_choice"]
    assert choice["winner"] == kept.name
    verdict = "kept the ensemble" if kept.name == "ensemble" else "saves its member"
    assert verdict in text
    assert "cross-validated on training rows, for the choice" in text
    assert "test part, not used for the choice" in text
