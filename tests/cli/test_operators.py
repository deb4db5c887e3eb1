"""Commands for operators: published tables to predictions, on tables drawn from the physics."""

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
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.models.operators import OpModel
from opcast.models.tracking.mlflow_store import connect
from opcast.predict.locate import registered
from opcast.workflows.reports.accuracy import COMMITTED

FAMILIES = ("graph/linear", "graph/generation_attention")
DEVICES = {
    "NVIDIA H100 80GB HBM3": 1.2,
    "NVIDIA A100-SXM4-80GB": 1.4,
    "NVIDIA L40S": 1.6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, op_rows: Callable[..., pd.DataFrame]) -> Path:
    """A folder as published: two families on three devices, each a factor slower than physics."""
    found = []
    for family in FAMILIES:
        for seed, (device, factor) in enumerate(DEVICES.items()):
            rows = op_rows(family, 700, seed).assign(device=device, source="aiconfigurator")
            base = op_features(rows, family, {device: find_device(device)}).base_s
            noise = np.exp(np.random.default_rng(seed).normal(0, 0.03, len(rows)))
            found.append(rows.assign(latency_us=base * 1e6 * factor * noise))
    table = pd.concat(found, ignore_index=True).drop(columns=["key", "method"])
    table["id"] = [f"T{i}" for i in range(len(table))]
    table["split"] = np.where(np.arange(len(table)) % 5 == 0, "val", "train")
    table["op"] = table["family"]
    root = tmp_path_factory.mktemp("published")
    table.to_parquet(root / "ops_tc.parquet")
    return root


