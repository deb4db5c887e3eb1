"""Estimators side by side: one lowering, their own times, what is borrowed from the roofline."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from opcast.common.errors import DeviceError, ModelError, StrictError
from opcast.features.lowering import lower as lowering_module
from opcast.features.lowering.options import LoweringOptions
from opcast.predict.program.case import ProgramCase
from opcast.predict.program.fidelities import compare_fidelities
from opcast.predict.program.predictor import load, load_for_programs
from opcast.predict.render.program import print_comparison

PROGRAM = """
module @step {
  func.func public @main(%a: tensor<512x256xbf16>, %b: tensor<256x128xbf16>)
      -> tensor<512x128xbf16> {
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<512x256xbf16>, tensor<256x128xbf16>) -> tensor<512x128xbf16>
    %1 = stablehlo.tanh %0 : tensor<512x128xbf16>
    return %1 : tensor<512x128xbf16>
  }
}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "step.mlir"
    path.write_text(PROGRAM)
    return path


def test_models_share_a_lowering(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scalesim")
    lowered: list[str] = []
    lower_with = lowering_module.lower_with

    def counted(source: Any, options: LoweringOptions) -> Any:
        lowered.append(options.lowering)
        return lower_with(source, options)

    monkeypatch.setattr(lowering_module, "lower_with", counted)
    names = ["roofline", "scalesim", "learned"]
    found = compare_fidelities(ProgramCase(program, LoweringOptions("op", "tpu-v3")), names)
    assert lowered == ["op"]
    assert [f.name for f in found.fidelities] == names
    physics, simulated, learned = found.fidelities
    assert [k.kind for k in physics.prediction.kernels] == ["gemm", "fusion"]
    assert learned.prediction.model == "tpu-xgboost"
    assert physics.own == (True, True) and physics.covered == 1.0
    assert simulated.own == (True, False)
    assert simulated.reasons == ("", "no matrix product (fusion)")
    said = found.to_dict()
    assert said["fidelities"]["learned"]["hi_us"] == learned.prediction.hi_us
    assert said["kernels"][0]["scalesim"]["lo_us"] == simulated.prediction.kernels[0].lo_us
    gemm, tanh = (k.latency_us for k in simulated.prediction.kernels)
    assert simulated.covered == pytest.approx(gemm / (gemm + tanh))
    assert tanh == physics.prediction.kernels[1].latency_us
    # 2 folds (k) of 2·128 + 128 + 512 - 2, one on each of two arrays, at 940 MHz: less than the
    # traffic at 450 GB/s; and the floor.
    moved_us = 2 * (512 * 256 + 256 * 128 + 512 * 128) / 450e3
    assert gemm == pytest.approx(max(894 / 940, moved_us) + 0.27)
    data = found.to_dict()
    assert data["fidelities"]["scalesim"]["covered"] == simulated.covered
    assert data["kernels"][1]["scalesim"]["reason"] == "no matrix product (fusion)"
    assert data["kernels"][0]["roofline"]["source"] == "roofline"


def test_the_table_marks_what_is_borrowed(program: Path) -> None:
    pytest.importorskip("scalesim")
    case = ProgramCase(program, LoweringOptions("op", "tpu-v3"))
    found = compare_fidelities(case, ["roofline", "scalesim", "learned"])
    text = io.StringIO()
    print_comparison(Console(file=text, width=160), found)
    lines = text.getvalue().splitlines()
    assert "step.mlir on tpu-v3; lowering op, 2 kernels" in lines[0]
    assert lines[1].split()[:4] == ["kind", "roofline", "scalesim", "learned"]
    (tanh,) = [line for line in lines if line.startswith("tanh")]
    assert "*" in tanh
    assert any("no matrix product (fusion)" in line for line in lines)
    times = found.times_us
    first = found.disputed(1)[0]
    spread = times.max(axis=0) - times.min(axis=0)
    assert spread[first] == spread.max()


def test_equal_answers_are_no_dispute(program: Path) -> None:
    found = compare_fidelities(ProgramCase(program, LoweringOptions("op", "tpu-v4")), ["roofline"])
    assert found.disputed() == []


@pytest.mark.parametrize("names", [[], ["roofline", "roofline"], ["roofline", ""]])
def test_lists_that_are_none(program: Path, names: list[str]) -> None:
    with pytest.raises(ModelError, match="not a list of different models"):
        compare_fidelities(ProgramCase(program, LoweringOptions(device="tpu-v3")), names)


def test_unknown_models_and_devices(program: Path) -> None:
    with pytest.raises(ModelError, match="no model 'nosuch'"):
        compare_fidelities(
            ProgramCase(program, LoweringOptions(device="tpu-v3")), ["roofline", "nosuch"]
        )
    with pytest.raises(DeviceError, match="nosuch"):
        compare_fidelities(ProgramCase(program, LoweringOptions(device="nosuch")), ["roofline"])
    pytest.importorskip("scalesim")
    with pytest.raises(DeviceError, match="lacks array_rows"):
        compare_fidelities(
            ProgramCase(program, LoweringOptions("op", "h100-sxm")), ["roofline", "scalesim"]
        )


def test_a_simulator_alone(program: Path) -> None:
    pytest.importorskip("scalesim")
    found = load_for_programs("scalesim").predict(program, device="tpu-v3", lowering="op")
    assert found.model == "scalesim"
    assert [k.source for k in found.kernels] == ["simulator:scalesim", "roofline"]
    assert "1 kernels take the roofline: no matrix product (fusion)" in found.notes
    with pytest.raises(StrictError, match="only a roofline estimate"):
        load("scalesim").predict(program, device="tpu-v3", lowering="op", strict=True)


def test_the_roofline_says_that_nothing_was_learned(program: Path) -> None:
    found = load("roofline").predict(program, device="tpu-v3", lowering="op")
    assert "nothing was learned or calibrated on any device" in found.notes
