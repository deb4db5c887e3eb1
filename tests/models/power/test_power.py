"""The law of power, energies made of it, and the model learned from measured boards."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DeviceError, ModelError
from opcast.common.interval import Interval
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.models.core.registry import PRETRAINED
from opcast.models.operators import OpModel
from opcast.models.power.caps import cap_share, capped
from opcast.models.power.energy import cost_fields, cost_of, energy, energy_fields, starved
from opcast.models.power.law import (
    PowerLaw,
    Silicon,
    Work,
    board_law,
    fit_law,
    grown_peaks,
    held,
    shipped_law,
)
from opcast.models.power.model import PowerModel
from opcast.models.power.rows import power_rows
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.locate import find_model
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import predict_op
from opcast.simulate.step.named_workloads import read_workload
from opcast.simulate.step.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))
LAW = PowerLaw(0.2, (0.3, 0.1), (0.5, 1.0), 0.4)


def work(matrix: float, memory: float, busy: float = 1.0, attention: bool = False) -> Work:
    one = np.ones(1)
    return Work(matrix * one, memory * one, busy * one, np.array([attention]))


def test_demand_is_the_sum_of_what_units_ask_for() -> None:
    assert LAW.demand(work(0.6, 0.5))[0] == pytest.approx(0.2 + 0.3 + 0.5 * 0.6 + 0.4 * 0.5)
    assert LAW.demand(work(0.6, 0.5, attention=True))[0] == pytest.approx(0.2 + 0.1 + 0.6 + 0.2)
    assert LAW.demand(work(0.0, 0.0, busy=0.0))[0] == pytest.approx(0.2)


def test_boards_hold_their_limit() -> None:
    assert held(np.array([0.3]))[0] == pytest.approx(0.3, rel=1e-3)
    assert held(np.array([1.0]))[0] == pytest.approx(2 ** (-1 / 8))
    demand = np.linspace(0.1, 3, 50)
    assert (np.diff(held(demand)) > 0).all() and (held(demand) < 1.0).all()


def test_utilisations_never_exceed_the_data_sheet() -> None:
    # 2e12 FLOP and 1e9 bytes in 1 ms, of which 0.1 ms fixed, at 1 PFLOP/s and 4 TB/s.
    found = Work.of(
        np.array([2e12]), np.array([1e9]), np.array([1e-3]), np.array([1e-4]), 1e15, 4e12,
        np.array([False]),
    )  # fmt: skip
    assert (found.matrix[0], found.memory[0]) == (1.0, 0.25)
    assert found.busy[0] == pytest.approx(0.9)


def test_the_fit_finds_the_law_that_made_the_rows() -> None:
    draw = np.random.default_rng(0)
    n = 400
    made = replace(LAW, memory=0.3, stalled=0.5, silicon={"hopper": Silicon("h200-sxm", 0.2)})
    some = Work(draw.random(n), draw.random(n), np.ones(n), draw.random(n) < 0.5)
    first = np.arange(n) < 200
    boards = [(find_device("h200-sxm"), first), (find_device("h100-pcie"), ~first)]
    share = np.zeros(n)
    for board, at in boards:
        share[at] = made.on(board).share(some.take(at))
    found = fit_law(boards, some, share, np.ones(n), made.silicon)
    assert found.matrix == pytest.approx(made.matrix, rel=0.05)
    assert found.stalled == pytest.approx(0.5, abs=0.05) and found.idle == 0.2


MEASURED = replace(LAW, idle=0.25, silicon={"hopper": Silicon("h200-sxm", 0.2)})


def test_a_sibling_has_the_joules_of_the_measured_chip() -> None:
    """H200: 700 W, 132 cores at 1980 MHz, 989.4 TFLOP/s, 4.8 TB/s. H100 PCIe has other rates."""
    own = MEASURED.on(find_device("h200-sxm"))
    assert (own.idle, own.active, own.matrix, own.memory) == (0.2, (0.3, 0.1), (0.5, 1.0), 0.4)
    pcie = MEASURED.on(find_device("h100-pcie"))
    assert 350 * pcie.idle == pytest.approx(700 * 0.2 * 114 / 132)
    assert 350 * pcie.active[0] == pytest.approx(700 * 0.3 * 114 * 1755 / (132 * 1980))
    assert 350 * pcie.matrix[0] / 756.5e12 == pytest.approx(700 * 0.5 / 989.4e12, rel=1e-3)
    assert 350 * pcie.memory / 2000e9 == pytest.approx(700 * 0.4 / 4800e9)


def test_chips_that_nobody_measured() -> None:
    """One of the catalogue takes shares of its own limit; a design pays its base's joules."""
    mi300x = find_device("mi300x")
    assert MEASURED.on(mi300x) == replace(MEASURED, idle=0.25)
    wide = replace(mi300x, name="wide", levels=(*mi300x.levels[:-1], doubled(mi300x)))
    assert MEASURED.on(wide).memory == pytest.approx(2 * 0.4)
    # Of what idles, 0.4 of 0.3 + 0.5 + 0.4 is the memory's, of which there is twice as much.
    assert MEASURED.on(wide).idle == pytest.approx(0.25 * (0.3 + 0.5 + 2 * 0.4) / 1.2)
    assert MEASURED.on(wide).matrix == (0.5, 1.0)
    # Without an architecture: the joules of the newest measured chip, cores by the own limit.
    alone = MEASURED.on(replace(mi300x, name="alone", architecture=""))
    assert (alone.idle, alone.active) == (0.25, LAW.active)
    assert alone.memory * 750 / mi300x.bandwidth == pytest.approx(0.4 * 700 / 4800e9)


