"""Elasticities of times, and designs beside their base."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import opcast
from opcast.cli import app
from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device, load_designs, unchanged
from opcast.features.lowering.lower import lower
from opcast.predict.designs import compare_designs, rates_of, sensitivity
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import operator_prices, predict_op
from opcast.predict.program.predictor import load
from opcast.workflows.reports.device_rows import build_program

from ..support.cases import later

#: Half a gigabyte in and out, and a product of 550 GFLOP.
STREAM = "kernel/elementwise op=add rows=16384 cols=8192 n_in=1 dtype=fp16"
PRODUCT = "linear m=8192 n=8192 k=4096 dtype=bf16"
FILE = """\
name: big
base: h100-sxm
hbm_bandwidth_gbps: [2000, 5000]
peak_tflops: {bf16: [989.4, 2000]}
models:
  area_mm2: {fixed: 100, core_count: 4, l2_mb: 2, peak_tflops.bf16: 0.05}
  price: {fixed: 500, area_mm2: 10, memory_gb: 15}
"""


@pytest.fixture
def own(tmp_path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "big.yaml").write_text(text)
        return str(tmp_path / "big.yaml")

    return write


@pytest.mark.parametrize(
    ("op", "first"), [(STREAM, "hbm_bandwidth_gbps"), (PRODUCT, "peak_tflops")]
)
@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-80gb"])
def test_what_an_operator_waits_for_has_the_elasticity(op, first, device):
    spec, price = operator_prices(OperatorCase(op, device))
    found = sensitivity(price, spec, op)
    assert found.latency_us == predict_op(OperatorCase(op, device)).latency_us
    assert found.elasticities[0].rate == first
    # Units that are faster at the same power are held back by it: both together are the rate.
    by_rate = {one.rate: one.value for one in found.elasticities}
    assert by_rate[first] + by_rate["power_w"] == pytest.approx(-1.0, abs=0.2)
    for one in found.elasticities:
        assert one.lo <= one.value <= one.hi
        # No rate makes it slower, and together they are no more than the time.
        assert -1.02 < one.value < 0.15
    # The power limit bounds the clock of the units at all rates.
    by_rate = {one.rate: one.value for one in found.elasticities}
    assert -0.5 < by_rate.pop("power_w") <= 0.0
    assert sum(by_rate.values()) > -1.1


@pytest.mark.parametrize("watts", [350, 200])
def test_a_design_with_less_power_is_its_base_under_a_cap(own, tmp_path, watts):
    path = own(f"name: cool\nbase: h100-sxm\npower_w: {watts}\n")
    for op in (STREAM, PRODUCT):
        capped = predict_op(OperatorCase(op, "h100-sxm", power_cap_w=watts))
        design = predict_op(OperatorCase(op, path))
        assert design.latency_us == capped.latency_us
        assert (design.lo_us, design.hi_us) == (capped.lo_us, capped.hi_us)
    program = build_program("mlp batch=4096 features=4096 width=4096 layers=2")
    predictor, lowered = load(), lower(program, "fused", device=find_device("h100-sxm"))
    free = predictor.predict_lowered(lowered, "h100-sxm")
    capped = predictor.predict_lowered(lowered, "h100-sxm", power_cap_w=watts)
    design = predictor.predict_lowered(lowered, path)
    assert design.latency_us == capped.latency_us > 1.2 * free.latency_us
    assert design.energy == capped.energy and f"held below {watts} W" in str(design.notes)


def test_the_power_of_a_design_is_per_core(own):
    """Half the cores need no more than half the power; twice of them share the base's limit."""

    def time(text: str) -> float:
        return predict_op(
            OperatorCase(PRODUCT, own(f"name: new\nbase: h100-sxm\n{text}\n"))
        ).latency_us

    assert time("core_count: 66\npower_w: 360") == time("core_count: 66")
    both = time("core_count: 264\npower_w: 700")
    # 20 W and twice 680 W feed 264 cores.
    path = own("name: new\nbase: h100-sxm\ncore_count: 264\n")
    fed = predict_op(OperatorCase(PRODUCT, path, power_cap_w=700.0))
    assert both == pytest.approx(fed.latency_us, rel=1e-9)
    assert time("core_count: 264") < both < time("power_w: 700")
    # A higher limit than the cores ask for does not slow anything.
    assert time("power_w: 1400") <= time("power_w: 700")


