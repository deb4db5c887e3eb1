"""Physics of operators: FLOPs and bytes by hand, bounds, and how the estimate grows."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import device_names, find_device
from opcast.features.devices.rules import IDLE_W, rules_of
from opcast.features.operators import FAMILIES, gemm, op_features
from opcast.features.operators.attention import visible_pairs, visited_keys
from opcast.features.operators.attention_kernels import RowKernels
from opcast.features.operators.columns import OpTable
from opcast.features.operators.physics import combine, fill, quantised, resident_share
from opcast.features.operators.routing import busy_rank
from opcast.features.operators.schema import parameters_of

ATTENTION = {
    "op": "attention", "dtype": "bf16", "batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8,
    "v_head_dim": 6, "q_len": 5, "kv_len": 9, "window": 0, "causal": 1,
}  # fmt: skip
EXPERTS = {
    "op": "moe", "dtype": "bf16", "tokens": 16, "hidden": 64, "inter": 32, "topk": 2, "experts": 8,
    "tp": 1, "ep": 2, "distribution": "balanced",
}  # fmt: skip
PRODUCT = {"op": "linear", "dtype": "fp16", "b": 1, "m": 64, "n": 128, "k": 256}
CONV = {
    "op": "conv", "dtype": "fp32", "batch": 2, "cin": 3, "cout": 4, "ksize": 3, "insize": 8,
    "stride": 2, "pad": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def estimate(round_gpu):
    def one(family, row, **changes):
        frame = pd.DataFrame([{**row, **changes, "device": "round"}])
        return op_features(frame, family, {"round": round_gpu()})

    return one


def test_product(estimate, round_gpu):
    found = estimate("kernel/linear", PRODUCT)
    moved = 2 * (64 * 256 + 256 * 128 + 64 * 128)
    assert found.flops[0] == 2 * 64 * 128 * 256
    assert found.moved[0] == moved
    # Everything fits into the cache, which the call before left warm.
    cache = round_gpu().levels[0].bandwidth
    assert found.roofline_s[0] == pytest.approx(max(2 * 64 * 128 * 256 / 1e15, moved / cache))
    assert found.floor_s[0] == pytest.approx(4500 / 1e9)
    assert found.bound[0] == "latency"


@pytest.mark.parametrize("size", [256, 16384])
def test_rooflines_charge_operands_where_they_lie(estimate, round_gpu, size):
    """Products of one row: of weights in the cache, and of others that are far larger."""
    found = estimate("kernel/linear", {**PRODUCT, "m": 1, "n": size, "k": size})
    chip = round_gpu()
    warm = found.moved[0] < 0.5 * chip.cache_bytes
    assert warm == (size == 256)
    rate = chip.levels[0].bandwidth if warm else chip.bandwidth
    weights = 2 * size**2
    assert found.roofline_s[0] == pytest.approx(weights / rate, rel=0.03)


def test_power_and_stalls_of_a_product_do_not_multiply(estimate, round_gpu):
    """A chip that power holds at a third of its clock takes three times as long, tiles hidden."""
    energy = rules_of("hopper", "gpu").f32_joules
    rate = round_gpu().matrix_peak("f32")
    sizes = {**PRODUCT, "b": 1, "m": 8192, "n": 8192, "k": 8192, "dtype": "fp32"}
    work = 2 * 8192**3 / rate

    def base(share):
        power = IDLE_W + share * energy * rate
        chip = dataclasses.replace(round_gpu(), architecture="hopper", power_w=power)
        frame = pd.DataFrame([{**sizes, "device": "round"}])
        return op_features(frame, "eager/linear", {"round": chip})

    # A third of the clock at two thirds of the voltage.
    free, fed = base(1e3), base(1 / 3 * (2 / 3) ** 2)
    own = free.base_s - free.floor_s
    assert own[0] > work
    assert (fed.base_s - fed.floor_s)[0] == pytest.approx(
        np.hypot(own[0] ** 2, (3 * work) ** 2) ** 0.5, rel=0.02
    )
    # A single call may draw more than the limit: it is no bound.
    assert fed.roofline_s == pytest.approx(free.roofline_s)


def test_batched_product_in_true_fp32(estimate):
    found = estimate("eager/bmm", PRODUCT, b=3, dtype="fp32")
    assert found.flops[0] == 3 * 2 * 64 * 128 * 256
    assert found.moved[0] == 3 * 4 * (64 * 256 + 256 * 128 + 64 * 128)
    assert found.floor_s[0] == pytest.approx(38e-6)  # a call from the host, whatever the device


def test_narrowing_activations_costs_launches_rows_and_bytes(estimate):
    found = estimate("graph/linear", PRODUCT, m=4096, k=512, dtype="fp8", backend="vllm")
    seconds = found.X[0, found.names.index("quant_base")] * found.base_s[0]
    launch, row, moved, element = gemm.FIT.rows("quantisation")["fp8", "vllm"]
    cores, clock, bandwidth = 100, 1e9, 1e12
    # 41 rows a core; the operands exceed the cache of 1 MB, so that all bytes come from memory.
    cycles = launch + row * 41 + element * 4096 * 512 / cores
    streamed = moved * 4096 * 512 / (0.85 * bandwidth)
    assert seconds == pytest.approx(cycles / clock + streamed, rel=1e-5)


def test_nothing_precedes_products_of_wide_numbers(estimate):
    found = estimate("graph/linear", PRODUCT, dtype="bf16", backend="vllm")
    assert found.X[0, found.names.index("quant_base")] == 0


def test_product_of_scaled_blocks(estimate):
    found = estimate("graph/linear", PRODUCT, dtype="nvfp4", backend="trtllm")
    # 4 bits and a scale of 8 bits for each 16 values; the result is 16 bits wide.
    width = (4 + 8 / 16) / 8
    assert found.moved[0] == width * (64 * 256 + 256 * 128) + 2 * 64 * 128


def test_large_product_is_bound_by_compute(estimate):
    found = estimate("kernel/linear", PRODUCT, m=8192, n=8192, k=8192)
    assert found.bound[0] == "compute"
    # 64 × 32 tiles of 128 × 256 on 100 SMs are 21 whole waves. A core does 10^4 operations a clock,
    # for which 64 bytes a clock of 16-bit operands suffice in tiles of 57 · 10^4 / 64² a side; its
    # way in is wider by what it does beyond 8192, the most that was measured. Tiles of 128 · 256 /
    # 384 slow it down. The device's power is not known, so it takes nothing.
    needed, side = 57 * 8192 / 64**2, 128 * 256 / 384
    step = 2 * 128 * 256 / (1e4 * 0.92) * (1 + (needed / side) ** 8) ** 0.125
    written = 2 * 128 * 256 / (10.5 * (1e4 / 2048) ** 0.5)
    tiles = 21 * (8192 * step + 250 + written) / 1e9
    weights = 2 * 8192 * 8192
    memory = 3 * weights / (0.85 * 1e12)
    depth = 0.08 * 8192 / 1e9
    assert found.base_s[0] == pytest.approx(4.5e-6 + (tiles**4 + memory**4) ** 0.25 + depth)


def test_pairs_of_cores_share_the_operands_of_a_tile(round_gpu):
    """Data-centre Blackwell: each core of a pair receives half of the columns."""
    alone = round_gpu()
    pairs = dataclasses.replace(alone, architecture="blackwell")
    row = pd.DataFrame([{**PRODUCT, "m": 8192, "n": 8192, "k": 8192, "device": "one"}])
    times = [op_features(row, "kernel/linear", {"one": chip}).base_s[0] for chip in (alone, pairs)]
    # 128 + 128 operands a step, not 128 + 256: they hardly wait any more.
    assert times[1] < 0.8 * times[0]


def test_kernels_that_do_not_split_leave_cores_idle(estimate):
    """One tile, deep: cuBLAS gives its reduction to many cores, CUTLASS's kernels to one."""
    deep = {"m": 16, "n": 32, "k": 8192, "dtype": "fp8", "kernel": "x"}
    times = [estimate("graph/linear", PRODUCT, **deep, backend=b) for b in ("trtllm", "vllm")]
    split = [t.X[0, t.names.index("log_split")] for t in times]
    assert split[0] > 0
    assert split[1] == 0