def doubled(spec: DeviceSpec) -> MemoryLevel:
    return replace(spec.levels[-1], bandwidth=2.0 * spec.bandwidth)


@pytest.mark.parametrize("name", ["h200-sxm", "b200", "mi300x", "l40s", "v100-pcie"])
def test_the_same_bytes_at_twice_the_bandwidth_do_not_take_half_the_joules(name: str) -> None:
    """Time × power is joules a byte, and what idles and waits for bytes over the time."""
    base, size = find_device(name), 1e9
    wide = replace(base, name="wide", levels=(*base.levels[:-1], doubled(base)))
    law = board_law(base)
    # Twice the memory idles, and cores handle bytes at 1.6 times the base's bandwidth.
    parts = law.active[0] + law.matrix[0] + law.memory
    rest = (law.idle + law.active[0] * 0.8**law.stalled,
            law.idle * (1 + law.memory / parts) + law.active[0] * 1.6)  # fmt: skip
    joules = []
    for spec, watts in zip((base, wide), rest, strict=True):
        seconds = size / spec.bandwidth / 0.8
        demand = board_law(spec).demand(work(0.0, 0.8))[0]
        joules.append(demand * spec.power_w * seconds)
        moved = law.memory * base.power_w / base.bandwidth * size
        assert joules[-1] == pytest.approx(watts * base.power_w * seconds + moved)
    assert joules[0] > joules[1] > 0.55 * joules[0]


def test_products_at_a_seventh_of_the_peak_take_the_same_joules_an_operation() -> None:
    h100 = find_device("h100-sxm")
    slow = replace(h100, name="slow", peak_flops={k: v / 7 for k, v in h100.peak_flops.items()})
    law, own = board_law(h100), board_law(slow)
    assert (own.active, own.matrix) == (law.active, law.matrix)
    assert grown_peaks(slow, ["bf16"]) == pytest.approx(1 / 7)
    assert grown_peaks(h100, ["f32"]) == 1.0
    # A seventh of the operations a second takes a seventh of the power.
    rates = np.ones(1), np.zeros(1), np.ones(1), np.zeros(1)
    some = Work.of(*rates, 1.0, 1.0, np.zeros(1, bool), grown_peaks(slow, ["bf16"]))
    assert some.matrix[0] * own.matrix[0] == pytest.approx(law.matrix[0] / 7)
    # Matrix units of that size leak less.
    assert 0.6 * law.idle < own.idle < 0.8 * law.idle


