"""Chips that do not exist, priced as the device that they start from times the ratio of physics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import find_device, load_designs, load_device_file
from opcast.features.devices.device import DeviceSpec
from opcast.features.devices.rates import RATES
from opcast.features.lowering.lower import lower
from opcast.models.gpu.operator_library import Operators
from opcast.models.trust.designs import FAR, OUTSIDE, SAME, SIBLING, drift
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import explain_operator, predict_op
from opcast.predict.program.predictor import load
from opcast.workflows.reports.device_rows import build_program

from ...support.designs import BASES, designs, linked, operators

#: As for the physics (tests/features/operators/test_designs.py).
MOST, SLOWER = 0.03, 0.0015
#: One of each kind of product, attention and pass, and two of other methods.
FAMILIES = ("graph/linear", "graph/generation_attention", "graph/context_attention", "graph/moe",
            "kernel/elementwise", "eager/linear", "tuned/linear")  # fmt: skip
BIG = "linear m=4096 n=4096 k=4096 dtype=bf16"


@pytest.fixture(scope="module")
def priced() -> Callable[[str, pd.DataFrame, DeviceSpec], np.ndarray]:
    """Latency and ends of operators of a family on a device, shape ``(3, n)``."""
    learned = Operators()

    def price(family: str, rows: pd.DataFrame, device: DeviceSpec) -> np.ndarray:
        found = learned.predict(family, rows, device)
        return np.array([found.latency, found.lo, found.hi])

    return price


@pytest.fixture
def own(tmp_path) -> Callable[[str], str]:
    """Path of the file of a design."""

    def write(text: str) -> str:
        path = tmp_path / f"d{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(f"name: mine\n{text}")
        return str(path)

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_on_random_designs(family, priced):
    """A copy is its base to the bit, links move nothing, and no rate has a cliff or slows."""
    rng = np.random.default_rng(FAMILIES.index(family))
    rows = operators(rng, family, 16)
    for name in BASES[1::2]:
        base = find_device(name)
        copy = replace(base, name="copy", aliases=(), base=name)
        expected = priced(family, rows, base)
        assert np.array_equal(priced(family, rows, copy), expected)
        assert np.array_equal(priced(family, rows, linked(copy, 0.5)), expected)
    for device in designs(rng, 4):
        here = priced(family, rows, device)
        assert (here[1] <= here[0]).all() and (here[0] <= here[2]).all()
        for rate in RATES.values():
            step = np.log(priced(family, rows, rate(device, 1.01))[0] / here[0])
            assert np.abs(step).max() < MOST
            assert step.max() < SLOWER


@pytest.mark.parametrize(
    "program",
    [
        "mlp batch=512 features=512 width=512 layers=2 mode=train",
        pytest.param("resnet depth=18 batch=2", marks=pytest.mark.slow),
    ],
)
def test_programs_on_random_designs(program):
    """The same of the kernels of whole programs, and of the programs."""
    predictor = load()
    base = find_device("h100-sxm")
    lowered = lower(build_program(program), "fused", device=base)
    model = predictor.model_for(base)

    def times(device: DeviceSpec) -> np.ndarray:
        return model.predict_kernels(lowered.kernels, device).latency

    copy = replace(base, name="copy", aliases=(), base=base.name)
    assert np.array_equal(times(copy), times(base))
    assert np.array_equal(times(linked(copy, 2.0)), times(base))
    whole = [model.predict_program(lowered, d) for d in (base, linked(copy, 2.0))]
    assert len({(p.latency, p.lo, p.hi) for p in whole}) == 1
    for rate in RATES.values():
        # Its own fastest and slowest, too: the matrix unit's peak cut 7-fold.
        for device in (copy, rate(copy, 1 / 7)):
            here = times(device)
            step = np.log(times(rate(device, 1.01)) / here)
            assert np.abs(step).max() < MOST
            assert step.max() < SLOWER


def test_a_design_is_as_known_as_it_is_near(own):
    """H100 with links of its own, 10 % more memory rate, and a seventh of the tensor peak."""
    links = predict_op(OperatorCase(BIG, own("base: h100-sxm\nlink_gbps: 900\n")))
    known = predict_op(OperatorCase(BIG, "h100-sxm"))
    assert replace(links, device="h100-sxm") == known and known.scope == "known"
    decode = "generation_attention batch=64 q_heads=32 kv_heads=8 head_dim=128 kv_len=8192"
    rate = own("base: h100-sxm\nhbm_bandwidth_gbps: 3685\n")
    assert predict_op(OperatorCase(f"{decode} dtype=bf16", rate)).scope == "sibling"
    cut = own("base: h100-sxm\npeak_tflops: {bf16: 141.3, f16: 141.3}\n")
    found = predict_op(OperatorCase(BIG, cut))
    assert found.scope == "unseen" and not found.in_domain
    assert "mine takes 6 times as long as h100-sxm" in found.outside[0]
    # What the cut does not reach is as known as before.
    assert predict_op(OperatorCase(f"{decode} dtype=bf16", cut)).scope == "known"
    # By hand: 2 · 4096³ at a seventh of the peak, and no less.
    assert found.lo_us >= 2 * 4096**3 / 141.3e12 * 1e6 * (1 - 1e-9)
    explained = explain_operator(OperatorCase(BIG, cut))
    assert explained.latency_us == pytest.approx(found.latency_us)
    parts = explained.baseline + sum(part.log_ratio for part in explained.contributions)
    assert parts == pytest.approx(explained.log_ratio, abs=0.01)


def test_more_clock_at_the_same_peak_is_a_little_faster(own):
    """What was met: 672 µs at 1,500 MHz and 1,849 at 1,600."""
    text = "base: h100-sxm\ncore_count: 32\nlanes_per_core: 528\npeak_tflops: {bf16: 989.4}\n"
    files = [own(f"{text}boost_mhz: {mhz}\n") for mhz in (1500, 1550, 1600, 1650)]
    times = [predict_op(OperatorCase(BIG, file)).latency_us for file in files]
    assert all(0.97 * slow < fast <= slow for slow, fast in pairwise(times))


def test_a_maker_that_nobody_measured_is_priced_by_what_its_chip_has(own):
    """What was met: 33 µs on every operator, and 8 TB/s behind an H100's 3.35."""
    text = (
        "platform: gpu\ncore_count: 160\nlanes_per_core: 128\nboost_mhz: 2000\nl2_mb: 100\n"
        "peak_tflops: {bf16: 2000}\nhbm_bandwidth_gbps: 8000\nmemory_gb: 192\n"
    )
    for op in ("linear m=16 n=4096 k=4096 dtype=bf16 backend=vllm", f"{BIG} backend=vllm"):
        acme, unsaid = (predict_op(OperatorCase(op, own(v + text))) for v in ("vendor: Acme\n", ""))
        assert acme.latency_us == unsaid.latency_us
        assert acme.latency_us < predict_op(OperatorCase(op, "h100-sxm")).latency_us