def test_products_that_leave_activations_wide_are_not_quantised(round_gpu):
    """Without units for eight bits, weights are widened instead."""
    chip = round_gpu()
    plain = dataclasses.replace(chip, peak_flops={"f16": 1e15, "bf16": 1e15, "f32": 1e13})
    row = pd.DataFrame([{**PRODUCT, "dtype": "fp8", "backend": "vllm", "device": "one"}])
    found = op_features(row, "graph/linear", {"one": plain})
    assert found.X[0, found.names.index("quant_base")] == 0


def test_convolution(estimate):
    found = estimate("eager/conv", CONV)
    out = (8 + 2 * 1 - 3) // 2 + 1
    assert out == 4
    assert found.flops[0] == 2 * (2 * out**2) * 4 * (3 * 3**2)
    assert found.moved[0] == 4 * (2 * 3 * 8**2 + 3 * 4 * 3**2 + 2 * 4 * out**2)


def test_elementwise(estimate):
    row = {"op": "add", "dtype": "fp16", "rows": 1000, "cols": 1000, "n_in": 2}
    found = estimate("kernel/elementwise", row)
    assert found.moved[0] == (2 + 1) * 1000 * 1000 * 2
    memory = 6e6 / (0.85 * 1e12)  # six times the cache: nothing of it stays
    vector = 4 * 1e6 / 1e13
    floor = 4500 / 2 / 1e9
    assert found.base_s[0] == pytest.approx(floor + (memory**3 + vector**3) ** (1 / 3))
    assert found.bound[0] == "memory"


