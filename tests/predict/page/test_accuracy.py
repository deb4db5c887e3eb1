"""Pages of tracked runs: what runs keep, the figures, the drawing."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import ModelError
from opcast.models.tracking import mlflow_store as tracked
from opcast.models.tracking.mlflow_store import RunLog, capped, log_run, parent_run, tidy
from opcast.models.tracking.tracked_runs import read_runs
from opcast.predict.page.accuracy import accuracy_page, run_data

from ..pages import Watched, colours, running_browser

pytest.importorskip("mlflow", reason="MLflow is not installed")


def judged(rows=400, error=0.1, kind="gemm"):
    """Measured from 10 µs to 10 ms, predictions off by ``error`` up and down in turn."""
    measured = np.geomspace(10.0, 10_000.0, rows)
    predicted = measured * np.where(np.arange(rows) % 2, 1 + error, 1 - error)
    return pd.DataFrame({
        "kind": kind, "device": np.where(np.arange(rows) % 4, "h100-sxm", "l4"),
        "measured_us": measured, "predicted_us": predicted, "lo_us": predicted * 0.95,
        "hi_us": predicted * 1.2, "in_domain": np.arange(rows) % 10 > 0,
    })  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a run, and a parent with two runs below it."""
    root = tmp_path_factory.mktemp("mlruns")
    rows = pd.concat([judged(), judged(100, 0.3, "<b>conv</b>")], ignore_index=True)
    metrics = pd.DataFrame({"group": ["all", "kind=gemm"], "noise_median_ape": [0.02, 0.01]})
    log_run(
        RunLog(
            "xgboost-random", {"model": "xgboost", "split": "random"}, {}, {"metrics": metrics},
            predictions=tidy(rows, "random"),
        ),
        root=root,
    )  # fmt: skip
    with parent_run("operators-report", root) as parent:
        for name in ("forest", "ridge"):
            below = tidy(judged(50).rename(columns={"kind": "key"}), "test", "op")
            parent.log_child(RunLog(name, {"model": name}, {}, predictions=below))
    log_run(RunLog("bare", {}, {}), root=root)
    return root


def test_runs_are_found_by_id_name_and_experiment(store):
    (own,) = read_runs("xgboost-random", root=store)
    assert own.params == {"model": "xgboost", "split": "random"}
    assert own.noise == {"all": 0.02, "kind=gemm": 0.01}
    assert len(own.predictions) == own.rows == 500
    assert set(own.predictions["split"]) == {"random"}
    assert read_runs(own.run_id, root=store)[0].name == "xgboost-random"
    assert read_runs(own.run_id[:8], root=store)[0].run_id == own.run_id
    assert {r.name for r in read_runs("operators-report", root=store)} == {"forest", "ridge"}
    assert len(read_runs("opcast", root=store)) == 3


def test_unknown_and_empty_runs_are_refused(store):
    with pytest.raises(ModelError, match="xgboost-random"):
        read_runs("nothing", root=store)
    with pytest.raises(ModelError, match="no predictions"):
        read_runs("bare", root=store)


def test_a_cap_keeps_a_fixed_draw(monkeypatch):
    monkeypatch.setattr(tracked, "MOST_ROWS", 100)
    rows = tidy(judged(), "random")
    kept = capped(rows)
    assert len(kept) == 100
    pd.testing.assert_frame_equal(kept, capped(rows))
    assert kept["measured_us"].is_monotonic_increasing


def test_figures_are_those_of_the_rows(store):
    (run,) = read_runs("xgboost-random", root=store)
    level = run_data(run)["levels"]["kernel"]
    by_kind = {group["name"]: group for group in level["kind"]}
    gemm, conv = by_kind["gemm"], by_kind["<b>conv</b>"]
    assert gemm["n"] == 400 and conv["n"] == 100
    assert gemm["median_ape"] == pytest.approx(0.1, rel=1e-3)
    assert conv["median_ape"] == pytest.approx(0.3, rel=1e-3)
    # 1 / 1.1 and 1 / 0.9 of a prediction: only the second is inside 0.95 … 1.2.
    assert gemm["coverage"] == pytest.approx(0.5)
    assert gemm["noise"] == 0.01 and conv["noise"] is None
    assert {group["name"]: group["n"] for group in level["device"]} == {"h100-sxm": 375, "l4": 125}
    assert len(level["points"]["measured"]) == 500


def test_page_embeds_all_runs(store):
    page = accuracy_page("opcast", root=store)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == ["ridge", "forest", "xgboost-random"]
    assert "<b>conv" not in page


def test_page_draws_and_switches_runs(store, tmp_path):
    path = tmp_path / "accuracy.html"
    path.write_text(accuracy_page("opcast", root=store))
    with running_browser() as browser:
        watched = Watched(browser, path)
        tab = watched.tab
        tab.get_by_label("Run", exact=True).select_option("2")
        assert tab.locator("#overview .value").first.inner_text() == "10.0\u00a0%"
        assert "2.0\u00a0%" in tab.locator("#overview .more").first.inner_text()
        assert "<b>conv</b>" in tab.locator("#figures tbody").inner_text()
        tab.get_by_role("button", name="Device", exact=True).click()
        assert "l4" in tab.locator("#figures tbody").inner_text()
        watched.settle()
        assert colours(watched.pixels("#parity canvas")) > 20
        assert colours(watched.pixels("#errors canvas")) > 8
        tab.locator("#runs tbody button").first.click()
        assert tab.locator("#overview .label").nth(4).inner_text() == "Rows"
        assert tab.locator("#overview .value").nth(4).inner_text() == "50"
        watched.close()