def test_designs_remember_their_base(own):
    assert load_device_file(own("base: v5e\n")).base == "tpu-v5e"
    found = load_designs(own("base: h100-sxm\nhbm_bandwidth_gbps: [2000, 4000]\n"))
    assert [d.device.base for d in found] == ["h100-sxm", "h100-sxm"]
    assert find_device("h800-sxm").base == ""


def test_the_error_of_a_ratio_saturates():
    ratio = np.exp([0.0, 0.1, -0.1, 5.0])
    half = drift(ratio)
    assert half[0] == 0.0 and half[1] == half[2] == pytest.approx(FAR * np.tanh(0.1 / FAR))
    assert half[3] == pytest.approx(FAR)
    assert SAME < SIBLING < OUTSIDE


def test_a_format_that_a_chip_was_never_measured_with_is_not_known():
    """What was met: 870 µs of nvfp4 on Hopper, below the 1,111 of its fallback, and "known"."""
    big = "linear m=8192 n=8192 k=8192"
    found = predict_op(OperatorCase(f"{big} dtype=nvfp4", "h100-sxm"))
    wide = predict_op(OperatorCase(f"{big} dtype=bf16", "h100-sxm"))
    # By hand: 2 · 8192³ at 989.4 TFLOP/s of bf16, since Hopper has no units for 4-bit floats.
    assert found.roofline_us == pytest.approx(2 * 8192**3 / 989.4e12 * 1e6)
    assert found.latency_us > 0.9 * wide.latency_us
    assert (found.scope, wide.scope) == ("unseen", "known")
    assert found.hi_us / found.lo_us > wide.hi_us / wide.lo_us
    # Blackwell has them.
    own = predict_op(OperatorCase(f"{big} dtype=nvfp4 backend=vllm", "rtx-pro-6000"))
    assert own.scope == "known" and own.bound == "compute"