@pytest.mark.parametrize(
    ("family", "op", "dtype", "per_element"),
    [
        ("eager/softmax", "softmax", "fp32", 2 * 4),
        ("eager/ln", "ln", "fp32", 2 * 4),
        ("kernel/elementwise", "silu_and_mul", "fp16", 2 + 2 / 2),
        ("graph/quantize", "quantize_fp8", "bf16", 2 + 1),
    ],
)
def test_bytes_of_passes(estimate, family, op, dtype, per_element):
    found = estimate(family, {"op": op, "dtype": dtype, "rows": 30, "cols": 50})
    assert found.moved[0] == 30 * 50 * per_element


@pytest.mark.parametrize(
    ("family", "changes", "pairs", "cached"),
    [
        ("graph/context_attention", {}, 5 + 6 + 7 + 8 + 9, 9 * (8 + 6)),
        ("graph/context_attention", {"window": 6}, 5 + 6 + 6 + 6 + 6, 9 * (8 + 6)),
        ("graph/encoder_attention", {"causal": 0}, 5 * 9, 9 * (8 + 6)),
        ("graph/generation_attention", {"q_len": 1}, 9, 9 * (8 + 6)),
        ("graph/generation_attention", {"q_len": 1, "window": 4}, 4, 4 * (8 + 6)),
        ("graph/generation_mla", {"q_len": 1}, 9, 9 * 8),  # values are part of the latent keys
    ],
)
@pytest.mark.parametrize(("kv_dtype", "width"), [("", 2), ("fp8", 1)])
def test_attention(estimate, family, changes, pairs, cached, kv_dtype, width):
    found = estimate(family, ATTENTION, kv_dtype=kv_dtype, **changes)
    q_len = changes.get("q_len", 5)
    assert found.flops[0] == 2 * 2 * 4 * pairs * (8 + 6)
    queries_and_result = 2 * 4 * q_len * (8 + 6) * 2
    assert found.moved[0] == queries_and_result + 2 * 2 * cached * width


LONG = {
    "op": "attention", "dtype": "bf16", "batch": 1, "q_heads": 4, "kv_heads": 4, "head_dim": 128,
    "v_head_dim": 128, "q_len": 6400, "kv_len": 6400, "window": 0, "causal": 1,
}  # fmt: skip


def test_long_prefill(estimate):
    """200 tiles are two waves on 100 cores; the last ones see all keys and delay the end."""
    found = estimate("graph/context_attention", LONG)
    keys = (1 + 6400) / 2 + (128 - 32) / 2  # the diagonal is computed in steps of 32 keys
    products = 2 * (128 + 128) / 1e4 / 0.8  # cycles of a pair, at 10,000 FLOP a cycle and core
    mean, most = (6200 + 128 * k * (products + 1 / 16) for k in (keys, 6400 + 16))
    tiles = (2 * mean + 1.5 * (most - mean)) / 1e9
    tensor = 4 * 6400 * (128 + 128) * 2  # bytes of the queries and the result
    memory, cache = 2 * tensor / 0.85e12, 1.4 * 2 * tensor / 0.85e12
    floor = 3.7e-6 + 4600 / 1e9
    assert found.base_s[0] == pytest.approx(floor + cache + combine(tiles, memory), rel=1e-6)


