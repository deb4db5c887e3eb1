"""What a version of a library that was not learned from does to intervals."""

import numpy as np
import pandas as pd
import pytest

from opcast.models.operators.family_tables import constants
from opcast.models.operators.prediction import FamilyPrediction, widen_unknown
from opcast.models.operators.rows import joined_versions, versions_of


def answer(n):
    one = np.ones(n)
    return FamilyPrediction(
        one.copy(), np.full(n, np.exp(-0.1)), np.full(n, np.exp(0.2)), one, one, one, one
    )


def test_versions_by_library():
    rows = pd.DataFrame({"backend": ["a", "a", "b", ""], "version": ["2", "1", "", "3"]})
    assert versions_of(rows) == {"a": ["1", "2"]}
    assert versions_of(rows.drop(columns="version")) == {}
    assert joined_versions({"a": ["1"]}, {"a": ["3"], "b": ["2"]}) == {"a": ["1", "3"], "b": ["2"]}


def test_unknown_versions_widen_intervals():
    rows = pd.DataFrame(
        {
            "backend": ["a", "a", "a", "b", "a", "a"],
            "version": ["1", "2", "", "9", "3", "3"],
            "device": ["x", "x", "x", "x", "x", "y"],
            "key": "graph/linear",
        }
    )
    rows = pd.concat([rows, rows.iloc[5:].assign(key="graph/moe")], ignore_index=True)
    found = answer(7)
    widen_unknown(found, rows, {"a": ["1"], "a@y@graph/linear": ["3"]})
    # Known; unknown; not named; a library without known versions; known of products on y alone.
    wide = [False, True, False, False, True, False, True]
    # Experts move more from one version to the next than products do.
    release = np.array([constants()["release"]] * 6 + [constants()["releases"]["graph/moe"]])
    lo = np.where(wide, -np.hypot(0.1, release), -0.1)
    hi = np.where(wide, np.hypot(0.2, release), 0.2)
    assert np.log(found.lo) == pytest.approx(lo)
    assert np.log(found.hi) == pytest.approx(hi)
    same = answer(7)
    widen_unknown(same, rows, {})
    assert (same.lo == np.exp(-0.1)).all()