def test_twice_the_cores_leak_but_do_not_work_twice() -> None:
    """A stream takes its bytes' joules, as cores that wait, and idle power of more hardware."""
    base = find_device("mi300x")
    peaks, lanes = ({k: 2 * v for k, v in r.items()} for r in (base.peak_flops, base.vector_flops))
    more = replace(
        base, name="more", base=base.name, core_count=608, power_w=1480.0,
        peak_flops=peaks, vector_flops=lanes,
    )  # fmt: skip
    law, stream = board_law(base), work(0.0, 0.8)
    before, after = (board_law(s).demand(stream)[0] * s.power_w for s in (base, more))
    units = law.active[0] + law.matrix[0]
    grown = law.idle * units / (units + law.memory)
    assert after - before == pytest.approx(grown * base.power_w)
    assert 1.1 < after / before < 1.3
    # Products at their peak: twice the operations a second take twice the power, less the memory's.
    full = Work(np.full(1, 2.0), np.zeros(1), np.ones(1), np.zeros(1, bool))
    once, twice = (
        board_law(s).demand(w)[0] * s.power_w for s, w in ((base, work(1.0, 0.0)), (more, full))
    )
    assert 1.9 < twice / once < 2.0


def test_energy_of_a_device_that_waits_for_half_of_the_time() -> None:
    h100 = find_device("h100-sxm")
    law = board_law(h100)
    some, total = work(0.7, 0.2), Interval(2.0, 1.9, 2.1)
    found = energy(h100, some, np.array([1.0]), 1.0, total, 8)
    assert found is not None
    expected = 8 * 700 * (float(law.share(some)[0]) * 1.0 + law.waiting * 1.0)
    assert found.value == pytest.approx(expected)
    assert found.lo < found.value < found.hi <= 8 * 700 * 2.1
    # A quarter of the time nothing runs.
    less = energy(h100, some, np.array([1.0]), 1.0, total, 8, idle=0.5)
    assert less is not None
    assert found.value - less.value == pytest.approx(8 * 700 * 0.5 * (law.waiting - law.idle))
    assert energy(replace(h100, power_w=0.0), some, np.ones(1), 1.0, total, 8) is None
    assert energy_fields(None) == {"energy_j": None, "energy_lo_j": None, "energy_hi_j": None}


def test_the_clock_falls_with_the_cube_root_of_what_is_left() -> None:
    # Products: 0.2 idle, units ask for 0.3 + 0.5 * 0.8.
    some = work(0.8, 0.0)
    assert LAW.clock(some, 0.6)[0] == pytest.approx((0.4 / 0.7) ** (1 / 3))
    # Below 0.6 of the clock the voltage stays: power falls with the frequency alone.
    assert LAW.clock(some, 0.2 + 0.7 * 0.6**3 / 2)[0] == pytest.approx(0.3)
    assert LAW.clock(some, 0.2 + 0.7 * 0.6**3)[0] == pytest.approx(0.6)
    assert LAW.clock(work(0.1, 0.1))[0] == 1.0
    assert LAW.clock(some, 0.1)[0] == pytest.approx(0.1)


@pytest.mark.parametrize("clock", [0.8, 0.3])
def test_what_takes_longer_draws_less_for_its_bytes(clock: float) -> None:
    """At half of the bandwidth: the eighth of the time's cube that waits for memory stays."""
    some = work(0.8, 0.5)
    slower = (0.125 + 0.875 / clock**3) ** (1 / 3)
    square = max(clock, 0.6) ** 2
    cores = 0.3 * clock + (0.5 * 0.8 + 0.3 * 0.4 * 0.5) / slower
    cap = 0.2 + 0.7 * 0.4 * 0.5 / slower + cores * square
    assert LAW.clock(some, cap)[0] == pytest.approx(clock)