def test_one_tile_lasts_as_long_as_it_sees_keys(estimate):
    """A chunk of 128 queries at the end of a long history: one tile a head, on idle cores."""
    found = estimate("graph/context_attention", {**LONG, "q_len": 128})
    tiles = found.base_s[0] * 2 ** found.X[0, found.names.index("log_tiles_base")]
    pair = 2 * (128 + 128) / 1e4 / 0.8 + 1 / 16
    assert tiles == pytest.approx((6200 + 128 * (6400 + 16) * pair) / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("architecture", "changes", "products", "exponentials", "start"),
    [
        ("hopper", {"backend": "trtllm"}, 0.8, 1 / 16, 8300),
        ("ampere", {"backend": "trtllm"}, 0.55, 1 / 16, 3700),
        ("ampere", {"backend": "sglang", "kernel": "triton"}, 0.39, 1 / 16, 13_000),
        ("hopper", {"backend": "vllm", "kernel": "flash_attn_fa3"}, 0.8, 0.7 / 16, 8400),
        ("blackwell-ultra", {"backend": "vllm"}, 0.8, 1 / 32, 6200),
    ],
)
def test_what_tiles_reach(round_gpu, architecture, changes, products, exponentials, start):
    frame = pd.DataFrame([{**LONG, **changes, "causal": 0, "device": "d"}])
    device = round_gpu("d", architecture=architecture)
    found = op_features(frame, "graph/encoder_attention", {"d": device})
    tiles = found.base_s[0] * 2 ** found.X[0, found.names.index("log_tiles_base")]
    pair = 2 * 256 / 1e4 / products + exponentials
    assert tiles == pytest.approx(2 * (start + 128 * 6400 * pair) / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("backend", "kernel", "width"),
    [
        ("vllm", "flash_attn_fa2", 96),
        ("sglang", "triton", 128),
        ("trtllm", "torch_flow", 80),
        ("sglang", "flash_attention_v3", 96),
    ],
)
def test_widths_that_kernels_pad_heads_to(round_gpu, backend, kernel, width):
    def products(head_dim):
        names = {"backend": backend, "kernel": kernel, "causal": 0, "device": "d"}
        row = {**LONG, **names, "head_dim": head_dim, "v_head_dim": head_dim}
        device = round_gpu("d", architecture="ampere")
        found = op_features(pd.DataFrame([row]), "graph/encoder_attention", {"d": device})
        return found.base_s[0] * 2 ** found.X[0, found.names.index("log_tiles_base")]

    assert products(72) == pytest.approx(products(width), rel=1e-6)


def test_keys_at_the_edges_of_a_tile():
    mean, span, keys, window = (
        np.array(v, float)
        for v in ((100, 100, 1, 4), (128, 0, 5, 128), (200, 100, 5, 4), (0, 0, 0, 4))
    )
    assert list(visited_keys(mean, span, keys, window)) == [148, 100, 32, 40]


DECODE = {**LONG, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "v_head_dim": 64, "q_len": 1,
          "kv_len": 12_800}  # fmt: skip


def test_decode_is_split_over_idle_cores(estimate):
    found = estimate("graph/generation_attention", DECODE)
    assert found.X[0, found.names.index("log_split")] == pytest.approx(np.log2(100))
    serial = (4600 + 128 * 128 * 2 / 16.5 + 4000 / 100) / 1e9  # 128 keys a core, in bytes a cycle
    memory = 0.92 * (12_800 + 1) * 128 * 2 / 0.85e12
    tiles = 4600 / 100 / 1e9 + 2 * 12_800 * 128 / 1e15 / 0.2
    merge = 4.5e-6 + 100 * 64 * 4 * 4 / 1e13
    floor = 3.7e-6 + 7700 / 1e9
    assert found.base_s[0] == pytest.approx(
        floor + merge + combine(tiles, memory, serial), rel=1e-6
    )
    short = estimate("graph/generation_attention", DECODE, kv_len=256)  # merging costs more
    assert short.X[0, short.names.index("log_split")] == 0


@pytest.fixture
def latent(round_gpu):
    """Estimates latent decodes of 100 cores that do 1e4 bf16 operations a cycle at 1 GHz."""

    def base(architecture="ampere", shared=100 * 1024, **changes):
        row = {**DECODE, "q_heads": 16, "head_dim": 576, "v_head_dim": 512, **changes}
        frame = pd.DataFrame([{**row, "device": "d"}])
        device = round_gpu("d", architecture=architecture, shared_bytes_per_core=shared)
        return op_features(frame, "graph/generation_mla", {"d": device}).base_s[0]

    return base


def test_latent_keys_without_a_kernel_for_the_chip_are_not_split(latent):
    """Two blocks of a sequence walk all its keys, each with half of the values."""
    key = 2 * 64 * (576 + 256) / 1e4 + 60 + 1152 / 25  # cycles
    one = (2800 + 12_800 * key + 2000 + 5000) / 1e9
    assert latent(backend="trtllm") == pytest.approx(one, rel=0.01)
    assert latent(backend="trtllm", q_heads=64) == pytest.approx(one, rel=0.01)
    # 60 sequences are 120 blocks: two turns of 100 cores, or pairs in less than that.
    assert latent(backend="trtllm", batch=60) == pytest.approx(2 * one, rel=0.01)
    paired = latent(backend="trtllm", batch=60, shared=164 * 1024)
    assert paired == pytest.approx(2 * 0.69 * one, rel=0.04)
    assert latent("hopper", backend="trtllm") < one / 10


