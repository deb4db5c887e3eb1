"""Rows of operators as columns: what tables of any type, and single operators, turn into."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.features.operators.columns import OpRows
from opcast.features.operators.query import parse_op

TEXT = "linear m={} n=4096 k=4096 dtype=bf16 backend=trtllm kernel=torch_flow"


def table() -> pd.DataFrame:
    columns = {"id": ["A", "B", "C"], "m": [1, 2, 3], "backend": ["vllm", None, "sglang"]}
    return pd.DataFrame(columns).assign(dtype=["bf16", "fp8", "bf16"])


def test_missing_texts_and_columns_are_empty_and_missing_numbers_nan():
    rows = OpRows.of(table())
    assert rows.texts("backend").tolist() == ["vllm", "", "sglang"]
    assert rows.texts("kernel").tolist() == ["", "", ""]
    assert rows.numbers("m").tolist() == [1.0, 2.0, 3.0] and np.isnan(rows.numbers("k")).all()
    assert "m" in rows and "kernel" not in rows and len(rows) == 3


@pytest.mark.parametrize("dtype", ["str", "object", "category"])
def test_texts_of_any_type_are_alike(dtype):
    rows = OpRows.of(table().astype({"backend": dtype}))
    assert rows.where("backend", lambda name: name == "").tolist() == [False, True, False]


def test_combinations_are_numbered_as_they_come():
    rows = OpRows.of(pd.DataFrame({"a": ["x", "y", "x", "x"], "b": ["1", "1", "1", "2"]}))
    code, found = rows.combined(("a", "b"))
    assert code.tolist() == [0, 1, 0, 2] and found == [("x", "1"), ("y", "1"), ("x", "2")]


def test_taken_rows_keep_texts_numbers_and_labels():
    rows = OpRows.of(table())
    # A column that was read before, and one that was not.
    assert rows.texts("dtype").tolist() == ["bf16", "fp8", "bf16"]
    part = rows.take(np.array([2, 0])).take(np.array([0]))
    assert part.texts("dtype").tolist() == ["bf16"] and part.texts("backend").tolist() == ["sglang"]
    assert part.numbers("m").tolist() == [3.0] and part.label(0) == "C"
    changed = part.with_texts({"dtype": np.array(["fp8"], object)})
    assert changed.texts("dtype").tolist() == ["fp8"] and part.texts("dtype").tolist() == ["bf16"]
    assert part.frame().to_dict("list") == {
        "dtype": ["bf16"], "id": ["C"], "m": [3], "backend": ["sglang"],
    }  # fmt: skip


def test_what_is_no_number_is_refused():
    with pytest.raises(DatasetError, match="'m' contains something that is not a number"):
        OpRows.of(pd.DataFrame({"m": ["many"]})).numbers("m")


def test_operators_alone_have_the_features_that_they_have_together():
    """Products are compared by parts of 128: 300 fill two and some."""
    devices = {name: find_device(name) for name in ("h100-sxm", "l4", "mi300x", "b200")}
    sizes = np.random.default_rng(0).integers(1, 20_000, 300)
    parsed = [
        {**parse_op(TEXT.format(size)), "device": list(devices)[place % 4]}
        for place, size in enumerate(sizes.tolist())
    ]
    together = op_features(pd.DataFrame(parsed), "graph/linear", devices)
    for place in (0, 1, 2, 3, 127, 128, 255, 256, 299):
        alone = op_features(OpRows.of_one(parsed[place]), "graph/linear", devices)
        np.testing.assert_array_max_ulp(alone.X[0], together.X[place], maxulp=2)
        np.testing.assert_allclose(alone.base_s[0], together.base_s[place], rtol=1e-14)