def test_designs_beside_their_base(own):
    """The models by hand: 100 + 4 · 132 + 2 · 50 + 0.05 · 989.4 mm²."""
    path = own(FILE)
    base = unchanged(path)
    _, price = operator_prices(OperatorCase(PRODUCT, "h100-sxm"))
    found = compare_designs(price, base, load_designs(path), PRODUCT)
    first, *rest = found.designs
    area = 100 + 4 * 132 + 2 * 50 + 0.05 * 989.4
    assert first.device == found.base == "h100-sxm"
    assert first.modelled == {
        "area_mm2": pytest.approx(area),
        "price": pytest.approx(500 + 10 * area + 15 * 80),
    }
    assert (first.ratio, first.ratio_lo, first.ratio_hi) == (1.0, 1.0, 1.0)
    assert first.latency_us == predict_op(OperatorCase(PRODUCT, "h100-sxm")).latency_us
    for one in rest:
        assert one.ratio_lo <= one.ratio <= one.ratio_hi
        costs = np.array([other.costs for other in found.designs])
        mine = np.array(one.costs)
        beaten = ((costs <= mine).all(axis=1) & (costs < mine).any(axis=1)).any()
        assert one.efficient == (not beaten)
    # Twice the peak, and more memory for nothing: of equal area, the faster one beats the others.
    assert [one.efficient for one in rest] == [False, False, True, True]


@pytest.mark.parametrize("base", ["b200", "l4", "tpu-v5e"])
def test_designs_of_chips_that_the_family_was_not_measured_on(own, base):
    """The base beside them, named as its own base, is the chip of the catalogue."""
    op = "linear m=512 n=4096 k=4096 dtype=f16"
    path = own(f"name: big\nbase: {base}\nmemory_gb: [500, 600]\n")
    _, price = operator_prices(OperatorCase(op, base))
    found = compare_designs(price, unchanged(path), load_designs(path), op)
    assert {one.latency_us for one in found.designs} == {price(find_device(base)).latency_us}
    assert {(one.ratio, one.ratio_lo, one.ratio_hi) for one in found.designs} == {(1.0, 1.0, 1.0)}
    same = own(f"name: {base}\nbase: {base}\n")
    assert predict_op(OperatorCase(op, same)).latency_us == price(find_device(base)).latency_us


def test_a_product_that_splits_no_more_is_no_slower(own):
    """XLA's times are the mean of a call's kernels: with one instead of two they would double."""
    op = "xla/linear m=1 n=4096 k=4096 dtype=bf16"
    path = own("name: quick\nbase: mi300x\nboost_mhz: [2100, 3000, 4000, 4200]\n")
    _, price = operator_prices(OperatorCase(op, "mi300x"))
    times = [price(device).latency_us for _, device in load_designs(path)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [("volume: {fixed: 1}", "unknown model 'volume'"),
     ("area_mm2: {corecount: 1}", "unknown figure 'corecount'"),
     ("area_mm2: 3", "must map figures to coefficients"),
     ("area_mm2: {price: 3}", "unknown figure 'price'"),
     ("area_mm2: {array_rows: 3}", "needs 'array_rows', which is not known")],
)  # fmt: skip
def test_models_of_what_is_not_there_are_refused(own, line, said):
    with pytest.raises(DeviceError, match=said) as error:
        unchanged(own(f"name: big\nbase: h100-sxm\nmodels:\n  {line}\n"))
    assert "big.yaml" in str(error.value)


def test_commands(own):
    run = CliRunner().invoke
    varied = run(app, ["sensitivity", "--op", STREAM, "--device", "h100-sxm", "--json"])
    assert varied.exit_code == 0, varied.output
    assert json.loads(varied.output)["elasticities"][0]["rate"] == "hbm_bandwidth_gbps"
    printed = run(app, ["sensitivity", "--op", STREAM, "--device", "l4"]).output
    assert "hbm_bandwidth_gbps" in printed
    made = run(app, ["design", "--op", PRODUCT, "--device", own(FILE)])
    assert made.exit_code == 0, made.output
    assert "  h100-sxm" in made.output and "area_mm2" in made.output
    assert run(app, ["design", "--op", PRODUCT, "--device", "h100-sxm"]).exit_code != 0
    assert run(app, ["sensitivity", "--device", "l4"]).exit_code == 2