def test_latent_keys_in_triton_are_read_for_every_sixteen_heads(latent):
    row = {"backend": "sglang", "kernel": "triton", "batch": 400, "kv_len": 65_536}
    once = 400 * 65_536 * 576 * 2 / 0.85e12 * 0.92
    assert latent(**row) == pytest.approx(once, rel=0.05)
    assert latent(**row, q_heads=64) == pytest.approx(4 * once, rel=0.05)
    # Of few keys the partial results of all splits are what takes the time.
    assert latent(**(row | {"kv_len": 64})) == pytest.approx(14e-6 + 4 * 233e-6, rel=0.05)


def test_flash_attention_of_vllm_by_architecture(round_gpu):
    def cut(architecture, kernel):
        frame = pd.DataFrame([{**DECODE, "backend": "vllm", "kernel": kernel, "device": "d"}])
        device = round_gpu("d", architecture=architecture)
        return op_features(frame, "graph/generation_attention", {"d": device}).base_s[0]

    for architecture, names in (("hopper", "fa3"), ("ampere", "fa2"), ("ada", "fa2")):
        other = "fa2" if names == "fa3" else "fa3"
        assert cut(architecture, "vllm_flash_attn") == cut(architecture, f"vllm_flash_attn_{names}")
        assert cut(architecture, "vllm_flash_attn") != cut(architecture, f"vllm_flash_attn_{other}")


def test_kernels_of_tensorrt_llm_in_other_libraries(round_gpu):
    """FlashInfer and SGLang call them on data-centre Blackwell, by whatever name."""

    def kernels(architecture, backend, kernel):
        row = {**DECODE, "backend": backend, "kernel": kernel, "device": "d"}
        family, device = "graph/generation_attention", round_gpu("d", architecture=architecture)
        frame = pd.DataFrame([row])
        return RowKernels(OpTable.of(frame, family, parameters_of(family), {"d": device}))

    for backend, kernel in (
        ("vllm", "vllm_flashinfer_trtllmdecode"),
        ("vllm", "vllm_flashinfer"),
        ("sglang", "trtllm_mha"),
    ):
        assert kernels("blackwell", backend, kernel).is_("trt-generated")[0]
    # TensorRT-LLM itself still has its own for heads that share keys.
    assert kernels("blackwell", "trtllm", "torch_flow").is_("trt-made")[0]
    # Where the name says otherwise, or the chip has no such kernels.
    assert kernels("blackwell", "vllm", "vllm_flashinfer_fidecode").is_("flashinfer")[0]
    assert kernels("ada", "vllm", "vllm_flashinfer").is_("flashinfer")[0]
    assert kernels("blackwell", "trtllm", "torch_flow_flashinfer").is_("flashinfer")[0]
    # SGLang's FlashAttention 3 on a chip before Hopper is not that of Hopper.
    assert kernels("hopper", "sglang", "fa3").is_("flash-3")[0]
    assert kernels("ada", "sglang", "fa3").is_("flash-sglang")[0]


def test_latent_prefill_of_sglang_has_keys_of_each_head_on_blackwell(round_gpu):
    def products(kernel):
        widths = {"head_dim": 192, "v_head_dim": 128, "backend": "sglang", "kernel": kernel}
        frame = pd.DataFrame([{**LONG, **widths, "device": "d"}])
        device = round_gpu("d", architecture="blackwell")
        return op_features(frame, "graph/context_mla", {"d": device}).base_s[0]

    # 576 + 512 multiply-adds a pair of a query and a latent key, 192 + 128 with a head's own.
    assert products("flash_attention") > 1.5 * products("trtllm_mla")


def test_heads_that_read_the_keys_for_themselves(estimate):
    row = {**DECODE, "q_heads": 32, "kv_heads": 2, "backend": "vllm", "window": 1024}

    def waves(**changes):
        found = estimate("graph/generation_attention", row, **changes)
        return {n: 2 ** found.X[0, found.names.index(n)] for n in ("log_waves", "log_split")}

    assert waves(kernel="vllm_flash_attn_fa3")["log_waves"] > 0.1  # split
    alone = waves(kernel="vllm_flash_attn_fa2")
    assert alone == {"log_waves": pytest.approx(32 / 100), "log_split": 1}
    grouped = waves(backend="trtllm", window=0, kv_len=64)
    assert grouped["log_waves"] == pytest.approx(2 / 100)
    assert waves(backend="trtllm", window=0, kv_len=64, q_heads=96)["log_waves"] == pytest.approx(
        96 / 100
    )


