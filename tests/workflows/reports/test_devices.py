"""The report on devices that are not here: rows, physics, files, and what users may get wrong."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import opcast
from opcast.cli import app
from opcast.common.errors import CompilerError, OpcastError
from opcast.datagen.zoo import all_families, parse_settings
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.target_compiler import target as compile_target
from opcast.features.table.roofline import roofline
from opcast.models.core.base import KernelPrediction
from opcast.predict.devices import shown_devices
from opcast.predict.program.predictor import Predictor
from opcast.workflows.reports.device_rows import (
    PROGRAMS,
    DeviceRow,
    build_program,
    device_row,
    figures,
)
from opcast.workflows.reports.devices import (
    COLUMNS,
    DOUBLED,
    Check,
    check_lines,
    device_orders,
    estimates_below_roofline,
    in_order,
    larger_batches,
    markdown,
    not_below_roofline,
    run_device_report,
)
from opcast.workflows.reports.settings import DeviceReportSettings

from ...support.cases import later

DATA = Path(__file__).parents[2] / "features" / "data" / "absent"


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return opcast.load()


def row(device: str, learned_us: float, **more: object) -> DeviceRow:
    return replace(DeviceRow("mlp", device, learned_us=learned_us, kernels=3), **more)  # type: ignore[arg-type]


def test_the_programs_are_of_many_families_both_ways() -> None:
    chosen = [text.split() for text in PROGRAMS.values()]
    assert len({family for family, *_ in chosen}) >= 12
    assert {family for family, *_ in chosen} <= set(all_families())
    for family, *pairs in chosen:
        parse_settings(family, pairs)
    train = [pairs for _, *pairs in chosen if "mode=train" in pairs]
    assert 5 < len(train) < len(chosen) - 5
    assert set(DOUBLED) <= set(PROGRAMS)


def test_a_row_has_every_fidelity_of_one_lowering(predictor: Predictor) -> None:
    kernels, _ = extract_kernels(parse_hlo((DATA / "v5e_bias.hlo").read_text()))
    device = find_device("tpu-v5e")
    lowered = LoweredProgram(kernels, "xla", device.name, peak_memory_bytes=17e9)
    found = figures(predictor, "bias", lowered, device)
    dispatch_us = device.dispatch * 1e6
    (fusion,) = (k for k in kernels if k.cycles)
    (copy,) = (k for k in kernels if k.takes_time and not k.cycles)
    # 10168 cycles at 1.5 GHz wait for the copy of an operand, which is left to its roofline.
    fusion_us = 10168 / 1500
    copy_us = (roofline([copy], device).latency_s[0] + device.floor) * 1e6
    assert found.compiler_us is not None
    assert fusion_us + dispatch_us < found.compiler_us <= fusion_us + copy_us + dispatch_us + 1e-6
    least_us = (roofline([fusion], device).latency_s[0] + device.floor) * 1e6
    assert found.roofline_us >= least_us + dispatch_us
    assert found.learned_lo_us <= found.learned_us <= found.learned_hi_us
    assert found.least_us <= found.learned_us and found.undercut == 0
    assert found.kernels == 2 and found.fits  # 17e9 bytes of 16 GiB


def test_other_platforms_have_no_compiler_estimate(predictor: Predictor) -> None:
    source = build_program("mlp batch=8 features=16 width=32 layers=1")
    found = device_row(predictor, "tiny", source, find_device("l4"), "fused")
    assert found.compiler_us is None and found.error == ""
    assert 0 < found.roofline_us < 100 and found.lower_s > 0


def test_a_program_that_cannot_be_lowered_is_an_error_of_its_row(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise CompilerError("the compiler gave up")

    monkeypatch.setattr("opcast.features.lowering.lower.lower", fail)
    source = build_program("mlp batch=8 features=16 width=32 layers=1")
    found = device_row(predictor, "tiny", source, find_device("l4"))
    assert found.error == "the compiler gave up"
    text = markdown([found], [])
    assert "- tiny on l4: the compiler gave up" in text
    assert not_below_roofline([found]).cases == 0


def test_undercutting_physics_is_found() -> None:
    fine = row("l4", 10.0, least_us=9.0)
    assert not_below_roofline([fine]).passed
    assert not_below_roofline([fine]).cases == 4  # three kernels and their program
    (failure,) = not_below_roofline([fine, row("t4", 10.0, undercut=2)]).failures
    assert failure == "mlp on t4: 2 of 3 kernels"
    (failure,) = not_below_roofline([row("t4", 8.0, least_us=9.0)]).failures
    assert "8 µs, least 9 µs" in failure


def test_estimates_that_had_to_be_held_are_told_by_device() -> None:
    fine = row("l4", 10.0, least_us=9.0, unclamped_us=9.5)
    assert estimates_below_roofline([fine]).passed
    held = row("t4", 10.0, least_us=10.0, unclamped_us=8.0, clamped=2, worst=0.75)
    assert not_below_roofline([held]).passed  # the answer is right, what it was made of is not
    found = estimates_below_roofline([fine, held, row("t4", 10.0, unclamped_us=10.0)])
    assert found.cases == 12 and not found.passed
    assert found.failures == (
        "t4: 2 of 6 kernels (33.3%), the lowest at 0.75 of its roofline; whole programs: mlp",
    )


def test_the_figures_hold_what_the_model_would_have_said(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = find_device("l4")
    source = build_program("mlp batch=512 features=512 width=512 layers=1")
    plain = device_row(predictor, "mlp", source, device, "fused")
    estimator = type(predictor.model_for(device).estimator)
    predict = estimator._predict
    monkeypatch.setattr(estimator, "_predict", lambda *a: shrunk(predict(*a)))
    found = device_row(predictor, "mlp", source, device, "fused")
    assert found.clamped == found.kernels > plain.clamped
    assert found.undercut == 0 and found.learned_us < plain.learned_us
    assert 0 < found.unclamped_us < plain.unclamped_us / 100
    assert 0 < found.worst < 0.1
    assert not_below_roofline([found]).passed
    assert not estimates_below_roofline([found]).passed


def shrunk(found: KernelPrediction) -> KernelPrediction:
    return replace(found, latency=found.latency / 1000, lo=found.lo / 1000)


def test_a_faster_larger_batch_is_found() -> None:
    once = [row("l4", 10.0), row("t4", 10.0), row("a40", 0.0, error="no")]
    twice = [row("l4", 10.0), row("t4", 9.0), row("a40", 5.0), row("p4", 5.0)]
    found = larger_batches(once, twice)
    assert found.cases == 2
    assert found.failures == ("mlp on t4: 10 µs, with twice the batch 9 µs",)


def test_devices_out_of_order_are_found() -> None:
    rates = {"a": 300.0, "b": 100.0, "c": 100.0}
    found = in_order("peaks", [row("a", 5.0), row("b", 4.0), row("c", 6.0)], rates, "TFLOP/s")
    assert found.cases == 2  # b and c have the same rate
    assert found.failures == ("a (300 TFLOP/s) 5 µs, b (100 TFLOP/s) 4 µs",)


def test_what_was_not_tested_is_not_met() -> None:
    assert not Check("nothing", 0).passed
    lines = check_lines([Check("a", 2), Check("b", 0), Check("c", 1, ("why",))])
    assert lines == ["met: a (2 cases)", "not tested: b (0 cases)", "NOT met: c (1 cases)", "  why"]


def test_the_command_writes_figures_and_checks(tmp_path: Path) -> None:
    call = ["report", "devices", "--programs", "mlp-train", "--lowering", "fused"]
    call += ["--device", "h100-sxm", "--device", "l4", "--out"]
    shown = CliRunner().invoke(app, [*call, str(tmp_path / "r.json")])
    assert shown.exit_code == 0, shown.output
    assert "met: no prediction is below its roofline with L2" in shown.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert [r["device"] for r in data["rows"]] == ["h100-sxm", "l4"]
    held = [check for check in data["checks"] if "clamped" in check["name"]]
    clamped = {r["device"] for r in data["rows"] if r["clamped"]}
    assert [{text.split(":")[0] for text in check["failures"]} for check in held] == [clamped]
    assert all(not check["failures"] for check in data["checks"] if check not in held)
    table = [DeviceRow(**r) for r in data["rows"]]
    text = markdown(table, [Check(**check) for check in data["checks"]])
    head, rule, first = text.splitlines()[:3]
    assert head.count("|") == rule.count("|") == first.count("|") == len(COLUMNS) + 1


def test_what_users_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(OpcastError, match="no program 'resnet'"):
        run_device_report(console, DeviceReportSettings(["resnet"], ["l4"]))
    for call in (["--programs", "mlp"], ["devices", "--study", "estimators"]):
        assert CliRunner().invoke(app, ["report", *call]).exit_code == 2

    def missing(platform: str) -> None:
        raise CompilerError(f"no {platform} compiler is installed")

    # Said once and at once, not as the error of every row.
    monkeypatch.setattr(compile_target, "find_compiler", missing)
    with pytest.raises(CompilerError, match="no gpu compiler"):
        run_device_report(console, DeviceReportSettings(["mlp"], ["l4"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["bert layers=1 dim=128 heads=2 hidden=512", later("mlp batch=64 width=256 mode=train")],
)
def test_no_device_undercuts_its_roofline(predictor: Predictor, text: str) -> None:
    """With kernels by our own rules; the command's test has a step of an MLP."""
    source = build_program(text)
    devices = [find_device(name) for name in shown_devices("reports")]
    found = not_below_roofline([device_row(predictor, text, source, d, "fused") for d in devices])
    assert found.passed, found.failures


@pytest.mark.slow
def test_no_device_is_faster_with_twice_the_batch(predictor: Predictor) -> None:
    devices = [find_device(name) for name in shown_devices("reports")]
    text = "mlp width=512 layers=1 mode=train"
    once, twice = (
        [device_row(predictor, "mlp", source, d, "fused") for d in devices]
        for source in (build_program(text, batch=b) for b in (128, 256))
    )
    found = larger_batches(once, twice)
    assert found.passed, found.failures
    assert found.cases == len(shown_devices("reports"))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_devices_come_in_the_order_of_their_data_sheets(
    predictor: Predictor, platform: str
) -> None:
    # Labels of GPUs are measured times, those of TPUs a compiler's: between the two the report
    # says what is out of order.
    devices = [d for d in map(find_device, shown_devices("reports")) if d.platform == platform]
    for check in device_orders(predictor, devices, "fused"):
        assert check.passed, check.failures
        assert check.cases == len(devices) * (len(devices) - 1) / 2
