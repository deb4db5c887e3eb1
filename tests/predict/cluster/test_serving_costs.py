"""Costs of a served decoder's passes that differ between engines."""

from __future__ import annotations

import pytest

from opcast.features.devices.catalogue import read_device
from opcast.features.operators.op import Op
from opcast.models.core.registry import OPERATOR_MODEL
from opcast.models.serving.effects import PRIOR
from opcast.models.serving.model import ServingModel
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_table import serving_row
from opcast.predict.operator.serving_operators import ServingLatency, load_serving_operators
from opcast.simulate.serving.load import CLASSES

LLAMA = {
    "id": "a", "device": "h100-sxm", "framework": "vLLM", "n_gpus": 4, "tp": 4, "model": "llama",
    "arch": "llama", "layers": 80, "d_model": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128,
    "d_ff": 28672, "vocab": 128256, "weight_dtype": "bf16", "load": "static-batch", "isl": 1024,
    "osl": 256, "concurrency": 1,
}  # fmt: skip


def test_engines_before_they_were_rewritten_reduce_by_the_library() -> None:
    """Two all-reduces of 16 KiB over 4 ranks in each of 80 layers.

    By NCCL one takes 10 to 13 us, captured in a graph 4 + 4 * 0.2 us and 25 KB at 270 GB/s.
    """
    rows = [serving_row({**LLAMA, "framework_version": v}) for v in ("0.6", "0.11")]
    own = ServingPredictor(None, ServingModel())
    early, now = (own.simulate(row.deployment, row.spec).seconds("tpot") for row in rows)
    assert early - now == pytest.approx(160 * (11.8e-6 - 4.9e-6), rel=0.2)


def test_vllm_reads_all_experts_in_fp8_however_few_the_tokens() -> None:
    model = load_serving_operators(OPERATOR_MODEL)

    def seconds(framework: str, tokens: int, dtype: str) -> float:
        latency = ServingLatency(read_device("h200-sxm"), model, framework)
        # Qwen3 235B over two ranks: 128 experts of 4096 x 1536, eight for each token.
        return latency(Op("moe", (tokens, 4096, 1536, 8, 128, 2, 1), dtype))

    few, many = (seconds("vllm", tokens, "fp8") for tokens in (4, 64))
    assert few == many
    # 1.2 GB of a layer's experts at 4.8 TB/s take 0.25 ms; kernels reach most of that.
    assert 0.25e-3 < few < 0.5e-3
    assert seconds("sglang", 4, "fp8_block") < 0.6 * seconds("sglang", 64, "fp8_block")
    assert seconds("vllm", 4, "bf16") < 0.6 * seconds("vllm", 64, "bf16")


def test_ranks_that_attend_to_their_own_sequences_have_hosts_of_their_own() -> None:
    row = {**LLAMA, "layers": 8, "experts": 8, "top_k": 2, "concurrency": 64, "tp": 1, "dp": 4}
    own = ServingPredictor(None, ServingModel())

    def per_sequence(**columns: int) -> float:
        found = serving_row({**row, **columns})
        run = own.simulate(found.deployment, found.spec)
        passes = run.run.tokens[[CLASSES.index(name) for name in ("sequence", "host")]]
        return float(passes[0] / passes[1] * PRIOR["host"])

    # Five microseconds a sequence: a rank's host sees 16 of the 64.
    assert per_sequence() == pytest.approx(16 * PRIOR["sequence"], rel=0.01)
    assert per_sequence(tp=4, dp=1) == pytest.approx(64 * PRIOR["sequence"], rel=0.01)