@pytest.fixture
def decode(round_gpu):
    """Estimates decodes of 100 cores at 1 GHz, a core of which streams 16.5 bytes a cycle."""

    def seconds(architecture="ampere", shared=100 * 1024, **changes):
        row = {**DECODE, "head_dim": 128, "v_head_dim": 128, **changes}
        frame = pd.DataFrame([{**row, "device": "d"}])
        device = round_gpu("d", architecture=architecture, shared_bytes_per_core=shared)
        return op_features(frame, "graph/generation_attention", {"d": device}).base_s[0]

    return seconds


SECOND = {"backend": "vllm", "kernel": "vllm_flash_attn_fa2"}


def test_flash_attention_2_splits_keys_of_groups_alone(decode):
    """Its call for sequences of any length plans no parts where a head has its own keys."""
    key = 256 * 2 / 12  # bytes over 1.2 times a core's share of 1 TB/s
    own = decode(**SECOND, kv_len=65_536)
    assert own == pytest.approx((3600 + 65_536 * key) / 1e9 + 3.5e-6 + 3600 / 1e9, rel=0.01)
    assert decode(**SECOND, kv_len=65_536, q_heads=2) < own / 10


def test_flash_attention_2_keeps_as_many_blocks_on_a_core_as_fit(decode):
    """64 queries and two tiles of 128 keys are 80 KB: one block, or two."""
    tile = 128 * 256 * 2 / 12
    floor = 3.5e-6 + 3600 / 1e9
    one = decode(**SECOND, kv_len=128, batch=4000) - floor
    two = decode(**SECOND, kv_len=128, batch=4000, shared=164 * 1024) - floor
    # 40 turns of blocks; the soft maximum adds what the memory takes.
    assert 1 <= one / (40 * (3600 + tile) / 1e9) < 1.2
    assert two / one == pytest.approx((1800 + tile) / (3600 + tile), rel=0.1)


def test_flash_attention_2_copies_queries_of_several_sequences_and_groups(decode):
    few = {**SECOND, "kv_len": 64, "q_heads": 8}
    alone, copied = decode(**few, kv_heads=4), decode(**few, kv_heads=4, batch=2)
    assert copied - alone == pytest.approx(2 * 4500 / 1e9, rel=0.02)
    assert decode(**few, batch=2) == pytest.approx(alone, rel=0.01)  # a view is enough
    assert decode(**few, kv_heads=8, batch=2) == pytest.approx(alone, rel=0.01)


def test_tensorrt_llm_has_other_kernels_for_groups(decode):
    row = {"backend": "trtllm", "kernel": "torch_flow", "kv_len": 64}
    tile = 64 * 256 * 2 / (16.5 * 0.8)
    grouped = 1e-6 + (7000 + 5500 + tile + 4000 / 100) / 1e9
    assert decode(**row, q_heads=8) == pytest.approx(grouped, rel=0.01)
    assert decode(**row, q_heads=32) == pytest.approx(grouped + 4000 / 1e9, rel=0.01)
    # Heads of their own: shorter blocks, later.
    single = 1e-6 + (9500 + 2800 + tile + 4000 / 100) / 1e9
    assert decode(**row) == pytest.approx(single, rel=0.01)
    # The parts of all keys are merged, however few a window leaves.
    window = {"q_heads": 8, "window": 64, "kv_len": 4096}
    assert decode(**row | window) == pytest.approx(grouped + 1.3 * 4.5e-6, rel=0.03)
    assert decode(**row | window, kv_dtype="fp8") < decode(**row | window)


def test_tensorrt_llm_does_not_split_fp8_keys_on_blackwell_for_workstations(decode):
    row = {"backend": "trtllm", "kernel": "torch_flow", "q_heads": 8, "kv_dtype": "fp8"}
    whole = decode("blackwell-gb20x", **row, kv_len=65_536)
    key = 3 + 128 / 6.5
    assert whole == pytest.approx(65_536 * key / 1e9, rel=0.02)
    assert decode("hopper", **row, kv_len=65_536) < whole / 10


def test_experts(estimate):
    found = estimate("graph/moe", EXPERTS)
    rows = 16 * 2 // 2
    assert found.flops[0] == 2 * rows * 64 * 32 * 3
    weights = 4 * 64 * 32 * 3 * 2
    streams = rows * (64 * (2 + 2) + 32 * (4 + 2 + 2)) + rows * 64 * 2 + 16 * 64 * 4
    assert found.moved[0] == weights + streams
    ungated = estimate("graph/moe", EXPERTS, kernel="moe_torch_flow_nongated")
    assert ungated.flops[0] == found.flops[0] * 2 / 3


