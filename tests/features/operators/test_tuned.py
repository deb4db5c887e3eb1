"""Convolutions and products of tuned libraries: work by hand, algorithms, limits, HLO text."""

from __future__ import annotations

import jax
import numpy as np
import pandas as pd
import pytest
from jaxlib import _hlo, _jax

from opcast.common.errors import ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.operators import OpFeatures, op_features
from opcast.features.operators.gemm import TUNED as FIT
from opcast.features.operators.hlo import op_ir, read_op
from opcast.features.operators.query import parse_op

#: ResNet-50's 3 × 3 layer of 28 × 28 positions.
CONV = {
    "method": "tuned", "family": "conv", "op": "fwd", "dtype": "fp16", "ndim": 2, "n": 32,
    "c": 128, "d": 1, "h": 28, "w": 28, "k": 128, "kd": 1, "kh": 3, "kw": 3, "stride_d": 1,
    "stride_h": 1, "stride_w": 1, "pad_d": 0, "pad_h": 1, "pad_w": 1, "dil_d": 1, "dil_h": 1,
    "dil_w": 1, "groups": 1, "channels_last": 0,
}  # fmt: skip
PRODUCT = {
    "method": "tuned", "family": "linear", "op": "linear", "dtype": "fp8", "b": 1, "m": 4096,
    "n": 4096, "k": 4096, "trans_a": 0, "trans_b": 1, "preshuffled": 0, "rotated": 1,
}  # fmt: skip
STRIDED = {"stride_h": 2, "stride_w": 2, "c": 64, "groups": 4}
VOLUME = {"ndim": 3, "d": 8, "kd": 3, "pad_d": 1}


def features(family: str, device: str, *rows: dict[str, object]) -> OpFeatures:
    frame = pd.DataFrame([{**row, "device": device} for row in rows])
    return op_features(frame, family, {device: find_device(device)})


def of(found: OpFeatures, name: str) -> np.ndarray:
    return found.X[:, found.names.index(name)]


@pytest.mark.parametrize("op", ["fwd", "bwd_data", "bwd_weights"])
def test_all_directions_do_the_work_of_the_forward_problem(op: str) -> None:
    rows = ({**CONV, "op": op}, {**CONV, **STRIDED, "op": op}, {**CONV, **VOLUME, "op": op})
    found = features("tuned/conv", "mi210", *rows)
    plain = 2 * 32 * 28**2 * 128 * 128 * 9
    assert found.flops.tolist() == [
        plain,
        2 * 32 * 14**2 * 128 * (64 / 4) * 9,
        plain * 8 * 3,
    ]
    x, w = 32 * 128 * 28**2, 128 * 128 * 9
    assert found.moved.tolist() == [
        2 * (2 * x + w),
        2 * (32 * 64 * 28**2 + 128 * 16 * 9 + 32 * 128 * 14**2),
        2 * (2 * 8 * x + 3 * w),
    ]
    assert (found.base_s > found.roofline_s).all()


def test_channels_first_are_transposed_for_the_implicit_product() -> None:
    found = features("tuned/conv", "mi210", CONV, {**CONV, "channels_last": 1})
    turned, straight = (
        of(found, f"log_{name}_base") + np.log2(found.base_s) for name in ("turned", "straight")
    )
    # Input and output are read and written once more, beside 12 us of launches.
    images = 2 * 2 * 32 * 128 * 28**2 * 2
    assert 2 ** turned[0] - 2 ** straight[1] == pytest.approx(
        12e-6 + 1.2 * images / 1638e9, rel=1e-3
    )


def test_algorithms_are_taken_where_there_are_any() -> None:
    rows = ({**CONV, "kh": 1, "kw": 1, "pad_h": 0, "pad_w": 0}, CONV, {**CONV, "dtype": "bf16"})
    found = features("tuned/conv", "mi210", *rows)
    # 20 stands for none: products without columns are for single taps, Winograd for 3 x 3 filters.
    assert (of(found, "log_batched_base") < 20).tolist() == [True, False, False]
    assert (of(found, "log_winograd_base") < 20).tolist() == [False, True, False]
    # Vega has no matrix units; MI300X's library no implicit products in one kernel.
    old, new = features("tuned/conv", "mi60", CONV), features("tuned/conv", "mi300x", CONV)
    assert of(old, "log_turned_base")[0] == 20 and of(old, "log_single_base")[0] < 20
    assert of(new, "log_turned_base")[0] < 20 and of(new, "log_single_base")[0] == 20


