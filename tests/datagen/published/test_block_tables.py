"""Tables of the kernel pack as operators of blocks; rows are made up, in the pack's columns."""

from __future__ import annotations

import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.datagen.published.block_tables import block_rows
from opcast.datagen.published.packs import BLOCK_TABLES, kind_of

MIXED = {
    "id": "KA1", "source": "LLMServingSim", "op": "attention", "family": "attention_mixed",
    "dtype": "bf16", "kv_dtype": "bf16", "device": "rtx-4090", "backend": "vllm",
    "method": "kernel_mean3", "model": "meta-llama/Llama-3.1-8B", "q_heads": 32, "kv_heads": 8,
    "head_dim": 128, "batch": 1, "q_len": 256, "kv_prefill": 1024, "n_decode": 4,
    "kv_decode": 512, "n_decode_big": pd.NA, "kv_decode_big": pd.NA, "tokens": pd.NA,
    "hidden": pd.NA, "inter": pd.NA, "topk": pd.NA, "experts": pd.NA, "ep": pd.NA,
    "routed": pd.NA, "detail": "", "kernel": "", "split": "train", "latency_us": 50.0,
}  # fmt: skip
EXPERTS = {
    **MIXED, "id": "KA2", "op": "fused_moe", "family": "moe", "backend": "aiter",
    "device": "mi300x", "method": "tuned_min", "kernel": "moe_ck2stages", "tokens": 64,
    "hidden": 4096, "inter": 512, "topk": 8, "experts": 128, "ep": 4, "detail": "per_Token, silu",
    "q_heads": pd.NA, "kv_heads": pd.NA, "head_dim": pd.NA, "batch": pd.NA, "q_len": pd.NA,
    "kv_prefill": pd.NA, "n_decode": pd.NA, "kv_decode": pd.NA,
}  # fmt: skip
LAYER = {
    "id": "KL1", "source": "LLMServingSim", "op": "q_proj", "family": "linear", "dtype": "bf16",
    "device": "tpu-v6e", "backend": "torch_xla", "method": "device_trace_mean",
    "model": "meta-llama/Llama-3.1-8B", "layer": "q_proj", "tp": 1, "tokens": 16, "m": 16,
    "n": 4096, "k": 4096, "rows": pd.NA, "cols": pd.NA, "latency_us": 30.0, "above_peak": 0,
}  # fmt: skip
NEW = {
    "id": "KN1", "op": "dsa_context_module", "family": "dsa", "phase": "context", "dtype": "bf16",
    "kv_dtype": "fp8", "gemm_dtype": "fp8_block", "device": "h100-sxm", "backend": "sglang",
    "kernel": "flashmla", "model": "deepseek-ai/DeepSeek-V3.2", "batch": 2, "num_heads": 16,
    "q_len": 512, "kv_history": 1024, "compress_ratio": pd.NA, "score_mode": "", "seq_len": pd.NA,
    "num_tokens": pd.NA, "num_k_heads": pd.NA, "head_k_dim": pd.NA, "num_v_heads": pd.NA,
    "head_v_dim": pd.NA, "head_dim": pd.NA, "n_groups": pd.NA, "d_state": pd.NA,
    "chunk_size": pd.NA, "hc_mult": pd.NA, "hidden": pd.NA,
}  # fmt: skip


def rows(base: dict[str, object], *changes: dict[str, object]) -> pd.DataFrame:
    return block_rows(pd.DataFrame([{**base, **change} for change in changes]))


def test_batches_and_experts() -> None:
    found = block_rows(pd.DataFrame([MIXED, EXPERTS]))
    assert found["key"].tolist() == ["batch/attention", "layer/experts"]
    assert found["op"].tolist() == ["attention_mixed", "fused_moe"]
    # Which kernel was fastest is no input; how it was timed is.
    assert found["kernel"].tolist() == ["kernel_mean3", "tuned_min"]
    assert found.loc[0, ["n_decode_big", "kv_decode_big"]].tolist() == [0, 0]
    # Without a count of the rows on a rank: an even share.
    assert found["routed"][1] == 64 * 8 / 4
    assert not found["suspect"].any()


def test_layers_without_sizes_take_them_from_the_model() -> None:
    summed = {"layer": "sum:up+down", "m": pd.NA, "n": pd.NA, "k": pd.NA}
    rope = {"layer": "attn_rope", "m": pd.NA, "n": pd.NA, "k": pd.NA, "tp": 2}
    found = rows(LAYER, {}, summed, rope, {"above_peak": 1})
    assert found["key"].tolist() == ["layer/product"] * 2 + ["layer/pass", "layer/product"]
    assert found.loc[1, ["m", "n", "k"]].tolist() == [16, 2 * 14336, 4096]
    # 32 query heads and 8 of keys, 128 wide, on two ranks.
    assert found.loc[2, ["rows", "cols"]].tolist() == [16, (32 + 8) * 128 / 2]
    assert found["suspect"].tolist() == [False, False, False, True]


def test_new_attention_by_model() -> None:
    logits = {"family": "dsv4_mqa_logits", "op": "dsv4_paged_mqa_logits_module",
              "model": "sgl-project/DeepSeek-V4-Flash-FP8", "compress_ratio": 4}  # fmt: skip
    hca = {"family": "dsv4_hca", "op": "dsv4_hca_context_module", "compress_ratio": 128}
    scan = {"family": "gdn", "op": "gdn", "num_k_heads": 8, "head_k_dim": 128, "num_v_heads": 16,
            "head_v_dim": 128, "num_tokens": 2048}  # fmt: skip
    mamba = {"family": "mamba2", "op": "mamba2", "num_heads": 64, "head_dim": 64, "n_groups": 8,
             "d_state": 128, "seq_len": 32}  # fmt: skip
    mix = {"family": "mhc", "op": "pre", "num_tokens": 64, "hidden": 4096, "hc_mult": 4}
    found = rows(NEW, {}, logits, hca, scan, mamba, mix)
    assert found["key"].tolist() == ["graph/sparse"] * 3 + ["graph/scan"] * 2 + ["graph/streams"]
    # DeepSeek-V3.2 chooses 2048 keys by 64 indexer heads; its latent keys have 512 + 64 elements.
    assert found.loc[0, ["latent", "index_heads", "chosen"]].tolist() == [576, 64, 2048]
    assert found.loc[1, ["shared_weights", "chosen", "index_heads", "ratio"]].tolist() == [
        0,
        0,
        64,
        4,
    ]
    assert found["index_heads"][2] == 0
    assert found["seq_len"][3] == 2048 / 2
    scanned = ["key_heads", "key_dim", "value_heads", "value_dim"]
    assert found.loc[4, scanned].tolist() == [8, 128, 64, 64]
    assert found.loc[5, ["rows", "cols", "copies"]].tolist() == [64, 4096, 4]


def test_other_tables_are_none_of_these() -> None:
    assert {kind_of(LAYER), kind_of(NEW), kind_of(MIXED)} == set(BLOCK_TABLES)
    assert kind_of([*NEW, "power_limit_w"]) == "power", "the table of power repeats their columns"
    with pytest.raises(DatasetError, match="no table of attention"):
        block_rows(pd.DataFrame({"op": ["x"]}))