def test_a_deep_cap_leaves_streams_most_of_their_speed() -> None:
    """A pass at 0.7 of an H100's bandwidth under 200 of 700 W: not the tenth of the clock."""
    law = board_law(find_device("h100-sxm"))
    stream, product = work(0.05, 0.7), work(0.7, 0.2)
    caps = np.array([350, 300, 250, 200]) / 700
    slow = [[law.slowdown(one, cap)[0] for cap in caps] for one in (stream, product)]
    assert (np.diff(slow[0]) > 0).all() and slow[0][-1] < 4.0
    assert all(a < b for a, b in zip(*slow, strict=True))
    # What is left to the units is little, so that the law's error is a large one of it.
    assert np.exp(law.error(caps[-1])[1]) > 1.5 > np.exp(law.error(caps[0])[1])


def test_a_cap_slows_what_does_not_wait_for_the_memory() -> None:
    one, cap = work(0.8, 0.0), 0.6
    clock = ((cap - 0.2) / 0.7) ** (1 / 3)
    assert LAW.slowdown(one, cap)[0] == pytest.approx(1 / clock)
    streams = work(0.0, 1.0)
    assert LAW.slowdown(streams, cap)[0] == pytest.approx(1.0)
    mixed = work(0.5, 0.8)
    ratio = LAW.clock(mixed, cap) / LAW.clock(mixed)
    expected = (0.8**3 + (1 - 0.8**3) / ratio**3) ** (1 / 3)
    assert LAW.slowdown(mixed, cap) == pytest.approx(expected)
    assert LAW.slowdown(mixed, 1.0)[0] == 1.0
    caps = [LAW.slowdown(mixed, c)[0] for c in np.linspace(0.25, 1, 20)]
    assert (np.diff(caps) <= 0).all()


def test_intervals_under_a_cap_hold_the_error_of_the_law() -> None:
    law = replace(LAW, ends=(-0.3, 0.6))
    times = np.array([[2.0, 2.0 * np.exp(-0.1), 2.0 * np.exp(0.1)]])
    slow = law.slowdown(work(0.8, 0.0), 0.6)[0]
    found = capped(times, work(0.8, 0.0), 0.6, law)[0]
    # 0.6 of the limit less 0.2 that idles: errors of the whole are 1.5 times as large of the rest,
    # and a third of that in the clock.
    assert found[0] == pytest.approx(2.0 * slow)
    assert np.log(found[1:] / found[0]) == pytest.approx([-np.hypot(0.1, 0.15), np.hypot(0.1, 0.3)])
    # What the cap does not slow keeps its interval.
    assert capped(times, work(0.0, 0.0), 0.9, law) == pytest.approx(times)


def test_caps_that_a_board_does_not_allow() -> None:
    h100 = find_device("h100-sxm")
    assert cap_share(None, h100) == 1.0
    assert cap_share(350.0, h100) == 0.5
    for watts in (100.0, 701.0):
        with pytest.raises(DeviceError, match="outside 175 to 700 W"):
            cap_share(watts, h100)
    with pytest.raises(DeviceError, match="needs the device's power limit"):
        cap_share(100.0, replace(h100, power_w=0.0))


def test_a_capped_board_uses_less_and_never_more_than_its_cap() -> None:
    h100, some, total = find_device("h100-sxm"), work(0.8, 0.2), Interval(1.0, 0.9, 1.1)
    full, half = (energy(h100, some, np.ones(1), 1.0, total, 1, cap) for cap in (1.0, 0.5))
    assert full is not None and half is not None
    assert half.value < 350.0 < full.value
    assert half.hi <= 350.0 * 1.1


