"""Chips that do not exist, priced as the device that they start from times the ratio of physics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import (
    base_of,
    find_device,
    load_designs,
    load_device_file,
)
from opcast.features.devices.device import DeviceSpec
from opcast.features.lowering.lower import lower
from opcast.models.gpu.memory_passes import launch_seconds, shipped_constants
from opcast.models.gpu.operator_library import Operators
from opcast.models.trust.designs import FAR, OUTSIDE, SAME, SIBLING, drift
from opcast.predict.designs import RATES
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import explain_operator, predict_op
from opcast.predict.program.predictor import load
from opcast.workflows.reports.device_rows import build_program

from ...support.cases import every, later
from ...support.designs import BASES, designs, linked, operators

#: As for the physics (tests/features/operators/test_designs.py).
MOST, SLOWER = 0.03, 0.0015
#: One of each kind of product, attention and pass, and two of other methods.
FAMILIES = ("graph/linear", "graph/generation_attention", "graph/context_attention", "graph/moe",
            "kernel/elementwise", "eager/linear", "tuned/linear")  # fmt: skip
BIG = "linear m=4096 n=4096 k=4096 dtype=bf16"


@pytest.fixture(scope="module")
def priced() -> Callable[[str, pd.DataFrame, Sequence[DeviceSpec]], np.ndarray]:
    """Latency and ends of ``n`` operators of a family on devices, shape ``(devices, 3, n)``."""
    learned = Operators()

    def price(family: str, rows: pd.DataFrame, devices: Sequence[DeviceSpec]) -> np.ndarray:
        named = {device.name: device for device in devices}
        assert len(named) == len(devices)
        frame = pd.concat([rows.assign(device=name) for name in named], ignore_index=True)
        found = learned.family(family).predict(frame, named)
        ends = np.array([found.latency, found.lo, found.hi])
        return ends.reshape(3, len(named), len(rows)).swapaxes(0, 1)

    return price


def faster(device: DeviceSpec) -> list[DeviceSpec]:
    """The device with each of its rates in turn 1 % faster."""
    return [replace(r(device, 1.01), name=f"{device.name}+{key}") for key, r in RATES.items()]


def check_steps(here: np.ndarray, there: np.ndarray) -> None:
    """Assert that latencies of :func:`faster` have no cliff and are not longer."""
    step = np.log(there / here)
    assert np.abs(step).max() < MOST
    assert step.max() < SLOWER


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
        far = replace(linked(copy, 0.5), name="linked")
        expected, same, apart = priced(family, rows, [base, copy, far])
        assert np.array_equal(same, expected)
        assert np.array_equal(apart, expected)
    for device in designs(rng, 4):
        here, *there = priced(family, rows, [device, *faster(device)])
        assert (here[1] <= here[0]).all() and (here[0] <= here[2]).all()
        check_steps(here[0], np.array(there)[:, 0])


def anonymous(spec: DeviceSpec, architecture: bool) -> DeviceSpec:
    """The chip as of a file that names no base, with or without its architecture."""
    named = spec.architecture if architecture else ""
    return replace(spec, name="zephyr-1", aliases=(), base="", architecture=named)


@pytest.mark.parametrize("architecture", [True, False])
@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_operators_on_random_chips_that_name_no_base(family, architecture, priced):
    """No rate has a cliff or slows, and neither a name nor a maker that nobody knows moves it."""
    rng = np.random.default_rng(FAMILIES.index(family))
    rows = operators(rng, family, 12)
    for device in designs(rng, len(BASES)):
        device = anonymous(device, architecture)
        alike = [replace(device, name="zephyr-2"), replace(linked(device, 0.5), name="zephyr-3")]
        if device.runs_cuda:
            alike.append(replace(device, name="zephyr-4", vendor="Acme"))
        here, *found = priced(family, rows, [device, *alike, *faster(device)])
        for same in found[: len(alike)]:
            assert np.array_equal(same, here)
        if not architecture:
            # What nobody knows may be wrong by the difference of two architectures.
            assert (here[2] / here[1] > 1.6).all()
        check_steps(here[0], np.array(found[len(alike) :])[:, 0])


@pytest.mark.parametrize("name", BASES)
def test_a_copy_that_names_no_base_is_the_chip_to_the_bit(name, priced):
    rows = operators(np.random.default_rng(0), "graph/linear", 8)
    base = find_device(name)
    copy = anonymous(base, architecture=True)
    assert base_of(copy) == base
    same, expected = priced("graph/linear", rows, [copy, base])
    assert np.array_equal(same, expected)


def test_no_rate_changes_what_a_chip_starts_from():
    for device in designs(np.random.default_rng(5), 4 * len(BASES)):
        for architecture in (True, False):
            chip = anonymous(device, architecture)
            start = base_of(chip)
            assert start is not None and start.vendor == chip.vendor
            assert not architecture or start.architecture == chip.architecture
    assert base_of(find_device("h100-sxm")) is None and base_of(find_device("tpu-v5e")) is None


@pytest.mark.parametrize(
    "program",
    [
        "mlp batch=512 features=512 width=512 layers=2 mode=train",
        later("resnet depth=18 batch=2"),
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
            check_steps(times(device), times(rate(device, 1.01)))


@pytest.mark.parametrize("name", ["h100-sxm", "mi300x"])
def test_a_longer_floor_is_a_longer_launch(name):
    """Every launch is longer by the ratio of the floors, and takes the board's idle energy."""
    predictor, base = load(), find_device(name)
    lowered = lower(
        build_program("mlp batch=64 features=512 width=512 layers=4"), "fused", device=base
    )
    copy = replace(base, name="copy", aliases=(), base=name)
    runs = sum(k.multiplicity for k in lowered.kernels if k.takes_time)
    launch = launch_seconds(base, shipped_constants().memory) * 1e6
    here = predictor.predict_lowered(lowered, copy)
    before = here
    for factor in (1.5, 3.0, 50.0):
        found = predictor.predict_lowered(lowered, replace(copy, floor=factor * base.floor))
        grown = found.latency_us - here.latency_us
        assert grown == pytest.approx(runs * launch * (factor - 1.0), rel=0.15)
        assert found.energy.value > before.energy.value
        assert all(k.latency_us >= 0.999 * factor * launch for k in found.kernels)
        before = found
    shorter = predictor.predict_lowered(lowered, replace(copy, floor=0.5 * base.floor))
    assert shorter.latency_us < here.latency_us and shorter.energy.value < here.energy.value


