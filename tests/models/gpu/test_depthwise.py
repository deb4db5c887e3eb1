"""Depthwise convolutions against hand-computed loads and traffic, and against measured ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.models.gpu.estimator import GpuEstimator
from opcast.models.gpu.memory_passes import (
    Constants,
    depthwise_seconds,
    launch_seconds,
    shipped_constants,
)
from opcast.models.gpu.routes import CONV, DEPTHWISE, describe, filter_gradients

MEASURED = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[4] / "shared" / "data"))
    / "published-kernels"
    / "conv.parquet"
)
A100 = find_device("a100-sxm-80gb")
#: Loads that an A100 starts in a second: 32 in a clock of each of its 108 multiprocessors.
LOADS = 32 * 108 * 1.41e9


def kernel(body: str) -> Kernel:
    return kernel_from_ir(f"HloModule m\nENTRY e {{\n{body}\n}}\n")


FORWARD = kernel(
    "  x = bf16[64,56,56,96] parameter(0)\n  w = bf16[7,7,1,96] parameter(1)\n"
    "  ROOT r = bf16[64,56,56,96] convolution(x, w), window={size=7x7 pad=3_3x3_3},\n"
    "    dim_labels=b01f_01io->b01f, feature_group_count=96"
)
FILTER = kernel(
    "  x = bf16[64,56,56,96] parameter(0)\n  g = bf16[64,56,56,96] parameter(1)\n"
    "  ROOT r = bf16[7,7,1,96] convolution(x, g), window={size=56x56 pad=3_3x3_3},\n"
    "    dim_labels=f01b_i01o->01bf, batch_group_count=96"
)
#: Outputs of the forward pass times taps.
PRODUCTS = 64 * 56 * 56 * 96 * 49


def test_convolutions_of_one_channel_a_group_have_their_own_route() -> None:
    described = describe([FORWARD, FILTER], A100)
    assert described.route.tolist() == [DEPTHWISE, DEPTHWISE]
    assert filter_gradients(described.row).tolist() == [False, True]


def test_filter_gradients_stay_products_where_miopen_has_no_direct_kernel() -> None:
    described = describe([FORWARD, FILTER], find_device("mi300x"))
    assert described.route.tolist() == [DEPTHWISE, CONV]


def test_large_windows_wait_for_loads() -> None:
    estimator = GpuEstimator(constants=Constants())
    forward, gradient = estimator.predict([FORWARD, FILTER], A100).latency
    launch = launch_seconds(A100, Constants().memory)
    # Two loads for a product, four for one of a filter's gradient; memory is far from its limit.
    assert forward - launch == pytest.approx(2 * PRODUCTS / LOADS, rel=0.02)
    assert gradient - launch == pytest.approx(4 * PRODUCTS / LOADS, rel=0.02)


def test_without_loads_the_elements_are_read_one_by_one() -> None:
    memory = Constants().memory
    elements = np.array([1e9])
    one = np.ones(1)
    forward, filters = (
        float(depthwise_seconds(2 * elements, elements, one, np.array([f]), A100, memory)[0])
        for f in (False, True)
    )
    # Two bytes an element, and two more for reading it alone.
    assert filters == pytest.approx(2e9 / (A100.bandwidth * memory.hbm))
    assert forward == pytest.approx(2 * filters)


def test_cores_that_are_not_described_are_those_of_the_vector_rate() -> None:
    memory = Constants().memory
    one = np.ones(1)
    unknown = replace(A100, core_count=1)
    found = depthwise_seconds(one, one, np.array([1e12]), np.array([False]), unknown, memory)
    assert found[0] == pytest.approx(2e12 / (A100.vector_peak("f32") / 8))


@pytest.mark.skipif(not MEASURED.is_file(), reason="needs the published convolutions")
def test_published_depthwise_convolutions_are_closer_than_as_passes() -> None:
    rows = pd.read_parquet(MEASURED)
    rows = rows[(rows.groups > 1) & (rows.groups == rows.c) & (rows.k == rows.c) & (rows.ndim == 2)]
    rows = rows[rows.device.isin(("mi100", "mi210", "mi250x", "mi60")) & (rows.kh > 1)]
    wide = rows.select_dtypes("integer").columns
    rows = rows.astype(dict.fromkeys(wide, "int64"))
    high = (rows.h + 2 * rows.pad_h - rows.dil_h * (rows.kh - 1) - 1) // rows.stride_h + 1
    long = (rows.w + 2 * rows.pad_w - rows.dil_w * (rows.kw - 1) - 1) // rows.stride_w + 1
    outputs = rows.n * rows.c * high * long
    rows = rows.assign(products=outputs * rows.kh * rows.kw)
    rows = rows.assign(elements=outputs + rows.n * rows.c * rows.h * rows.w)
    rows = rows[rows.elements > 1e7]
    assert len(rows) > 300
    errors, passes = [], []
    memory = shipped_constants().memory
    for name, own in rows.groupby("device"):
        device = find_device(str(name))
        elements = own.elements.to_numpy(float)
        moved = elements * np.where(own.dtype == "fp32", 4.0, 2.0)
        filters = (own.direction == "bwd_weights").to_numpy()
        found = depthwise_seconds(
            moved, elements, own.products.to_numpy(float), filters, device, memory
        )
        measured = own.latency_us.to_numpy(float) * 1e-6
        errors.append(np.abs(found / measured - 1))
        passes.append(np.abs(moved / device.bandwidth / measured - 1))
    assert np.median(np.concatenate(errors)) < 0.4
    assert np.median(np.concatenate(passes)) > 0.5
