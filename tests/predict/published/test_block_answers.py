"""Tables of layers, batches and new attention: every row gets a prediction or a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.features.operators.schema import BLOCKS
from opcast.models.operators import OpModel
from opcast.predict.locate import BLOCK_MODEL, OPERATOR_MODEL, find_model
from opcast.predict.published.tables import predict_published

LAYER = {
    "id": "L1", "source": "LLMServingSim", "op": "gate_proj", "family": "linear", "dtype": "fp16",
    "device": "h100-sxm", "backend": "torch", "method": "kernel_mean30",
    "model": "meta-llama/Llama-3.1-8B", "layer": "gate_proj", "tp": 1, "tokens": 4096,
    "m": 4096, "n": 14336, "k": 4096, "rows": None, "cols": None,
}  # fmt: skip
SPARSE = {
    "id": "N1", "op": "msa_generation_module", "family": "msa", "phase": "generation",
    "dtype": "bf16", "kv_dtype": "bf16", "gemm_dtype": "bf16", "device": "h200-sxm",
    "backend": "vllm", "kernel": "MiniMaxM3SparseTritonImpl", "model": "MiniMaxAI/MiniMax-M3",
    "batch": 8, "num_heads": 16, "q_len": 1, "kv_history": 8192, "compress_ratio": None,
    "num_k_heads": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def operators() -> OpModel:
    return OpModel.load(find_model(OPERATOR_MODEL), only=("xla/linear",))


@pytest.fixture(scope="module")
def blocks() -> OpModel:
    return OpModel.load(find_model(BLOCK_MODEL))


def write(path: Path, base: dict[str, object], *changes: dict[str, object]) -> Path:
    pd.DataFrame([{**base, **change} for change in changes]).to_parquet(path)
    return path


def test_the_shipped_model_has_every_family_of_blocks(blocks: OpModel) -> None:
    assert set(blocks.families) == set(BLOCKS)
    assert {"tpu-v6e", "mi308x", "h100-sxm", "rtx-pro-6000"} <= set(blocks.devices)
    assert blocks.info["metrics"], "figures of rows that it did not learn from"


def test_every_row_has_a_prediction_or_a_reason(tmp_path: Path, operators: OpModel) -> None:
    write(
        tmp_path / "queries_layers.parquet",
        LAYER,
        {},
        {"id": "L2", "device": "rtx-3090"},
        {"id": "L3", "device": "gfx1250-256cu"},
        {"id": "L4", "m": 0, "tokens": 0},
    )
    write(tmp_path / "queries_new_attention.parquet", SPARSE, {}, {"id": "N2", "device": "l40s"})
    found = predict_published(tmp_path, operators)
    frame = found.frame.set_index("id")
    assert frame.index.tolist() == ["L1", "L2", "L3", "L4", "N1", "N2"]
    assert frame["table"].tolist() == ["queries_layers"] * 4 + ["queries_new_attention"] * 2
    good = frame["reason"] == ""
    assert good.tolist() == [True, True, False, False, True, True]
    assert "gfx1250-256cu is not in the catalogue" in frame["reason"]["L3"]
    assert "size" in frame["reason"]["L4"]
    known = frame[good]
    assert (known["lo_us"] < known["latency_us"]).all()
    assert (known["latency_us"] < known["hi_us"]).all()
    # 2 · 4096² · 14336 FLOPs take 486 µs at H100's peak, and 6.8 ms at RTX 3090's 71 TFLOP/s.
    assert 486 < frame["latency_us"]["L1"] < 1100
    assert 5000 < frame["latency_us"]["L2"] < 11000
    width = known["hi_us"] / known["lo_us"]
    assert width["N2"] > 1.3 * width["N1"], "a chip that it did not learn from"
    assert not len(found.judged)


def test_measured_rows_are_judged_and_calibrated_on(
    tmp_path: Path, operators: OpModel, blocks: OpModel
) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"id": f"S{i}", "device": "b200", "batch": int(b), "kv_history": int(kv)}
        for i, (b, kv) in enumerate(
            zip(rng.integers(1, 256, 60), rng.integers(1, 65536, 60), strict=True)
        )
    ]
    asked = predict_published(write(tmp_path / "queries_new_attention.parquet", SPARSE, *rows),
                              operators, blocks=blocks).frame  # fmt: skip
    # A chip on which everything takes 1.4 times as long as predicted; forty rows say so.
    for place, row in enumerate(rows):
        row["latency_us"] = 1.4 * asked["latency_us"][place]
        row["split"] = "calib_100" if place < 40 else "test"
    path = write(tmp_path / "new_attention.parquet", SPARSE, *rows)
    plain = predict_published(path, operators, blocks=blocks)
    assert plain.judged["error"].to_numpy() == pytest.approx(1 / 1.4 - 1)
    found = predict_published(
        path, operators, calibrate=True, blocks=OpModel.load(find_model(BLOCK_MODEL))
    )
    assert found.calibrated == {"graph/sparse @ b200": 40}
    rest = found.judged[~found.judged["calibration"]]
    assert len(rest) == 20
    assert rest["error"].abs().mean() < 0.08


def test_a_missing_column_is_named(tmp_path: Path, operators: OpModel) -> None:
    path = tmp_path / "layers.parquet"
    pd.DataFrame([LAYER]).drop(columns="tp").assign(tokens="many").to_parquet(path)
    with pytest.raises(DatasetError, match="cannot be read"):
        predict_published(path, operators)