@pytest.fixture(scope="module")
def dataset(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dataset") / "d"
    assert _run("data", "import", "published", folder, "--out", out).exit_code == 0
    return out


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model that never saw the L40S, and what its training printed."""
    out = tmp_path_factory.mktemp("model") / "m"
    result = _run(
        "train", "--data", dataset, "--model", "ridge", "--exclude-device", "L40S", "--out", out,
        "--no-track", "--max-rows", 1200,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result.output


@pytest.fixture(scope="module")
def model(trained: tuple[Path, str]) -> Path:
    return trained[0]


def _run(*arguments: object) -> object:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_import_tells_what_it_wrote(folder: Path, tmp_path: Path) -> None:
    first = _run("data", "import", "published", folder, "--out", tmp_path / "d")
    assert "4200 samples of 3 devices" in first.output
    again = _run("data", "import", "published", folder, "--out", tmp_path / "d")
    assert "1 shards already existed" in again.output


def test_import_knows_only_published_tables(folder: Path, tmp_path: Path) -> None:
    result = _run("data", "import", "traces", folder, "--out", tmp_path / "d")
    assert result.exit_code != 0
    assert "published" in result.output


def test_imported_operators_are_counted_by_their_families(dataset: Path) -> None:
    shown = json.loads(_run("data", "show", dataset, "--json").output)
    assert set(shown["by_family"]) == set(FAMILIES)
    assert set(shown["by_kind"]) == {"linear", "generation_attention"}


def test_training_prints_figures_of_the_excluded_device(trained: tuple[Path, str]) -> None:
    assert "l40s" in trained[1]
    assert "unseen" in trained[1]


def test_training_refuses_a_device_that_is_not_there(dataset: Path) -> None:
    with pytest.raises(Exception, match="device 't4' is not in the dataset"):
        _run("train", "--data", dataset, "--exclude-device", "t4", "--no-track")


def test_evaluate_predicts_every_row(folder: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "predicted.parquet"
    result = _run("evaluate", "--published", folder, "--model", model, "--out", out)
    assert result.exit_code == 0, result.output
    # Four fifths of the rows of two devices, which the table has as well.
    said = " ".join(result.output.split())
    assert f"note: {model} was trained on 2240 rows of split train of its dataset" in said
    assert "errors on those rows do not test it" in said
    found = pd.read_parquet(out)
    table = pd.read_parquet(folder / "ops_tc.parquet")
    assert list(found.columns) == ["id", "latency_us", "lo_us", "hi_us"]
    assert list(found["id"]) == list(table["id"])
    assert (found["lo_us"] <= found["latency_us"]).all()
    assert (found["latency_us"] <= found["hi_us"]).all()
    error = (found["latency_us"] / table["latency_us"] - 1).abs()
    seen = table["device"] != "NVIDIA L40S"
    # Known devices: the factor is learned. The unseen one is predicted like the others' mean, 1.3.
    assert error[seen].median() < 0.08
    assert 0.05 < error[~seen].median() < 0.35


def test_rows_of_families_that_were_not_learned_get_a_reason(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    """One's own table of a chip of one's own, with operators that the model has not seen."""
    chip = tmp_path / "zephyr.yaml"
    chip.write_text("name: zephyr-1\nbase: l40s\nhbm_bandwidth_gbps: 1728\n")
    known = pd.read_parquet(folder / "ops_tc.parquet").head(4)
    softmax = {"op": "softmax", "family": "softmax", "rows": 64, "cols": 128, "n_in": 1}
    other = pd.DataFrame([softmax]).assign(source="mylab", dtype="bf16", latency_us=5.0, id="S")
    table = pd.concat([known, other]).assign(device="zephyr-1").drop(columns="split")
    table.to_csv(tmp_path / "mine.csv", index=False)
    out = tmp_path / "predicted.csv"
    asked = ("evaluate", "--published", tmp_path / "mine.csv", "--model", model, "--out", out)
    result = _run(*asked, "--device", chip)
    assert result.exit_code == 0, result.output
    assert "1 rows not predicted: the model has no operators 'kernel/softmax'" in result.output
    found = pd.read_csv(out).set_index("id")
    assert np.isnan(found["latency_us"]["S"]) and "kernel/softmax" in found["reason"]["S"]
    assert (found["latency_us"][known["id"]] > 0).all()
    with pytest.raises(Exception, match="'zephyr-1' is not in the catalogue"):
        _run(*asked)


def test_calibration_rows_adapt_the_device(folder: Path, model: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(folder / "ops_tc.parquet")
    table = table[table["device"] == "NVIDIA L40S"].reset_index(drop=True)
    given = np.arange(len(table)) % 10 == 0
    queries = table.assign(
        split=np.where(given, "calib_50", "test"), latency_us=table["latency_us"].where(given)
    )
    root = tmp_path / "queries"
    root.mkdir()
    queries.to_parquet(root / "queries_ops_tc.parquet")
    errors = {}
    out = tmp_path / "predicted.parquet"
    for flags in ((), ("--calibrate",)):
        result = _run("evaluate", "--published", root, "--model", model, "--out", out, *flags)
        assert result.exit_code == 0, result.output
        found = pd.read_parquet(out)["latency_us"]
        errors[flags] = float((found / table["latency_us"] - 1).abs()[~given].median())
    assert errors[("--calibrate",)] < 0.6 * errors[()]


def test_calibrate_saves_the_adapted_model(
    folder: Path, dataset: Path, model: Path, tmp_path: Path
) -> None:
    out, plot = tmp_path / "adapted", tmp_path / "curve.png"
    result = _run(
        "calibrate", "--device", "l40s", "--data", dataset, "--model", model, "--samples", 10,
        "--out", out, "--plot", plot,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "active" in result.output
    assert plot.stat().st_size > 1000
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    _run("evaluate", "--published", folder, "--model", model, "--out", before)
    _run("evaluate", "--published", folder, "--model", out, "--out", after)
    table = pd.read_parquet(folder / "ops_tc.parquet")
    own = table["device"] == "NVIDIA L40S"
    error = [
        float((pd.read_parquet(p)["latency_us"] / table["latency_us"] - 1).abs()[own].median())
        for p in (before, after)
    ]
    assert error[1] < 0.6 * error[0]


def test_operators_in_another_unit_are_not_learned_from(
    dataset: Path, model: Path, tmp_path: Path
) -> None:
    """Milliseconds in a column of microseconds agree with each other: no left-out row says so."""
    data, out = Dataset.load(dataset), tmp_path / "adapted"
    frame = data.frame.assign(latency_us_p50=data.frame["latency_us_p50"] * 1e-3)
    Dataset(frame, data.runs).save(tmp_path / "ms")
    words = ("calibrate", "--device", "l40s", "--model", model, "--samples", 10, "--out", out)
    result = CliRunner().invoke(app, [str(w) for w in (*words, "--data", tmp_path / "ms")])
    assert result.exit_code != 0 and not out.exists()
    assert "times as short as predicted" in result.output


def test_an_operator_model_predicts_no_program(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "p.mlir"
    program.write_text("func.func @main() { return }")
    with pytest.raises(Exception, match="library operators"):
        _run("predict", program, "--model", model)


def test_collectives_name_a_platform_instead_of_a_device(model: Path, tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {
            "id": ["C1", "C2"], "source": "vidur", "op": "all_reduce", "platform": "a100_dgx",
            "bytes": [1 << 16, 1 << 24], "world_size": 4, "devices_per_node": 4,
            "latency_us": [20.0, 300.0], "split": "train",
        }
    )  # fmt: skip
    rows.to_csv(tmp_path / "collectives.csv.gz", index=False)
    out = tmp_path / "p.parquet"
    result = _run("evaluate", "--published", tmp_path, "--model", model, "--out", out)
    assert "a100_dgx" in result.output
    found = pd.read_parquet(out)["latency_us"]
    assert 5 < found[0] < found[1] < 3000


@pytest.mark.parametrize("column", ["op", "family", "dtype", "device"])
def test_a_missing_column_is_named(column: str, folder: Path, model: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(folder / "ops_tc.parquet").head(5).drop(columns=column)
    table.to_parquet(tmp_path / "queries_ops_tc.parquet")
    with pytest.raises(Exception, match=f"column '{column}'"):
        _run("evaluate", "--published", tmp_path, "--model", model, "--out", tmp_path / "x.parquet")


def test_a_folder_without_tables(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such folder"):
        _run(
            "evaluate",
            "--published",
            tmp_path / "no",
            "--model",
            model,
            "--out",
            tmp_path / "x.csv",
        )
    with pytest.raises(Exception, match="no table to predict"):
        _run("evaluate", "--published", tmp_path, "--model", model, "--out", tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (("--split", "unseen_family"), "--split does not apply to training on operators"),
        (("--model", "gpu-xla", "--final"), "--final does not apply to training gpu-xla"),
        (("--model", "gpu-xla", "--threads", 1, "--max-rows", 9), "--threads, --max-rows do not"),
        (("--model", "gpu-xla", "--split", "random"), "--split does not apply"),
    ],
)
def test_training_refuses_what_it_would_not_read(
    dataset: Path, tmp_path: Path, options: tuple[object, ...], option: str
) -> None:
    result = _run("train", "--data", dataset, "--out", tmp_path / "m", *options)
    assert result.exit_code == 2
    assert option in result.output
    assert not (tmp_path / "m").exists()


@pytest.fixture(scope="module")
def small(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one family on two devices, which a model learns in seconds."""
    whole = Dataset.load(dataset)
    own = whole.frame[whole.frame["family"] == "op:graph/linear"]
    own = own[own["device"] != "l40s"].groupby("device").head(135).reset_index(drop=True)
    folder = tmp_path_factory.mktemp("small") / "d"
    Dataset(own, whole.runs).save(folder)
    return folder


def test_a_trained_model_of_operators_is_registered_here_and_in_mlflow(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "home"))
    monkeypatch.setenv("OPCAST_MLRUNS", str(tmp_path / "mlruns"))
    result = _run("train", "--data", small, "--model", "ridge", "--register", "mine")
    assert result.exit_code == 0, result.output
    folder = registered() / "mine"
    assert f"wrote {folder}: model" in result.output
    found = _run("predict", "--op", "linear m=64 n=512 k=512 dtype=bf16 backend=vllm",
                 "--device", "h100-sxm", "--model", "mine", "--json")  # fmt: skip
    assert json.loads(found.output)["family"] == "graph/linear"
    with pytest.raises(ModelError, match=r"no operators 'kernel/linear' .*--op 'graph/linear …'"):
        _run("predict", "--op", "linear m=64 n=512 k=512 dtype=fp16", "--device", "h100-sxm",
             "--model", "mine")  # fmt: skip
    client = connect(tmp_path / "mlruns").MlflowClient()
    (version,) = client.search_model_versions("name='mine'")
    run = client.get_run(version.run_id)
    assert run.info.run_name == "operators-ridge"
    # Beside runs of kernels: the same leading metrics, by the same names, and all parameters.
    assert {"median_ape", "mape", "bias", "coverage", "spearman"} <= set(run.data.metrics)
    assert run.data.params["model"] == "ridge" and run.data.params["data"] == small.name
    assert run.data.params["split"] == "val" and run.data.params["max_rows"] == "1000000"
    shown = _run("compare").output
    assert "operators-ridge" in shown and "nan" not in shown
    _run("train", "--data", small, "--model", "ridge", "--max-rows", 300,
         "--out", tmp_path / "m")  # fmt: skip
    told = _run("compare", "operators-ridge", "operators-ridge-2").output.splitlines()
    lines = {line.split()[0]: line.split()[1:] for line in told if line.split()}
    assert lines["max_rows"] == ["1000000", "300"] and "seed" not in lines
    assert len(lines["median_ape"]) == 2
    assert "name two runs" in _run("compare", "operators-ridge").output
    with pytest.raises(ModelError, match=r"no run 'mine' .*operators-ridge"):
        _run("compare", "mine", "operators-ridge")