def test_a_program_and_its_energy(own, tmp_path):
    program = str(tmp_path / "mlp.mlir")
    sizes = [f"--set={size}" for size in ("batch=64", "features=512", "width=512", "layers=2")]
    exported = CliRunner().invoke(app, ["zoo", "export", "mlp", *sizes, "--out", program])
    assert exported.exit_code == 0
    asked = ["design", program, "--device", own(FILE), "--lowering", "fused", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    designs = json.loads(done.output)["designs"]
    assert len(designs) == 5 and all(one["energy_j"] > 0 for one in designs)
    assert find_device("h100-sxm").name == designs[0]["device"]


@pytest.mark.parametrize("lowering", ["fused", later("op")])
@pytest.mark.parametrize("name", ["tpu-v5e", later("tpu-v5p"), "cpu-amd-epyc-2c"])
def test_no_rate_of_a_tpu_or_cpu_makes_a_program_slower(name, lowering):
    """A copy is its base to the bit; no rate has a cliff or slows, and compute bounds products."""
    predictor = load()
    base = predictor.devices.get(name) or find_device(name)
    program = build_program("mlp batch=512 features=512 width=512 layers=2 mode=train")
    lowered = lower(program, lowering, device=base)
    copy = replace(base, name="copy", aliases=(), base=name)

    def price(device):
        return predictor.predict_lowered(lowered, device)

    first = price(base)
    assert price(copy).latency_us == pytest.approx(first.latency_us, rel=1e-12)
    for rate in rates_of(copy).values():
        last = first.latency_us
        for factor in (1.01, 1.1, 2.0, 10.0):
            found = price(rate(copy, factor))
            assert found.lo_us <= found.latency_us <= found.hi_us
            assert last / factor * 0.97 < found.latency_us <= last * 1.0001
            last = found.latency_us if factor > 1.05 else last


def test_faster_products_take_as_many_joules_an_operation(own, tmp_path):
    """At three times the rate of products, and a limit that the file leaves open or holds."""
    program = tmp_path / "product.mlir"
    square = "tensor<8192x8192xbf16>"
    program.write_text(
        f"func.func @main(%a: {square}) -> {square} {{\n"
        "  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : "
        f"({square}, {square}) -> {square}\n  return %0 : {square}\n}}"
    )
    found = {}
    for held in ("", "power_w: 700\n"):
        name = own(f"name: big\nbase: h100-sxm\npeak_tflops: {{bf16: 2967}}\n{held}")
        found[held] = opcast.predict(program, device=name, lowering="fused")
    base = opcast.predict(program, device="h100-sxm", lowering="fused")
    free, held = found.values()
    joules = {name: own.energy.value for name, own in (("base", base), ("free", free))}
    assert joules["free"] == pytest.approx(joules["base"], rel=0.2)
    # Held to the base's power, it gains some of the rate (the cube root is left of the clock).
    assert 1.3 * free.latency_us < held.latency_us < 0.8 * base.latency_us


@pytest.mark.parametrize("base", ["b200", "mi300x"])
def test_operators_start_as_much_later_as_the_shortest_kernel(own, base):
    op = "linear m=1 n=256 k=256 dtype=bf16"
    times = {}
    for floor in (1, 2, 3, 6):
        name = own(f"name: late\nbase: {base}\nlaunch_floor_us: {floor}\n")
        times[floor] = predict_op(OperatorCase(op, name)).latency_us
    assert list(times.values()) == sorted(times.values())
    # Libraries reach 0.6 to 1.5 times their physics.
    assert 0.6 * 3 < times[6] - times[3] < 1.5 * 3
    kept = own(f"name: late\nbase: {base}\nlaunch_floor_us: {find_device(base).floor * 1e6}\n")
    assert (
        predict_op(OperatorCase(op, kept)).latency_us
        == predict_op(OperatorCase(op, base)).latency_us
    )
