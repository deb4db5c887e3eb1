"""Figures of manifests, by hand."""

import pandas as pd
import pytest

from opcast.workflows.model_cards import beside, figures

METRICS = [
    {
        "key": "graph/moe",
        "device": "a",
        "split": "val",
        "n": 30,
        "mape": 0.1,
        "median_ape": 0.05,
        "coverage": 0.8,
        "width_ratio": 1.5,
    },
    {
        "key": "graph/moe",
        "device": "a",
        "split": "val",
        "n": 10,
        "mape": 0.3,
        "median_ape": 0.2,
        "coverage": 1.0,
        "width_ratio": 2.5,
    },
]


def manifest(left_out: float, metrics: list[dict[str, object]]) -> dict[str, object]:
    chip = {"mape": left_out, "median": left_out / 2, "rows": 40.0, "coverage": 0.9, "width": 3.0}
    return {"families": {"graph/moe": {"left_out": {"a+b": chip}}}, "metrics": metrics}


def test_figures_of_operators_are_means_over_formats():
    table = figures(manifest(0.2, METRICS)).set_index("judged on")
    assert table.loc["graph/moe, a+b left out"].tolist() == [40, 10.0, 20.0, 90.0, 3.0]
    own = table.loc["graph/moe, a, split val"]
    assert own["rows"] == 40 and own["mean"] == pytest.approx(15.0) and pd.isna(own["median"])
    assert own["inside"] == pytest.approx(85.0) and pd.isna(own["width"])


def test_families_that_were_joined_bring_their_figures():
    first = manifest(0.2, METRICS)
    first["added"] = [{"metrics": [{**METRICS[0], "key": "graph/bmm"}]}, {"families": []}]
    table = figures(first).set_index("judged on")
    assert table.loc["graph/bmm, a, split val", "mean"] == 10.0
    assert table.loc["graph/moe, a, split val", "mean"] == pytest.approx(15.0)


def test_a_model_without_figures_has_an_empty_table():
    none = figures({"families": {}, "metrics": {}})
    assert len(none) == 0 and len(beside(figures(manifest(0.2, [])), none)) == 1


def test_a_model_beside_another_keeps_the_rows_of_both():
    both = beside(figures(manifest(0.2, METRICS)), figures(manifest(0.3, [])))
    both = both.set_index("judged on")
    assert both.loc["graph/moe, a+b left out", ["mean", "mean, was"]].tolist() == [20.0, 30.0]
    assert pd.isna(both.loc["graph/moe, a, split val", "mean, was"])
