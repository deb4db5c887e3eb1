"""The TPU's default model, and programs beside what the TPU's compiler says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import opcast
from opcast.cli import app
from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering import lower as lowering
from opcast.features.lowering.target_compiler.target import compiled_tpus
from opcast.workflows.check import agreement

DATA = Path(__file__).parents[1] / "features" / "data" / "absent"


@pytest.fixture
def compiled(monkeypatch):
    """The compiler answers with the golden module of the program's name."""

    def lower(source, *rest, **more):
        name = Path(source.origin).stem
        kernels, _ = extract_kernels(parse_hlo((DATA / f"{name}.hlo").read_text()))
        return LoweredProgram(kernels, "xla", "tpu-v5e", compile_seconds=2.0)

    monkeypatch.setattr(lowering, "lower", lower)


@pytest.mark.parametrize("device", compiled_tpus())
def test_every_tpu_of_the_catalogue_is_answered_by_its_model(device: str) -> None:
    assert opcast.load().model_for(find_device(device)).name == "tpu-xgboost"


def test_sums_are_of_the_kernels_with_an_estimate(compiled) -> None:
    found = agreement(DATA / "v5e_pool.hlo", find_device("tpu-v5e"), opcast.load())
    # A copy, a broadcast and a copy; select-and-scatter has none. 1.5 GHz.
    assert found.compiler_us == pytest.approx((13312 + 80 + 11112) / 1500)
    assert (found.kernels, found.unestimated) == (4, 1)
    assert found.predicted_us > 0
    assert found.left_us > 0
    assert found.error == pytest.approx(found.predicted_us / found.compiler_us - 1)
    assert found.compile_s == 2.0
    # Copies and one roofline each way; the text is compiled already, so no other lowering goes.
    assert found.compiler_step_us > found.compiler_us
    assert found.fused_step_us is None


def test_the_command_prints_the_error(compiled) -> None:
    call = ["data", "agree", str(DATA / "v5e_bias.hlo"), "--device", "tpu-v5e"]
    shown = CliRunner().invoke(app, call)
    assert shown.exit_code == 0, shown.output
    assert "nothing is measured" in shown.output
    (row,) = json.loads(CliRunner().invoke(app, [*call, "--json"]).output)
    assert row["compiler_us"] == pytest.approx(10168 / 1500)


def test_other_devices_have_no_such_estimates() -> None:
    with pytest.raises(DeviceError, match="not a TPU"):
        agreement(DATA / "v5e_bias.hlo", find_device("h100-sxm"), opcast.load())
