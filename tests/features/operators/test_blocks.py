"""Physics of layers, mixed batches and new attention, by hand and on every kind of device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import device_names, find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.operators import OpFeatures, op_features
from opcast.features.operators.blocks import FIT
from opcast.features.operators.features import feature_names
from opcast.features.operators.schema import BLOCKS, FAMILIES

#: One row of each family; names as the kernel pack has them.
ROWS: dict[str, dict[str, object]] = {
    "layer/product": {"op": "q_proj", "kernel": "kernel_mean3", "m": 64, "n": 128, "k": 256},
    "layer/pass": {"op": "act_fn", "kernel": "kernel_mean3", "rows": 512, "cols": 4096},
    "layer/experts": {
        "op": "fused_moe", "kernel": "tuned_min", "tokens": 16, "hidden": 64, "inter": 32,
        "topk": 2, "experts": 8, "ep": 2, "routed": 16,
    },
    "batch/attention": {
        "op": "attention_mixed", "backend": "vllm", "kernel": "kernel_mean3", "q_heads": 8,
        "kv_heads": 2, "head_dim": 128, "batch": 1, "q_len": 64, "kv_prefill": 128,
        "n_decode": 4, "kv_decode": 255, "n_decode_big": 0, "kv_decode_big": 0,
    },
    "graph/sparse": {
        "op": "dsa dsa_context_module", "backend": "vllm", "kernel": "FLASHMLA_SPARSE",
        "batch": 2, "heads": 16, "q_len": 512, "kv_history": 4096, "ratio": 1, "latent": 576,
        "groups": 1, "index_heads": 64, "chosen": 2048, "window": 0,
        "shared_weights": 10_000_000, "head_weights": 1_000_000,
    },
    "graph/scan": {
        "op": "gdn context", "backend": "vllm", "kernel": "chunk_gated_delta_rule", "batch": 2,
        "seq_len": 1024, "key_heads": 4, "key_dim": 128, "value_heads": 8, "value_dim": 128,
        "chunk": 64,
    },
    "graph/streams": {"op": "post", "kernel": "mhc_post", "rows": 256, "cols": 4096, "copies": 4},
}  # fmt: skip
#: Parameters that a family's time grows with.
GROWTH = {
    "layer/product": ("m", "n"),
    "layer/pass": ("rows", "cols"),
    "layer/experts": ("hidden", "inter", "routed"),
    "batch/attention": ("q_heads", "q_len", "kv_prefill", "n_decode", "kv_decode"),
    "graph/sparse": ("batch", "q_len", "kv_history", "chosen", "shared_weights"),
    "graph/scan": ("batch", "seq_len", "value_heads"),
    "graph/streams": ("rows", "cols"),
}


@pytest.fixture(scope="module")
def estimate(round_gpu: Callable[[], DeviceSpec]) -> Callable[..., OpFeatures]:
    def one(family: str, device: DeviceSpec | None = None, **changes: object) -> OpFeatures:
        row = {"dtype": "bf16", **ROWS[family], **changes, "device": "own"}
        return op_features(pd.DataFrame([row]), family, {"own": device or round_gpu()})

    return one


def test_a_layer_costs_its_product(estimate: Callable[..., OpFeatures]) -> None:
    found = estimate("layer/product")
    assert found.flops[0] == 2 * 64 * 128 * 256
    assert found.moved[0] == 2 * (64 * 256 + 256 * 128 + 64 * 128)
    assert found.floor_s[0] == pytest.approx(FIT.kernel / 1e9)


def test_a_pass_reads_and_writes_every_element(estimate: Callable[..., OpFeatures]) -> None:
    assert estimate("layer/pass", op="norm").moved[0] == 4 * 512 * 4096
    # Gate and product read, one result written, of what the table calls the width.
    assert estimate("layer/pass", op="act_fn").moved[0] == pytest.approx(2.2 * 4 * 512 * 4096)


def test_norms_of_eager_pytorch_are_several_kernels(estimate: Callable[..., OpFeatures]) -> None:
    llama = estimate("layer/pass", op="norm", backend="torch", distribution="meta-llama/Llama")
    assert llama.moved[0] == pytest.approx(8.5 * 4 * 512 * 4096)
    assert llama.floor_s[0] == pytest.approx(6 * 2 * FIT.kernel / 1e9)
    phi = estimate("layer/pass", op="norm", backend="torch", distribution="microsoft/Phi-mini")
    assert phi.moved[0] == 4 * 512 * 4096
    assert phi.floor_s[0] == pytest.approx(2 * FIT.kernel / 1e9)


def test_a_pass_within_a_program_of_a_tpu_has_no_launch(
    estimate: Callable[..., OpFeatures], round_gpu: Callable[..., DeviceSpec]
) -> None:
    tpu = estimate("layer/pass", round_gpu(platform="tpu"), op="norm")
    assert tpu.floor_s[0] == pytest.approx(0.2 * FIT.kernel / 1e9)


def test_host_timed_calls_include_a_launch(estimate: Callable[..., OpFeatures]) -> None:
    assert estimate("layer/pass", kernel="cuda_event_eager").floor_s[0] == pytest.approx(15e-6)


def test_experts_read_the_weights_of_those_that_get_rows(
    estimate: Callable[..., OpFeatures],
) -> None:
    found = estimate("layer/experts")
    # Sixteen rows fall on four local experts: each is missed with probability exp(-4).
    active = 4 * (1 - np.exp(-4))
    streams = 16 * (64 * 4 + 32 * 6) + 16 * 64 * 4
    assert found.flops[0] == 6 * 16 * 64 * 32
    assert found.moved[0] == pytest.approx(active * 3 * 64 * 32 * 2 + streams)


def test_a_mixed_batch_counts_visible_pairs(estimate: Callable[..., OpFeatures]) -> None:
    found = estimate("batch/attention")
    # The chunk's query i sees 129 + i keys; each of four decodes its 255 older ones and itself.
    pairs = sum(129 + i for i in range(64)) + 4 * 256
    assert found.flops[0] == 2 * 8 * pairs * 256
    keys = 2 * (192 + 4 * 256) * 2 * 128 * 2
    assert found.moved[0] == keys + 2 * (64 + 4) * 8 * 128 * 2


def test_unsplit_kernels_last_as_long_as_the_longest_sequence(
    estimate: Callable[..., OpFeatures],
) -> None:
    """RTX PRO 6000: a chunk over 16,384 keys takes 376 µs, whether of 16 or 256 queries."""
    device = find_device("rtx-pro-6000")
    times = [
        estimate("batch/attention", device, q_len=n, kv_prefill=16384, kv_decode=512).base_s[0]
        for n in (16, 64)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.05)
    assert times[0] == pytest.approx(376e-6, rel=0.25)


def test_new_attention_skips_what_a_kernel_does_not_compute(
    estimate: Callable[..., OpFeatures],
) -> None:
    whole = estimate("graph/sparse")
    logits = estimate("graph/sparse", shared_weights=0, head_weights=0, chosen=0)
    attention = estimate("graph/sparse", shared_weights=0, head_weights=0, index_heads=0)
    tokens = 2 * 512
    projections = 2 * tokens * (10_000_000 + 16 * 1_000_000)
    pairs = 2 * sum(4097 + i for i in range(512))
    assert logits.flops[0] == 2 * pairs * 64 * 128
    assert attention.flops[0] == 2 * tokens * 16 * 2048 * 2 * 576
    assert whole.flops[0] == projections + logits.flops[0] + attention.flops[0]


def test_convolutions_of_a_scan_stop_at_what_cores_can_stream(
    estimate: Callable[..., OpFeatures],
) -> None:
    """H200's cores stream no faster than H100's, though its memory does."""
    sizes = {"kernel": "causal_conv1d_fn", "batch": 64, "seq_len": 8192}
    slow, fast = (
        estimate("graph/scan", find_device(name), **sizes).base_s[0]
        for name in ("h100-sxm", "h200-sxm")
    )
    assert 1.0 <= slow / fast < 1.15


@pytest.mark.parametrize("family", BLOCKS)
def test_time_grows_with_the_work(family: str, estimate: Callable[..., OpFeatures]) -> None:
    base = estimate(family).base_s[0]
    for column in GROWTH[family]:
        more = estimate(family, **{column: 8 * int(str(ROWS[family][column]))}).base_s[0]
        assert more >= base * 0.999, column


@pytest.mark.parametrize("family", BLOCKS)
def test_estimates_hold_on_every_device(family: str, estimate: Callable[..., OpFeatures]) -> None:
    for name in device_names():
        found = estimate(family, find_device(name))
        assert np.isfinite(found.X).all(), name
        assert 0 < found.roofline_s[0] <= found.base_s[0] < 1, name


@pytest.mark.parametrize("family", BLOCKS)
def test_no_feature_names_a_vendor(family: str) -> None:
    names = feature_names(family)
    assert family not in FAMILIES
    assert len(set(names)) == len(names)
    assert not [n for n in names if any(v in n for v in ("nvidia", "amd", "intel", "google"))]
