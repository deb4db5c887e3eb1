"""Drift of a library whose new version is slower, on hand-made rows, and its repair."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli.main import app
from opcast.common.errors import DatasetError
from opcast.features.operators import op_features
from opcast.models.operators import OpModel
from opcast.models.operators.family_tables import FamilySettings
from opcast.workflows.measured.drift import read_rows, repair, staleness

FAMILY = "graph/linear"
FEW = {"rounds": 30, "max_depth": 4, "learning_rate": 0.2, "stop_rounds": 0, "compact": True}
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="module")
def measured(op_rows):
    from opcast.features.devices.catalogue import find_device

    def rows(device, n, seed, version, slower=1.0, backend=None):
        found = op_rows(FAMILY, n, seed).assign(device=device, version=version, dtype="bf16")
        if backend:
            found["backend"] = backend
        base = op_features(found, FAMILY, {device: find_device(device)}).base_s
        noise = 0.03 * np.random.default_rng(seed).normal(size=n)
        factor = np.where(found["backend"] == "vllm", slower, 1.0)
        return found.assign(latency_us=base * np.exp(noise) * factor * 1e6, source="aiconfigurator")

    return rows


@pytest.fixture
def model(measured):
    from opcast.features.devices.catalogue import find_device

    names = ("h100-sxm", "a100-sxm-80gb")
    training = pd.concat([measured(d, 700, i, "1.0") for i, d in enumerate(names)])
    settings = FamilySettings("xgboost", FEW, FEW)
    return OpModel().fit(training, {n: find_device(n) for n in names}, lambda key: settings)


def new_rows(measured, tmp_path, slower):
    parts = [measured("h100-sxm", 300, 9, "1.1", slower), measured("a100-sxm-80gb", 200, 8, "1.0")]
    path = tmp_path / "new.parquet"
    pd.concat(parts).drop(columns="key").to_parquet(path)
    return path


def test_a_slower_version_of_one_library_is_found_and_repaired(model, measured, tmp_path):
    path = new_rows(measured, tmp_path, slower=1.5)
    rows = read_rows(path)
    found = staleness(model, rows, 0.01).set_index(["backend", "version", "device"])
    assert set(found.index[found["alarm"] > 0]) == {("vllm", "1.1", "h100-sxm")}
    stale = found.loc[("vllm", "1.1", "h100-sxm")]
    assert stale["bias"] == pytest.approx(1 / 1.5 - 1, abs=0.03)
    assert stale["coverage"] < 0.1 < stale["unseen"]
    model.save(tmp_path / "model")
    out = tmp_path / "adapted"
    command = ["drift", "--data", path, "--model", tmp_path / "model", "--out", out]
    result = CliRunner().invoke(app, [str(part) for part in command], catch_exceptions=False)
    assert "1 of 6 have drifted" in result.output
    # Saving takes a while for the whole model: what it is at is said, and where it went.
    said = result.stderr.splitlines()
    assert said.index("predicting the rows") < said.index("saving the model")
    assert said[-1] == f"wrote {out}: repaired model; predict with it: --model {out}"
    adapted = OpModel.load(out)
    assert adapted.versions["vllm@h100-sxm@graph/linear"] == ["1.1"]
    other = measured("h100-sxm", 200, 77, "1.1", 1.5, backend="vllm")
    after = adapted.predict(other)
    times = other["latency_us"].to_numpy() * 1e-6
    # Before, a third.
    assert np.abs(after.latency / times - 1).mean() < 0.12
    assert ((after.lo <= times) & (times <= after.hi)).mean() > 0.85
    # Other libraries keep their predictions.
    same = measured("h100-sxm", 50, 78, "1.1", backend="sglang")
    # Saved trees round their leaves.
    assert adapted.predict(same).latency == pytest.approx(model.predict(same).latency, rel=1e-4)


def test_a_repair_that_does_not_suffice_is_not_called_one(model, measured, tmp_path):
    """Two samples tell little of a library whose operators slowed down by different factors."""
    new = measured("h100-sxm", 300, 9, "1.1", backend="vllm")
    factor = np.random.default_rng(3).choice([1.0, 3.0], len(new))
    path = tmp_path / "new.parquet"
    new.assign(latency_us=new["latency_us"] * factor).drop(columns="key").to_parquet(path)
    model.save(tmp_path / "model")
    asked = ["drift", "--data", path, "--model", tmp_path / "model", "--samples"]

    def said(samples):
        result = CliRunner().invoke(app, [*map(str, asked), samples], catch_exceptions=False)
        return " ".join(result.stdout.split())

    few = said("2")
    assert "1 of 1 have drifted" in few
    assert "below the tolerated 85%; give more than 2" in few
    assert "the model is unchanged: the repairs made the other rows worse" in few
    # As many samples as rows leave none to judge a repair on.
    assert "not repaired: it has no more rows than --samples" in said("300")


def test_what_has_not_drifted_is_left_alone(model, measured, tmp_path):
    rows = read_rows(new_rows(measured, tmp_path, slower=1.0))
    found = staleness(model, rows, 0.01)
    assert (found["alarm"] == 0).all()
    assert len(repair(model, rows, found[found["alarm"] > 0], 20, 0)) == 0
    assert not model.families[FAMILY].corrections


def test_tables_that_cannot_be_judged(tmp_path):
    with pytest.raises(DatasetError, match="no such folder"):
        read_rows(tmp_path / "none")
    pd.DataFrame({"a": [1.0]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DatasetError, match="no rows of operators with a time"):
        read_rows(tmp_path)


def test_the_shipped_model_on_a_version_that_it_did_not_learn_from():
    path = PUBLISHED / "published-kernels" / "power.parquet"
    if not path.is_file():
        pytest.skip(f"needs {path}: set OPCAST_PUBLISHED_DATA")
    from opcast.predict.locate import find_model

    model = OpModel.load(find_model("gpu-operators"), only=["graph/generation_attention"])
    rows = read_rows(path)
    rows = rows[rows["key"] == "graph/generation_attention"].head(1500).reset_index(drop=True)
    found = staleness(model, rows, 0.01)
    assert (found["alarm"] > 0).all() and found["bias"].iloc[0] > 0.2
    repaired = repair(model, rows, found, 20, 0).iloc[0]
    assert repaired["error_after"] < 0.5 * repaired["error_before"]
    assert repaired["covered_after"] >= 0.85
