from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from opcast.workflows.judging import WIDTHS, left_out_rows, parts_of


def test_a_bound_that_is_the_error_itself_covers_it() -> None:
    known = pd.DataFrame({"measured": [2.0, 2.0, 2.0], "id": ["a", "b", "c"]})
    # Measured over predicted is 1.1 and 1.2, and at most 1.1 in the interval.
    low, one, two = np.log([0.9, 1.1, 1.2])
    found = {"chip": np.array([[one, low, one], [two, low, one], [np.nan, low, one]])}
    rows = left_out_rows(known, found | {"fit": np.array([[one, np.nan, np.nan]] * 3)})
    assert rows["id"].tolist() == ["a", "b", "a", "b", "c"]
    assert rows["predicted"].to_numpy()[:2] == pytest.approx([2.0 / 1.1, 2.0 / 1.2])
    figures = rows.groupby("left_out", observed=False).agg(**WIDTHS)
    assert figures.loc["chip", ["rows", "coverage"]].tolist() == [2.0, 0.5]
    # 1 - 1/1.1 and 1 - 1/1.2.
    assert figures.loc["chip", "mape"] == pytest.approx((1 / 11 + 1 / 6) / 2)
    assert figures.loc["chip", "width"] == pytest.approx(1.1 / 0.9)
    assert figures.loc["fit", "rows"] == 3 and np.isnan(figures.loc["fit", "coverage"])


def test_what_all_rows_share_is_not_held_out() -> None:
    keys = {"chip": np.array(["x", "x", "y"]), "mode": np.array(["train"] * 3)}
    parts = [(part.name, part.value, part.learn.tolist()) for part in parts_of(keys)]
    assert parts == [("chip", "x", [False, False, True]), ("chip", "y", [True, True, False])]