def test_what_no_time_follows_widens_the_interval_and_is_said(own):
    named = f"{BIG} backend=vllm"
    base = predict_op(OperatorCase(named, "h100-sxm"))
    half = predict_op(OperatorCase(named, own("base: h100-sxm\nshared_kb_per_core: 114\n")))
    # A product moves as many bytes as the root of what holds its tiles is small.
    assert half.latency_us == base.latency_us and half.lo_us == base.lo_us
    assert half.hi_us == pytest.approx(2**0.5 * base.hi_us)
    assert any("0.5 × the shared memory" in note for note in half.notes)
    # A pass keeps none.
    files = [own(f"base: h100-sxm\nshared_kb_per_core: {kb}\n") for kb in (114, 228)]
    found = [predict_op(OperatorCase("softmax rows=4096 cols=4096 dtype=fp32", f)) for f in files]
    assert len({(p.latency_us, p.lo_us, p.hi_us) for p in found}) == 1
    parts = predict_op(OperatorCase(named, own("base: h100-sxm\ncores_per_die: 33\n")))
    assert parts.latency_us == base.latency_us and not parts.in_domain and parts.scope == "unseen"
    assert parts.hi_us > 1.8 * base.latency_us
    assert any("4 dies" in note and "is not priced" in note for note in parts.notes)


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