def test_operators_and_steps_under_a_cap() -> None:
    text = "linear m=8192 n=8192 k=8192 dtype=bf16 backend=trtllm kernel=torch_flow"
    free, limit, low = (
        predict_op(OperatorCase(text, "h100-sxm", power_cap_w=w)) for w in (None, 700.0, 400.0)
    )
    assert limit == free
    assert 1.15 < low.latency_us / free.latency_us < 1.6
    assert low.hi_us / low.lo_us > free.hi_us / free.lo_us
    # Each library of a mixture is under the cap as well.
    bare = text.partition(" backend")[0]
    mixed = [
        predict_op(OperatorCase(bare, "h100-sxm", power_cap_w=watts)) for watts in (None, 400.0)
    ]
    pairs = list(zip(*([own.latency_us for own in m.libraries] for m in mixed), strict=True))
    assert len(pairs) > 1 and all(1.15 < slow / fast < 1.6 for fast, slow in pairs)
    size = read_workload("llama", ["layers=4,d_model=4096,heads=32,d_ff=14336,vocab=32000"])
    plan = Plan(dp=8)
    steps = [
        StepPredictor("h100-sxm-x8", None, power_cap_w=w).predict(size, plan) for w in (None, 400.0)
    ]
    assert steps[1].interval.value > 1.1 * steps[0].interval.value
    assert steps[1].joules is not None and steps[0].joules is not None
    assert steps[1].joules.value < steps[0].joules.value
    watts = steps[1].joules.value / steps[1].interval.value / 8
    assert watts < 400.0


def test_cost_is_price_times_device_hours() -> None:
    # 8 devices at 3 an hour for an hour and a half.
    assert cost_of(3.0, Interval(5400.0, 3600.0, 7200.0), 8) == (36.0, 24.0, 48.0)
    assert cost_fields(None, Interval(1.0, 1.0, 1.0), 1) == {}


def test_shipped_law_is_that_of_the_shipped_model() -> None:
    model = PowerModel.find()
    assert model.law == shipped_law()
    # An idle H200 with its clocks up draws 120 to 140 W of 700, a B200 200 to 250 W of 1000.
    assert 120 / 700 < board_law(find_device("h200-sxm")).idle < 140 / 700
    assert 200 / 1000 < board_law(find_device("b200")).idle < 250 / 1000
    assert {"b200", "gb200", "h200-sxm"} <= set(model.devices)
    assert (PRETRAINED / "power.json").stat().st_size < 3_000_000


def rows_of(device: str, m: int) -> pd.DataFrame:
    row = {
        "source": "aiconfigurator", "device": device, "family": "linear", "op": "gemm",
        "dtype": "bf16", "backend": "vllm", "kernel": "vllm_default", "b": 1, "m": m,
        "n": 8192, "k": 4096,
    }  # fmt: skip
    return pd.DataFrame([row])


@pytest.fixture(scope="module")
def operators() -> OpModel:
    return OpModel.load(find_model("gpu-operators"), only=("graph/linear",))


@pytest.mark.parametrize("device", ["h200-sxm", "b200", "l40s"])
def test_large_products_draw_the_limit_and_small_ones_less(device: str, operators: OpModel) -> None:
    model, limit = PowerModel.find(), find_device(device).power_w
    large, small = (model.predict(power_rows(rows_of(device, m), operators)) for m in (16384, 1))
    assert 0.85 * limit < large.watts[0] <= limit
    assert 0.15 * limit < small.watts[0] < large.watts[0]
    for answer in (large, small):
        assert answer.watts_lo[0] <= answer.watts[0] <= answer.watts_hi[0] <= 1.02 * limit
        assert answer.seconds_lo[0] < answer.seconds[0] < answer.seconds_hi[0]


def test_a_device_without_measured_power_is_unseen_and_less_certain(operators: OpModel) -> None:
    model = PowerModel.find()
    frame = rows_of("h200-sxm", 256).assign(op="linear", kv_dtype="")
    own = model.predict(power_rows(frame, operators))
    other = model.predict(power_rows(frame.assign(device="l40s"), operators))
    assert other.scope[0] == "unseen"
    assert np.log(other.seconds_hi / other.seconds_lo) >= np.log(own.seconds_hi / own.seconds_lo)