def test_images_that_are_unfolded_one_by_one_cost_launches_each() -> None:
    # Dilated filters in three dimensions leave little else.
    rows = [{**CONV, **VOLUME, "dil_h": 2, "n": n, "dtype": "bf16"} for n in (64, 128)]
    one, two = features("tuned/conv", "mi210", *rows).base_s
    assert two - one > 64 * 38e-6


def test_a_tuned_product_takes_the_fastest_tile() -> None:
    found = features("tuned/linear", "mi308x", {**PRODUCT, "m": 2048, "n": 1280})
    # 80 tiles of 256 x 128 on 80 cores, at 0.56 of the peak; before the products 1000 cycles, for
    # the result 2 bytes an element at 20 bytes a clock.
    tile = 2 * 256 * 128 * 4096 * 80 / (0.56 * 688.1e12)
    tile += (1000 + 2 * 256 * 128 / 20) / 2.1e9
    memory = ((2048 + 1280) * 4096 + 2 * 2048 * 1280) / (0.65 * 5300e9)
    assert found.base_s[0] == pytest.approx(
        FIT.floor_cycles / 2.1e9 + (tile**4 + memory**4) ** 0.25
    )


def test_power_slows_the_larger_of_two_like_chips() -> None:
    share = {
        name: of(features("tuned/linear", name, PRODUCT), "clock_share")[0]
        for name in ("mi308x", "mi300x", "h100-sxm", "h20", "a100-sxm-80gb")
    }
    # 750 W over 1307 TFLOP/s of 0.73 pJ, 700 W over 989 of 0.92 pJ.
    assert share["mi300x"] == pytest.approx(750 / (1307.4 * 0.73), rel=1e-3)
    assert share["h100-sxm"] == pytest.approx(700 / (989.4 * 0.92), rel=1e-3)
    assert share["mi308x"] == share["h20"] == share["a100-sxm-80gb"] == 1


def test_rotated_operands_come_from_memory() -> None:
    rows = [{**PRODUCT, "m": 16, "n": 1024, "rotated": r} for r in (0, 1)]
    warm, cold = features("tuned/linear", "mi300x", *rows).roofline_s
    assert cold / warm == pytest.approx(17200 / 5300, rel=1e-3)


def test_microscaled_operands_carry_their_scales() -> None:
    found = features("tuned/linear", "mi355x", {**PRODUCT, "dtype": "mxfp4"})
    # 4 bits and a scale of 8 bits for each 32 values; the result is 16 bits wide.
    assert found.moved[0] == (4 + 8 / 32) / 8 * 2 * 4096**2 + 2 * 4096**2


@pytest.mark.parametrize(
    "row",
    [
        *({**CONV, **change} for change in ({}, STRIDED, VOLUME, {"dil_h": 2, "dil_w": 2})),
        {**CONV, "channels_last": 1},
        *({**CONV, **STRIDED, "op": op} for op in ("bwd_data", "bwd_weights")),
        PRODUCT,
        {**PRODUCT, "family": "bmm", "op": "bmm", "b": 4, "dtype": "fp64", "trans_a": 1},
    ],
)
def test_texts_hold_the_operator_and_its_work(row: dict[str, object]) -> None:
    text = op_ir(row)
    kernel = kernel_from_ir(text)
    assert read_op(text) == row and kernel.ir == text
    key = f"{row['method']}/{row['family']}"
    found = features(key, "mi300x", row)
    assert kernel.bytes_in + kernel.bytes_out == found.moved[0]
    if "convolution(" in text:
        client = jax.devices("cpu")[0].client
        cost = _jax.hlo_module_cost_analysis(client, _hlo.hlo_module_from_text(text))
        assert kernel.kind == "conv" and kernel.flops == cost["flops"]
        assert kernel.flops <= found.flops[0]  # without padding
    else:
        assert kernel.flops == found.flops[0]


def test_queries_fill_in_what_is_usual() -> None:
    row = parse_op("tuned/conv op=bwd_data n=32 c=64 k=64 h=56 kh=3 pad_h=1 dtype=bf16")
    assert (row["w"], row["kw"], row["pad_w"], row["ndim"], row["groups"]) == (56, 3, 1, 2, 1)
    with pytest.raises(ProgramError, match=r"'sideways'.*bwd_weights"):
        parse_op("tuned/conv op=sideways n=32 c=64 k=64 h=56 kh=3 dtype=bf16")
    with pytest.raises(ProgramError, match="needs op"):
        parse_op("tuned/conv n=32 c=64 k=64 h=56 kh=3 dtype=bf16")
    row = parse_op("tuned/linear m=16 n=4096 k=4096 dtype=mxfp4")
    assert (row["trans_b"], row["rotated"], row["preshuffled"]) == (1, 1, 0)
