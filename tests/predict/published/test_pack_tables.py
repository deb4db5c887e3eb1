"""Tables of products and collectives under XLA: every row gets a prediction or a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.models.operators import OpModel
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.published.tables import predict_published

MATMUL = {
    "device": "h100-sxm",
    "dtype_lhs": "bf16",
    "dtype_rhs": "bf16",
    "b": 1,
    "m": 4096,
    "n": 4096,
    "k": 4096,
    "latency_us": 180.0,
    "split": "val",
    "suspect": None,
}
COLLECTIVE = {
    "device": "gb200",
    "kind": "all-reduce",
    "pattern": None,
    "n_devices": 8,
    "n_groups": 8,
    "total_devices": 64,
    "dtype": "f32",
    "bytes": 2**20,
    "latency_us": 31.0,
    "split": "val",
    "current": 1,
}


@pytest.fixture(scope="module")
def model() -> OpModel:
    return OpModel.load(find_model(OPERATOR_MODEL), only=("xla/linear", "xla/bmm"))


def table(path: Path, base: dict[str, object], *changes: dict[str, object]) -> Path:
    pd.DataFrame([{**base, **change} for change in changes]).to_csv(path, index=False)
    return path


def test_products_are_predicted_and_suspect_rows_are_not_judged(
    tmp_path: Path, model: OpModel
) -> None:
    path = table(tmp_path / "matmul.csv.gz", MATMUL, {}, {"suspect": "group"}, {"device": "b200"})
    found = predict_published(path, model)
    assert found.frame["id"].tolist() == ["0", "1", "2"]
    # 2 · 4096³ FLOPs at 989 TFLOP/s take 139 µs on H100, at 2250 TFLOP/s 61 µs on B200.
    assert 139 < found.frame["latency_us"][0] < 230
    assert 61 < found.frame["latency_us"][2] < 139
    assert (found.frame["lo_us"] <= found.frame["latency_us"]).all()
    assert (found.frame["hi_us"] >= found.frame["latency_us"]).all()
    assert found.judged["device"].tolist() == ["h100-sxm", "b200"]
    assert found.judged["family"].tolist() == ["xla bf16", "xla bf16"]
    assert any("1 rows marked as suspect" in note for note in found.notes)


def test_queries_need_no_latencies(tmp_path: Path, model: OpModel) -> None:
    table(tmp_path / "queries_matmul.csv.gz", MATMUL, {}, {"b": 4})
    frame = pd.read_csv(tmp_path / "queries_matmul.csv.gz").drop(
        columns=["latency_us", "split", "suspect"]
    )
    frame.to_csv(tmp_path / "queries_matmul.csv.gz", index=False)
    found = predict_published(tmp_path, model)
    one, four = found.frame["latency_us"]
    assert len(found.judged) == 0 and 3 * one < four < 5 * one


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "gfx1250-96cu"}, "gfx1250-96cu is not in the catalogue"),
        ({"dtype_lhs": "s8", "dtype_rhs": "s8"}, "no dtype s8"),
        ({"dtype_lhs": "s8"}, "no dtype s8 x bf16"),
        ({"m": 0}, "not a positive number"),
    ],
)
def test_a_product_that_cannot_be_asked_says_why(
    tmp_path: Path, model: OpModel, change: dict[str, object], reason: str
) -> None:
    path = table(tmp_path / "matmul.csv.gz", MATMUL, {}, change)
    found = predict_published(path, model)
    assert reason in found.frame["reason"][1] and np.isnan(found.frame["latency_us"][1])
    assert found.frame["reason"][0] == "" and len(found.judged) == 1


def test_kernel_tables_are_answered_for_xla_alone(tmp_path: Path, model: OpModel) -> None:
    base = {k: v for k, v in MATMUL.items() if not k.startswith(("dtype", "suspect"))}
    more = {"method": "kernel_median", "dtype": "bf16", "dtype_detail": "bf16xbf16"}
    rows = [
        {**base, **more, "id": "KG1", "source": "xla"},
        {**base, **more, "id": "KG2", "source": "pipeweave"},
    ]
    pd.DataFrame(rows).assign(above_peak=0).to_parquet(tmp_path / "gemm.parquet")
    found = predict_published(tmp_path / "gemm.parquet", model)
    assert found.frame["id"].tolist() == ["KG1", "KG2"]
    assert found.frame["reason"][0] == "" and found.judged["id"].tolist() == ["KG1"]
    assert found.frame["reason"][1] != "" and np.isnan(found.frame["latency_us"][1])


def test_collectives_know_their_groups(tmp_path: Path, model: OpModel) -> None:
    path = table(
        tmp_path / "collectives.csv.gz",
        COLLECTIVE,
        {},
        {"n_devices": 64, "n_groups": 1},
        {"n_devices": 1},
        {"current": 0},
        {"kind": "collective-permute", "pattern": "ring"},
    )
    found = predict_published(path, model)
    latency = found.frame["latency_us"]
    assert found.frame["reason"][2] == "a single device sends nothing"
    assert latency[1] > 1.5 * latency[0] and latency[4] > 0
    assert len(found.judged) == 3
    assert set(found.judged["family"]) == {
        "all-reduce, from 1 MiB on",
        "collective-permute, from 1 MiB on",
    }


def test_measurements_of_ones_own_are_judged_from_csv(tmp_path: Path, model: OpModel) -> None:
    row = {"source": "xla", "device": "h100-sxm", "op": "linear", "family": "linear"}
    row |= {"dtype": "bf16", "b": 1, "m": 2048, "n": 4096, "k": 4096, "latency_us": 110.0}
    found = predict_published(table(tmp_path / "mine.csv", row, {}, {"latency_us": None}), model)
    # Rows are numbered where the table does not.
    assert list(found.frame["id"]) == ["0", "1"] and list(found.judged["id"]) == ["0"]
    assert found.judged["error"].abs().max() < 0.5


def test_a_table_without_its_columns_is_refused(tmp_path: Path, model: OpModel) -> None:
    pd.DataFrame({"x": [1]}).to_csv(tmp_path / "matmul.csv.gz", index=False)
    with pytest.raises(DatasetError, match="no table to predict"):
        predict_published(tmp_path / "matmul.csv.gz", model)
    with pytest.raises(DatasetError, match="no such folder or table"):
        predict_published(tmp_path / "none.csv.gz", model)


@pytest.fixture(scope="module")
def tuned() -> OpModel:
    return OpModel.load(
        find_model(OPERATOR_MODEL), only=("tuned/conv", "tuned/linear", "profiled/linear")
    )


def test_convolutions_are_answered_without_latencies(tmp_path: Path, tuned: OpModel) -> None:
    sizes = dict.fromkeys(("d", "kd", "stride_d", "stride_h", "stride_w", "groups"), 1)
    sizes |= dict.fromkeys(("dil_d", "dil_h", "dil_w"), 1) | {"pad_d": 0, "pad_h": 1, "pad_w": 1}
    base = {
        **sizes,
        "direction": "fwd",
        "dtype": "fp16",
        "layout": "NCHW",
        "ndim": 2,
        "n": 128,
        "c": 256,
        "h": 56,
        "w": 56,
        "k": 256,
        "kh": 3,
        "kw": 3,
    }
    changes = (
        {"device": "mi210"},
        {"device": "mi300x"},
        {"device": "mi60", "layout": "CHWN"},
        {"device": "mi60", "direction": "sideways"},
        {"device": "mi60", "h": 0},
    )
    rows = pd.DataFrame([{**base, **change} for change in changes])
    rows.assign(id=[f"KC{i}" for i in range(5)]).to_parquet(tmp_path / "queries_conv.parquet")
    found = predict_published(tmp_path, tuned)
    latency = found.frame["latency_us"]
    # 0.47 TFLOP at 181 and at 1307 TFLOP/s.
    assert 2.6e3 < latency[0] < 15e3 and 0.36e3 < latency[1] < latency[0]
    assert "layout is not one of" in found.frame["reason"][2] and np.isnan(latency[2])
    assert "direction is not one of" in found.frame["reason"][3]
    assert "not a positive number" in found.frame["reason"][4]


def test_products_of_other_libraries_are_answered(tmp_path: Path, tuned: OpModel) -> None:
    base = {
        "method": "tuned_min",
        "dtype_detail": "",
        "layout": "nt",
        "b": 1,
        "m": 4096,
        "n": 4096,
        "k": 4096,
    }
    changes = (
        {"source": "aiter", "device": "mi355x", "dtype": "mxfp4"},
        {"source": "aiter", "device": "mi355x", "dtype": "fp8_block"},
        {"source": "pipeweave", "device": "h20", "dtype": "fp8"},
    )
    rows = pd.DataFrame([{**base, **change} for change in changes])
    rows.to_parquet(tmp_path / "queries_gemm.parquet")
    latency = predict_published(tmp_path, tuned).frame["latency_us"]
    # 0.137 TFLOP at 10066, 5033 and 296 TFLOP/s.
    assert 13.7 < latency[0] < latency[1] < 140 and 464 < latency[2] < 900
