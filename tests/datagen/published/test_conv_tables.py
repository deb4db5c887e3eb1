"""Tables of convolutions and of tuned products become rows of operators."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.datagen.published.importer import import_published
from opcast.datagen.published.packs import conv_rows, product_rows, training_convs
from opcast.features.dataset import Dataset
from opcast.models.operators import rows_of_dataset

CONV = {
    "id": "KC1", "source": "MIOpen", "device": "mi210", "direction": "bwd_weights",
    "dtype": "fp16", "layout": "NHWC", "ndim": 2, "n": 32, "c": 64, "d": 1, "h": 56, "w": 56,
    "k": 64, "kd": 1, "kh": 3, "kw": 3, "stride_d": 1, "stride_h": 1, "stride_w": 1, "pad_d": 0,
    "pad_h": 1, "pad_w": 1, "dil_d": 1, "dil_h": 1, "dil_w": 1, "groups": 1, "latency_us": 50.0,
    "solver": "S", "algorithm": "ImplicitGEMM", "split": "val",
}  # fmt: skip
GEMM = {
    "id": "KG1", "source": "aiter", "device": "mi308x", "method": "tuned_min", "dtype": "fp8",
    "dtype_detail": "e4m3", "backend": "ck", "layout": "preshuffled", "b": 1, "m": 16, "n": 4096,
    "k": 7168, "above_peak": 0, "latency_us": 20.0, "split": "train",
}  # fmt: skip


def test_what_only_tuning_tells_is_left_out() -> None:
    (row,) = conv_rows(pd.DataFrame([CONV])).to_dict("records")
    assert (row["op"], row["family"], row["channels_last"]) == ("bwd_weights", "conv", 1)
    assert "solver" not in row and "algorithm" not in row


def test_layouts_and_sources_of_products() -> None:
    rocblas = {**GEMM, "source": "rocBLAS", "device": "mi100", "layout": "tn", "dtype": "fp64"}
    rows = product_rows(pd.DataFrame([GEMM, {**GEMM, "b": 8}, rocblas]))
    assert rows["family"].tolist() == ["linear", "linear", "bmm"]
    assert rows["rotated"].tolist() == [1, 1, 0] and rows["preshuffled"].tolist() == [1, 1, 0]
    assert rows["trans_a"].tolist() == [0, 0, 1] and rows["trans_b"].tolist() == [1, 1, 0]


def test_import(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    pd.DataFrame([CONV, {**CONV, "id": "KC2", "direction": "fwd"}]).to_parquet(
        pack / "conv.parquet"
    )
    doubted = {**GEMM, "id": "KG2", "above_peak": 1, "m": 32}
    pd.DataFrame([GEMM, doubted]).to_parquet(pack / "gemm.parquet")
    assert import_published(pack, tmp_path / "out").rows == 3
    rows = rows_of_dataset(Dataset.load(tmp_path / "out"))
    assert sorted(rows["key"]) == ["tuned/conv", "tuned/conv", "tuned/linear"]
    assert set(rows["op"]) == {"bwd_weights", "fwd", "linear"}
    assert rows.loc[rows["key"] == "tuned/conv", "pad_w"].tolist() == [1, 1]


def test_a_file_of_that_name_with_other_columns(tmp_path: Path) -> None:
    pd.DataFrame([{"device": "mi210"}]).to_parquet(tmp_path / "conv.parquet")
    with pytest.raises(DatasetError, match="no table of convolutions"):
        training_convs(tmp_path / "conv.parquet")