def test_training_on_rows_that_leave_none_to_judge_says_so(small: Path, tmp_path: Path) -> None:
    """No empty tables: what the split would have to be is said instead."""
    data = Dataset.load(small)
    Dataset(data.frame.assign(split="train"), data.runs).save(tmp_path / "d")
    result = _run("train", "--data", tmp_path / "d", "--model", "ridge", "--max-rows", 300,
                  "--out", tmp_path / "m", "--no-track")  # fmt: skip
    assert "no rows to test the model on" in result.output and "such as test" in result.output
    assert "the same by family" not in result.output


def test_a_model_of_operators_is_always_saved(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run("train", "--data", small, "--model", "ridge", "--max-rows", 300, "--no-track")
    assert "wrote models-out/ridge: model" in result.output
    assert list(OpModel.load(tmp_path / "models-out" / "ridge").families) == ["graph/linear"]


def test_the_level_of_the_rows_says_who_learns_from_them(dataset: Path, tmp_path: Path) -> None:
    whole = Dataset.load(dataset)
    assert whole.of_operators
    renamed = Dataset(whole.frame.assign(source="mine"), whole.runs)
    assert renamed.of_operators  # whatever the source is called
    kernels = Dataset.load(COMMITTED)
    assert not kernels.of_operators
    both = Dataset(pd.concat([whole.frame, kernels.frame.head(7)]), whole.runs)
    with pytest.raises(DatasetError, match="4200 rows are of library operators, 7 of kernels"):
        _ = both.of_operators
    # Tables imported by earlier versions have the level of programs of one op.
    Dataset(whole.frame.assign(level="op"), whole.runs).save(tmp_path / "old")
    assert Dataset.load(tmp_path / "old").of_operators
