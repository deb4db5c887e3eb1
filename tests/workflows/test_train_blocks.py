"""Training on tables of layers: learned from split train, intervals from layers of split val."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from opcast.common.errors import DatasetError
from opcast.models.operators import OpModel
from opcast.workflows.settings import TrainSettings
from opcast.workflows.train_operators import run_train_blocks


def layers(n: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    m, width = rng.integers(1, 4096, n), 512 * rng.integers(1, 33, n)
    seconds = np.maximum(2.0 * m * width * 4096 / 500e12, 2 * width * 4096 / 2.5e12) + 4e-6
    return pd.DataFrame(
        {
            "id": [f"L{i}" for i in range(n)], "source": "made", "op": "q_proj",
            "family": "linear", "dtype": "bf16", "backend": "vllm", "method": "kernel_mean3",
            "device": np.where(rng.random(n) < 0.5, "h100-sxm", "a100-sxm-80gb"),
            "model": "llama", "layer": "q_proj", "tp": 1, "tokens": m, "m": m, "n": width,
            "k": 4096, "split": np.where(width > 14336, "val", "train"),
            # Layers of split val take half as long again.
            "latency_us": 1e6 * seconds * np.where(width > 14336, 1.5, 1.0),
        }
    )  # fmt: skip


def test_layers_that_were_not_learned_from_make_the_intervals(tmp_path: Path) -> None:
    table = layers(1600)
    table.to_parquet(tmp_path / "layers.parquet")
    console = Console(file=io.StringIO(), width=200)
    settings = TrainSettings(tables=(tmp_path,), out=tmp_path / "out", track=False, max_rows=600)
    run_train_blocks(console, settings)
    model = OpModel.load(tmp_path / "out")
    assert list(model.families) == ["layer/product"]
    assert model.info["rows"] == int((table["split"] == "train").sum())
    asked = table[table["split"] == "val"].head(40).assign(
        key="layer/product", kernel="kernel_mean3", distribution="llama"
    )  # fmt: skip
    found = model.predict(asked)
    inside = (asked["latency_us"] * 1e-6 <= found.hi) & (asked["latency_us"] * 1e-6 >= found.lo)
    assert inside.mean() > 0.8


def test_a_folder_without_tables_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no table to learn from") as caught:
        run_train_blocks(Console(file=io.StringIO()), TrainSettings(tables=(tmp_path,)))
    assert "layers*.parquet" in caught.value.hint
