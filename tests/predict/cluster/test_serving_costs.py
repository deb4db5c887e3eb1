"""Costs of a served decoder's passes that differ between engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.features.devices.catalogue import read_device
from opcast.features.operators.op import Op
from opcast.models.core.registry import OPERATOR_MODEL
from opcast.models.serving.effects import PRIOR
from opcast.models.serving.model import ServingModel
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_table import serving_row
from opcast.predict.operator.serving_operators import ServingLatency, load_serving_operators
from opcast.simulate.serving.forward import launches
from opcast.simulate.serving.load import CLASSES, Chunk

LLAMA = {
    "id": "a", "device": "h100-sxm", "framework": "vLLM", "n_gpus": 4, "tp": 4, "model": "llama",
    "arch": "llama", "layers": 80, "d_model": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128,
    "d_ff": 28672, "vocab": 128256, "weight_dtype": "bf16", "load": "static-batch", "isl": 1024,
    "osl": 256, "concurrency": 1,
}  # fmt: skip


SMALL = {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 14336, "n_gpus": 1, "tp": 1}


def test_engines_before_they_were_rewritten_reduce_by_the_library() -> None:
    """Two all-reduces of 16 KiB over 4 ranks in each of 80 layers.

    By NCCL one takes 10 to 13 us, captured in a graph 4 + 4 * 0.2 us and 25 KB at 270 GB/s.
    """
    trt = {**LLAMA, "framework": "TensorRT-LLM"}
    rows = [serving_row({**trt, "framework_version": v}) for v in ("0.6", "0.17")]
    own = ServingPredictor(None, ServingModel())
    early, now = (own.simulate(row.deployment, row.spec).seconds("tpot") for row in rows)
    assert early - now == pytest.approx(160 * (11.8e-6 - 4.9e-6), rel=0.2)


@pytest.mark.parametrize(
    ("device", "ranks", "tokens", "micros"),
    [
        # 64 and 128 MiB: TensorRT-LLM's, SGLang's and vLLM's in graphs take what NCCL does; two
        # passes over the links would take 441 us on Hopper.
        ("h100-sxm", 8, 4096, 322.0),
        ("b200", 8, 8192, 398.0),
        # By PCIe, 128 MiB: all three leave it to NCCL.
        ("rtx-pro-6000", 8, 8192, 9757.0),
    ],
)
def test_large_all_reduces_are_the_library_s(
    device: str, ranks: int, tokens: int, micros: float
) -> None:
    """Medians of the published tensor-core pack (collectives_tc), which no serving row is in."""
    one = {"layers": 1, "vocab": 1024, "isl": 8192, "n_gpus": ranks, "tp": ranks, "device": device}
    row = serving_row({**LLAMA, **one})
    station = ServingPredictor(None, ServingModel()).simulate(row.deployment, row.spec).stations[0]
    costs = station.costs.mixed([Chunk(tokens)], 0, 0.0)
    # After attention and after the feed-forward.
    assert costs[CLASSES.index("network")] / 2 == pytest.approx(micros * 1e-6, rel=0.1)


def test_experts_on_blackwell_run_by_generated_kernels() -> None:
    """Of DeepSeek-R1 over eight ranks in nvfp4, and of gpt-oss in mxfp4 on activations of 8 bits.

    64 tokens reach most of 256 experts of 3 x 7168 x 256 values, 0.8 GB with scales: 0.1 ms at 8
    TB/s. CUTLASS's kernels were measured at 0.23 to 0.32 ms.
    """
    model = load_serving_operators(OPERATOR_MODEL)
    for framework in ("vllm", "sglang", "tensorrt-llm"):
        latency = ServingLatency(read_device("b200"), model, framework)
        few, many = (Op("moe", (n, 7168, 2048, 8, 256, 8, 1), "nvfp4") for n in (4, 64))
        assert 0.07e-3 < latency(many) < 0.15e-3
        assert latency(few) < 0.5 * latency(many)
        # All 128 experts of 3 x 2880 x 2880 values in 4.25 bits are 1.7 GB: 0.21 ms.
        assert latency(Op("moe", (64, 2880, 2880, 4, 128, 1, 1), "mxfp4")) < 0.3e-3
        # On Hopper the same names are those of widened weights.
        hopper = ServingLatency(read_device("h200-sxm"), model, framework)
        assert hopper(many) > 1.5 * latency(many)


@pytest.mark.parametrize(
    ("sizes", "micros"),
    [
        ((4, 10240, 8192), 14.8), ((288, 8192, 2048), 10.7), ((1600, 10240, 8192), 79.0),
        ((8192, 1280, 8192), 51.4), ((32768, 8192, 1024), 211.6),
    ],
)  # fmt: skip
def test_products_with_activations_of_4_bits_take_the_rate_of_their_units(
    sizes: tuple[int, int, int], micros: float
) -> None:
    """Products of aiter on MI355X (published kernel pack); in 16 bits, large ones take 5 times."""
    latency = ServingLatency(read_device("mi355x"), None, "vllm")
    assert latency(Op("linear", sizes, "mxfp4_a4")) * 1e6 == pytest.approx(micros, rel=0.2)
    # Without units for 4 bits the weights are widened, as those of int4 are.
    widened = ServingLatency(read_device("mi300x"), None, "vllm")
    one, other = (widened(Op("linear", sizes, name)) for name in ("mxfp4_a4", "int4"))
    assert one == pytest.approx(other, rel=0.1)


def test_products_on_blackwell_run_by_the_kernels_measured_on_it() -> None:
    """Of 7,168 x 16,384 weights in nvfp4, one token: 21.1 us in vLLM 0.24, 66 MB at 3.1 TB/s.

    A cache of 16 sequences of 16,384 tokens with 8 heads is 1.07 GB, 139 us at 7.7 TB/s; 156 us
    in vLLM, where FlashAttention 2 would take 194 (published tensor-core pack).
    """
    model = load_serving_operators(OPERATOR_MODEL)
    latency = ServingLatency(read_device("b200"), model, "vllm")
    assert latency(Op("linear", (1, 7168, 16384), "nvfp4")) == pytest.approx(21.1e-6, rel=0.15)
    attention = Op("attention", (16, 64, 8, 128, 128, 1, 16384, 1))
    assert latency(attention) == pytest.approx(156e-6, rel=0.1)
    # The same cache in SGLang 0.5.14, where FlashAttention's name was extrapolated to 194 us.
    other = ServingLatency(read_device("b200"), model, "sglang")
    assert other(attention) == pytest.approx(154.3e-6, rel=0.1)
    # Generated kernels run experts of 8 and 16 bits as well; Triton's take 1.2 and 1.5 times.
    for dtype, micros in (("fp8", 135.6), ("bf16", 245.1)):
        experts = Op("moe", (64, 6144, 2560, 8, 160, 1, 8), dtype, skew=1.2)
        assert latency(experts) == pytest.approx(micros * 1e-6, rel=0.1)


def test_ranks_that_attend_to_their_own_sequences_have_hosts_of_their_own() -> None:
    plan = {"concurrency": 64, "tp": 1, "dp": 4, "framework_version": "0.11"}
    row = {**LLAMA, "layers": 8, "experts": 8, "top_k": 2, **plan}
    own = ServingPredictor(None, ServingModel())

    def per_sequence(**columns: int) -> float:
        found = serving_row({**row, **columns})
        run = own.simulate(found.deployment, found.spec)
        passes = run.run.tokens[[CLASSES.index(name) for name in ("sequence", "host")]]
        return float(passes[0] / passes[1] * PRIOR["host"])

    # Five microseconds a sequence: a rank's host sees 16 of the 64.
    assert per_sequence() == pytest.approx(16 * PRIOR["sequence"], rel=0.01)
    assert per_sequence(tp=4, dp=1) == pytest.approx(64 * PRIOR["sequence"], rel=0.01)


def test_kernels_of_a_pass_over_prompts_are_counted() -> None:
    """Of a dense layer two norms, three of attention's inputs, its output, three of the rest.

    These are queries, keys and values, their rotation, writing the cache and attending; the output;
    two products and an activation; and two all-reduces. Embedding, logits and sampling are three.
    """
    row = serving_row(LLAMA)
    dense = launches(row.deployment.model, row.deployment.engine.plan)
    assert dense == 80 * 12 + 3
    narrow = serving_row({**LLAMA, "weight_dtype": "fp8"})
    # Inputs of the four products of a layer are quantised first.
    assert launches(narrow.deployment.model, narrow.deployment.engine.plan) == dense + 80 * 4


def test_a_pass_over_prompts_takes_the_longer_of_launching_and_running_its_kernels() -> None:
    row = serving_row({**LLAMA, "framework": "SGLang", "framework_version": "0.5"})
    own = ServingPredictor(None, ServingModel())
    station = own.simulate(row.deployment, row.spec).stations[0]
    device = [CLASSES.index(name) for name in ("stream", "product", "prefill", "memory", "network")]
    launch = CLASSES.index("launch")

    def seconds(tokens: int) -> np.ndarray:
        return station.costs.mixed([Chunk(tokens)], 0, 0.0) * station.weights

    # 963 kernels at 60 us; the weights of a rank are read in a fifth of that.
    short, long = seconds(64), seconds(8192)
    assert short[launch] == pytest.approx(963 * PRIOR["launch"])
    assert not short[device].any()
    # 2 FLOP for each of 70e9 / 4 weights and each of 8192 tokens at 989 TFLOP/s are 290 ms.
    assert long[launch] == 0.0
    assert long[device].sum() > 0.29


@pytest.mark.parametrize("version", ["0.11", "0.14"])
def test_eager_engines_launch_further_tokens_too(version: str) -> None:
    """A layer of Llama 3 8B has ten kernels on one device: 323 of a pass take 19 ms, its weights 5.

    Of vLLM graphs and compiled layers go together (``--enforce-eager``). A host that prepares the
    next pass does so before it launches it, whether or not the device still runs.
    """
    own = ServingPredictor(None, ServingModel())
    row = serving_row({**LLAMA, **SMALL, "framework_version": version})
    eager = replace(row.deployment, options=replace(row.deployment.options, eager=True))
    slow, fast = (own.simulate(one, row.spec).seconds("tpot") for one in (eager, row.deployment))
    assert slow == pytest.approx(323 * PRIOR["launch"] + PRIOR["host"], rel=0.02)
    assert fast < 0.5 * slow


@pytest.mark.parametrize(
    ("framework", "before", "since"), [("SGLang", "0.3", "0.5"), ("vLLM", "0.13", "0.14")]
)
def test_a_host_that_runs_ahead_hides_behind_the_device(
    framework: str, before: str, since: str
) -> None:
    """A rank of Llama 3 70B reads 35 GB for a token, 10 ms at 3.35 TB/s; its host takes 1 ms."""
    own = ServingPredictor(None, ServingModel())

    def further(version: str, **columns: int) -> float:
        row = serving_row(
            {**LLAMA, "framework": framework, "framework_version": version, **columns}
        )
        return own.simulate(row.deployment, row.spec).seconds("tpot")

    host = PRIOR["host"] + PRIOR["sequence"]
    assert further(before) - further(since) == pytest.approx(host, rel=1e-6)
    # Of two layers the device takes 0.4 ms, of which nothing is seen.
    assert further(since, layers=2, vocab=1024) == pytest.approx(host, rel=1e-6)
