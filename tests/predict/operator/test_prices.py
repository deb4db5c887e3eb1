"""Prices of operators: no time below what the device's data sheet allows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.operators.op import OP_FAMILIES, Op, least_seconds
from opcast.predict.operator.prices import PROBE, Reach, eager_row, price, roofline_seconds


def _op(draw: random.Random) -> Op:
    family = draw.choice(list(OP_FAMILIES))
    sizes = {name: 2 ** draw.randint(0, 13) for name in OP_FAMILIES[family].sizes}
    sizes |= {"causal": 1, "tp": 1, "ep": 1} if "tp" in sizes or "causal" in sizes else {}
    shape = tuple(sizes[name] for name in OP_FAMILIES[family].sizes)
    return Op(family, shape, draw.choice(("bf16", "fp8", "f32", "nvfp4")))


@pytest.mark.parametrize("device", ["h100-sxm", "mi300x", "tpu-v5e", "v100-sxm-16gb"])
def test_no_end_of_an_interval_lies_below_the_floor(device: str) -> None:
    draw, spec = random.Random(7), find_device(device)
    ops = [_op(draw) for _ in range(300)]
    # Kernels that reach all of the peak and wait for nothing: their lower ends would lie below it.
    times = price(ops, [None] * 300, [Reach(0.0, 1.0, 1.0)] * 300, spec, None).times
    least = least_seconds(ops, spec)
    assert (times >= least[:, None]).all()
    assert (times[:, 1] == least).any()


def test_the_floor_of_a_product_by_hand() -> None:
    """An H100: 989.4 TFLOP/s in bf16; 3.35 TB/s but for what its 50 MiB of L2 may hold.

    Of 75 MiB it may hold 25, twice its capacity less those; of a gigabyte nothing.
    """
    spec = find_device("h100-sxm")
    large, wide, near = Op("linear", (8192,) * 3), Op("move", (10**9,)), Op("move", (75 * 2**20,))
    found = least_seconds([large, wide, near], spec)
    assert found[0] == pytest.approx(2 * 8192**3 / 989.4e12)
    assert found[1] == pytest.approx(1e9 / 3.35e12)
    cached = 25 * 2**20 / spec.levels[0].bandwidth
    assert found[2] == pytest.approx(50 * 2**20 / 3.35e12 + cached)


def test_one_roofline_adds_or_overlaps() -> None:
    spec = find_device("h100-sxm")
    op = Op("linear", (64, 8192, 8192))
    work, stream = op.flops() / 989.4e12 / 0.5, op.moved() / 3.35e12 / 0.5
    beside, after = (Reach(1e-6, 0.5, 0.5, beside=own) for own in (True, False))
    found = roofline_seconds([op, op], [beside, after], spec)
    assert found == pytest.approx(np.array([max(work, stream), work + stream]) + 1e-6)


def test_bytes_moved_are_a_relu_timed_alone() -> None:
    row = eager_row(Op("move", (2 * 4 * 1024 * 10,), "f32"))
    assert (row["op"], row["rows"], row["cols"], row["n_in"]) == ("relu", 10, 1024, 1)
    assert eager_row(PROBE) == {**row, "rows": 1}
