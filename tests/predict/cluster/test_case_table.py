"""What tables of measured cases say in words."""

from __future__ import annotations

import pandas as pd
import pytest

from opcast.predict.cluster.case_table import Cells, noted_share, noted_sizes, read_rows


@pytest.mark.parametrize(
    ("note", "sizes"),
    [
        ("", {}),
        ("partial rope; biases", {}),
        (
            "first layer dense ff 18432; 2 shared experts",
            {"dense_layers": 1, "dense_ff": 18432, "shared_experts": 2},
        ),
        ("sliding window 4096 (v0.1)", {"window": 4096}),
        ("3 of 4 layers chunked attention 8192", {"window": 8192}),
        ("as V3 with sparse attention (index_topk 2048)", {"window": 2048}),
        # Queries are compressed only where the note says so.
        (
            "kv_lora 512, nope 192",
            {"kv_lora": 512, "q_lora": 0, "head_dim": 192, "rope_dim": 64, "v_dim": 128},
        ),
        # Widths of latent attention mean nothing without it.
        ("rope 64, v 128", {}),
    ],
)
def test_sizes_of_notes(note: str, sizes: dict[str, int]) -> None:
    assert noted_sizes(note) == sizes


def test_latent_attention_has_the_usual_widths() -> None:
    usual = {"kv_lora": 512, "q_lora": 1536, "rope_dim": 64, "head_dim": 128, "v_dim": 128}
    assert noted_sizes("", latent=True) == usual


@pytest.mark.parametrize(
    ("name", "note", "share"),
    [
        ("window_share", "sliding window 4096", None),
        ("window_share", "every second layer has a sliding window of 128", 0.5),
        ("window_share", "MoE every 2nd layer; 3 of 4 layers chunked attention 8192", 0.75),
        ("with_experts", "MoE every 2nd layer; 3 of 4 layers chunked attention 8192", 0.5),
        ("linear", "every 4th layer full attention, others gated delta-net", 0.75),
        ("linear", "2 of 3 layers Mamba-2", 2 / 3),
        ("linear", "MEMEM*: Mamba-2 and 6 attention layers", 0.75),
        ("linear", "qk norm", None),
    ],
)
def test_shares_of_notes(name: str, note: str, share: float | None) -> None:
    assert noted_share(name, note) == (share if share is None else pytest.approx(share))


def test_any_size_of_a_workload_may_be_a_column() -> None:
    cells = Cells({"window": 128.0, "window_share": 0.5, "gated": "yes", "layers": "", "note": "x"})
    assert cells.sizes() == {"window": 128, "window_share": 0.5, "gated": True}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["id", "glob_batch"], "'glob_batch' is not read: is it 'global_batch'"),
        # What the table has is not misspelt, and what is like nothing says something else.
        (["id", "global_batch", "glob_batch"], ""),
        (["id", "network_note", "url"], ""),
    ],
)
def test_a_misspelt_column_is_told(columns: list[str], said: str, caplog) -> None:
    def read(row: object) -> float:
        cell = Cells(row)
        return cell.count("global_batch", 1) + cell.count("network_scope", 0)

    table = pd.DataFrame([[8] * len(columns)], columns=columns)
    assert read_rows(table, read) == ([8 if "global_batch" in columns else 1], [""])
    assert said in caplog.text and bool(caplog.text) == bool(said)