def test_experts_of_models_without_a_gate(estimate):
    """Nemotron 3 Nano's have two matrices in TensorRT-LLM's kernels, whoever calls them."""
    nano = {"inter": 1856, "topk": 6, "experts": 128, "ep": 1}
    found = estimate("graph/moe", EXPERTS, **nano, kernel="sglang_flashinfer_trtllm_moe")
    assert found.flops[0] == 2 * 16 * 6 * 64 * 1856 * 2
    gated = estimate("graph/moe", EXPERTS, **nano, kernel="vllm_fused_moe")
    assert gated.flops[0] == found.flops[0] * 3 / 2


def busy(tokens, topk, experts, ep, skew):
    found = busy_rank(*(np.array([float(v)]) for v in (tokens, topk, experts, ep, skew)))
    return found[0][0], found[1][0]


def test_balanced_ranks():
    assert busy(8, 1, 16, 2, 0) == (4, 4)
    assert busy(100, 2, 16, 2, 0) == (100, 8)
    assert busy(1, 1, 16, 64, 0) == (1 / 64, 1)


def test_the_busiest_rank_of_a_skewed_draw():
    # Two experts, one row each on average: quantiles 1/4 and 3/4 of a density x^-2 between 1 and 8.
    loads = np.array([1 / (1 - q * (1 - 1 / 8)) for q in (0.25, 0.75)])
    loads *= 10 / loads.sum()
    assert busy(10, 1, 2, 2, 2.0) == (pytest.approx(loads[1]), pytest.approx(1))
    rows, active = busy(10, 1, 2, 1, 2.0)
    assert rows == pytest.approx(10)  # one rank has them all
    assert active == pytest.approx((1 - np.exp(-loads)).sum())


def test_no_expert_gets_a_token_twice():
    rows, _ = busy(100, 6, 8, 8, 1.2)
    assert rows == pytest.approx(100, rel=0.02)


def test_visible_pairs_by_counting():
    cases = [(q, kv, w) for kv in range(1, 13) for q in range(1, kv + 1) for w in range(15)]
    counted = [
        sum(
            1
            for i in range(q)
            for j in range(kv)
            if j <= kv - q + i and (not w or j > kv - q + i - w)
        )
        for q, kv, w in cases
    ]
    q, kv, w = (np.array(c, float) for c in zip(*cases, strict=True))
    assert visible_pairs(q, kv, w) == pytest.approx(counted)


def test_waves():
    waves = np.array([0.2, 1.0, 1.1, 1.8, 7.0])
    assert quantised(waves) == pytest.approx([0.6, 1.0, 1.6, 1.8, 7.0])
    assert fill(waves) == pytest.approx([0.2, 1.0, 0.55, 0.9, 1.0])
    steps = quantised(np.linspace(0, 9, 500))
    assert (np.diff(steps) >= 0).all()


def test_resident_share_falls_from_all_to_nothing():
    share = resident_share(np.linspace(0, 3, 100), np.array(1.0), 1.15, 0.3)
    assert share[0] == 1 and share[-1] == 0
    assert (np.diff(share) <= 0).all()
    assert resident_share(np.array([0.85, 1.0, 1.15]), np.array(1.0)) == pytest.approx([1, 0.5, 0])


def test_combine_is_a_soft_maximum():
    a, b = np.array([1.0, 3.0, 0.0]), np.array([1.0, 1e-9, 2.0])
    found = combine(a, b)
    assert found == pytest.approx([2 ** (1 / 3), 3.0, 2.0])
    assert (found >= np.maximum(a, b) - 1e-12).all() and (found <= a + b + 1e-12).all()


@pytest.fixture(scope="module")
def gpus():
    return {n: find_device(n) for n in device_names() if find_device(n).platform == "gpu"}


@pytest.fixture(scope="module")
def drawn(gpus, op_rows):
    def rows(family, n=800):
        found = op_rows(family, n)
        return found.assign(device=np.random.default_rng(1).choice(list(gpus), n))

    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_every_feature_is_finite(family, drawn, gpus):
    found = op_features(drawn(family), family, gpus)
    assert np.isfinite(found.X).all()
    for values in (found.base_s, found.roofline_s, found.flops, found.moved):
        assert np.isfinite(values).all() and (values > 0).all()
    assert (found.floor_s > 0).all() and (found.floor_s < found.base_s).all()
    assert set(found.bound) <= {"compute", "memory", "latency"}


@pytest.mark.parametrize("family", FAMILIES)
def test_estimate_is_not_below_the_roofline(family, drawn, gpus):
    found = op_features(drawn(family), family, gpus)
    assert (found.base_s >= found.roofline_s).all()