def test_an_unseen_chip_runs_the_software_of_its_line(operators: OpModel) -> None:
    """B300 revises Blackwell: its times follow B200 and GB200 halfway, not H200."""
    model = PowerModel.find()
    rows = power_rows(rows_of("b300", 4096).assign(dtype="fp8_block"), operators)
    own, *boards = (
        model.predict(replace(rows, device=np.array([name], object))).seconds[0]
        for name in ("b300", "b200", "gb200", "h200-sxm")
    )
    assert own == pytest.approx(np.sqrt(boards[0] * boards[1]))
    assert own != pytest.approx(np.cbrt(np.prod(boards)))


def test_dies_that_revise_others_take_their_joules() -> None:
    """GB300's limit is 1,400 W, but its dies are those of B200 and idle alike."""
    for name, limit in (("gb300", 1400), ("b300", 1100)):
        law, measured = board_law(find_device(name)), board_law(find_device("b200"))
        assert law.idle * limit == pytest.approx(measured.idle * 1000, rel=0.1)
        assert law.memory * limit / 8e12 == pytest.approx(measured.memory * 1000 / 7.7e12, rel=0.1)


def test_round_trip_and_damage(tmp_path: Path) -> None:
    PowerModel.find().save(tmp_path / "power.json")
    again = PowerModel.load(tmp_path / "power.json")
    assert again.law == shipped_law() and again.power_ends == PowerModel.find().power_ends
    data = json.loads((tmp_path / "power.json").read_text())
    (tmp_path / "power.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(ModelError, match=r"format 99.*opcast train --power"):
        PowerModel.load(tmp_path / "power.json")


def test_measured_power_of_rows_left_out(operators: OpModel) -> None:
    path = PUBLISHED / "published-kernels" / "power.parquet"
    if not path.is_file():
        pytest.skip(f"power.parquet is not at {PUBLISHED} (OPCAST_PUBLISHED_DATA)")
    table = pd.read_parquet(path)
    table = table[
        (table["split"] == "val") & (table["family"] == "linear") & (table["est_samples"] >= 10)
    ]
    rows = power_rows(table, operators)
    said = PowerModel.find().predict(rows)
    watts = table["power_w"].to_numpy(float)
    error, known = np.abs(said.watts / watts - 1), said.scope == "known"
    inside = (said.watts_lo <= watts) & (watts <= said.watts_hi)
    assert error[known].mean() < 0.08
    assert inside[known].mean() > 0.85


def test_boards_that_feed_their_cores_less_have_lower_clocks() -> None:
    # A product at 0.7 of its peak and 0.3 of the bandwidth, and a pass that only moves.
    work = Work(np.array([0.7, 0.0]), np.array([0.3, 0.9]), np.ones(2), np.zeros(2, bool))
    # Watts for a core and a gigahertz: 2.88 of an RTX 3090 Ti, 2.05 of an A40, 1.23 of an A10,
    # whose whole models take 1.2 to 1.35 times what rates of fed chips say (Stable Diffusion in
    # f16, published-torch pack).
    fed, a40, a10 = (starved(find_device(name), work) for name in ("rtx-3090-ti", "a40", "a10"))
    assert fed.tolist() == [1.0, 1.0]
    assert 1.2 < a10[0] < 1.35 and 1.05 < a40[0] < a10[0]
    # What main memory decides hardly waits for the cores.
    assert 1.0 < a10[1] < 1.12
    # Of measured silicon the chip that was measured is the base.
    assert starved(find_device("h200-sxm"), work).tolist() == [1.0, 1.0]
    assert 1.1 < starved(find_device("h100-pcie"), work)[0] < 1.2
    unknown = replace(find_device("a10"), architecture="")
    assert starved(unknown, work).tolist() == [1.0, 1.0]