GROWTH = {
    "gemm": ("b", "m", "n"), "conv": ("batch", "cout"), "pointwise": ("rows", "cols"),
    "attention": ("batch", "q_heads", "kv_len"), "moe": ("tokens", "hidden", "inter"),
    "conv_nd": ("n", "k"), "tuned_gemm": ("b", "m", "n"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_estimate_grows_with_the_work(family, drawn, gpus):
    rows = drawn(family)
    if FAMILIES[family] == "conv_nd":  # sizes of a gradient are depths of its product, too
        rows = rows[rows["op"] == "fwd"]
    before = op_features(rows, family, gpus)
    for column in GROWTH[FAMILIES[family]]:
        if (family, column) == ("graph/generation_attention", "q_heads"):
            # TensorRT-LLM and FlashAttention 2 have other kernels for heads that share keys, the
            # former for up to 32 in a group: between them more heads may take less.
            share = rows["q_heads"] / rows["kv_heads"]
            rows = rows[(share > 1) & ((share > 32) | (share <= 16))]
            before = op_features(rows, family, gpus)
        after = op_features(rows.assign(**{column: 2 * rows[column]}), family, gpus)
        # Twice the keys are less than twice as many tiles, of which each part has whole ones.
        least = 0.98 if family == "graph/generation_attention" else 1 - 1e-9
        assert (after.base_s >= before.base_s * least).all(), column
        assert (after.flops >= before.flops).all() and (after.moved >= before.moved).all(), column


@pytest.mark.parametrize("family", ["eager/linear", "kernel/linear", "graph/bmm"])
def test_deeper_products_take_longer(family, drawn, gpus):
    rows = drawn(family)
    rows["k"] = 256 * np.maximum(rows["k"] // 256, 1)  # whole splits of the reduction
    before = op_features(rows, family, gpus)
    after = op_features(rows.assign(k=2 * rows["k"]), family, gpus)
    assert (after.base_s >= before.base_s * (1 - 1e-9)).all()


def test_an_autotuned_product_is_bound_by_its_slower_half() -> None:
    rows = pd.DataFrame(
        {"b": [1, 1], "m": [4096, 256], "n": [4096, 256], "k": [4096, 4096], "op": "linear"}
    ).assign(dtype="bf16", device="h100-sxm")
    one = op_features(rows, "xla/linear", {"h100-sxm": find_device("h100-sxm")})
    # 512 tiles of 128 x 256 on 132 cores: 4 waves, at 0.89 of the peak and 21 bytes a clock.
    tile = 2 * 128 * 256 * 4096 / (0.89 * 989.4e12 / 132) + 128 * 256 * 2 / (21 * 1.98e9)
    assert one.base_s[0] == pytest.approx(10400 / 1.98e9 + 4 * tile, rel=0.02)
    # Small tiles wait for their operands: (32 + 64) rows of 2 bytes a step, 64 bytes a clock.
    small = 4096 * (32 + 64) * 2 / (64 * 1.98e9)
    assert one.base_s[1] == pytest.approx(10400 / 1.98e9 + small, rel=0.05)
    # Hopper's TF32 passes through registers; Blackwell's does not.
    ratio = {}
    for name in ("h100-sxm", "b200"):
        both = pd.concat(
            [rows.iloc[1:].assign(k=1024, dtype=d, device=name) for d in ("bf16", "tf32")]
        )
        base = op_features(both, "xla/linear", {name: find_device(name)}).base_s
        ratio[name] = base[1] / base[0]
    assert ratio["h100-sxm"] > 1.4 * ratio["b200"]


def test_of_a_split_reduction_xlas_tool_gives_half() -> None:
    rows = pd.DataFrame({"b": 1, "m": [256, 4096], "n": [256, 4096], "k": 4096, "op": "linear"})
    rows = rows.assign(dtype="tf32", device="h100-sxm")
    table = OpTable.of(
        rows, "xla/linear", parameters_of("xla/linear"), {"h100-sxm": find_device("h100-sxm")}
    )
    found = gemm.gemm(table)
    assert found.kernels.tolist() == [2.0, 1.0]
    # 8 tiles of 128 x 64, each cut into 16: (128 + 64) rows of 4 bytes a step at 30 bytes a clock
    # for 256 steps, a tile of f32 at 21 bytes a clock; then 16 parts are read and one is written.
    tile = 256 * (128 + 64) * 4 / (30 * 1.98e9) + 128 * 64 * 4 / (21 * 1.98e9)
    added = 256 * 256 * 4 * (16 + 1) / 3.35e12
    assert found.base_s[0] == pytest.approx(10400 / 1.98e9 + (tile + added) / 2, rel=0.03)
