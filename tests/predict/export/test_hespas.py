"""The plug-in for HESPAS against the package if it is installed, else against a stand-in."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError, ModelError, ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.predict.devices import resolve_device
from opcast.predict.locate import model_hash
from opcast.predict.program.predictor import load

STAND_IN = Path(__file__).parents[2] / "plugins" / "hespas_stand_in"
DOT = (
    "%7 = stablehlo.dot_general %3, %arg1, contracting_dims = [1] x [0] : "
    "(tensor<128x256xf32>, tensor<256x512xf32>) -> tensor<128x512xf32>"
)
MODULE = f"""module {{
  func.func public @main(%3: tensor<128x256xf32>, %arg1: tensor<256x512xf32>)
      -> tensor<128x512xf32> {{
    {DOT}
    %8 = stablehlo.add %7, %7 : tensor<128x512xf32>
    return %8 : tensor<128x512xf32>
  }}
}}
"""
WIDE = ((128, 512), "f32")


def operation(line, inputs, outputs):
    name = line.split("=")[1].split()[0] if "=" in line else line.split()[0]
    return SimpleNamespace(op_name=name, op_line=line, input_types=inputs, output_types=outputs)


@pytest.fixture(scope="module")
def hespas():
    """The plug-in module."""
    if importlib.util.find_spec("hespas") is None:
        patch = pytest.MonkeyPatch()
        patch.syspath_prepend(STAND_IN)
    from opcast.predict.export import hespas as plugin

    return plugin


@pytest.fixture(scope="module")
def hardware(device):
    return {"device": device.name, "model": "cpu-xgboost", "model_hash": model_hash("cpu-xgboost")}


def test_whole_modules_take_what_the_predictor_says_in_seconds(hespas, hardware, predictor):
    estimator = hespas.OpcastEstimator({**hardware, "lowering": "op"})
    module = SimpleNamespace(mlir_string=MODULE)
    found = estimator.get_estimate(module)
    device = replace(resolve_device(hardware["device"], predictor.devices), dispatch=0.0)
    expected = predictor.predict(MODULE, device=device, lowering="op")
    assert found.success
    assert found.module is module
    assert found.runtime_estimate == pytest.approx(expected.latency_us / 1e6)
    lo, hi = found.metadata["lo_s"], found.metadata["hi_s"]
    assert lo <= found.runtime_estimate <= hi


def test_blocks_are_charged_no_dispatch_of_a_program(hespas):
    # A block of an H100 program costs its two kernels and the gaps between them.
    hardware = {"device": "h100-sxm", "model": "gpu-xla", "model_hash": model_hash("gpu-xla")}
    estimator = hespas.OpcastEstimator({**hardware, "lowering": "op"})
    block = estimator.get_estimate(SimpleNamespace(mlir_string=MODULE)).runtime_estimate
    whole = load("gpu-xla").predict(MODULE, device="h100-sxm", lowering="op")
    assert whole.latency_us / 1e6 - block == pytest.approx(find_device("h100-sxm").dispatch)


def test_operations_add_up(hespas, hardware, predictor):
    estimator = hespas.OpcastOpEstimator(hardware)
    add = operation("%8 = stablehlo.add %7, %7 : tensor<128x512xf32>", [WIDE, WIDE], [WIDE])
    dot = operation(DOT, [((128, 256), "f32"), ((256, 512), "f32")], [WIDE])
    end = operation("func.return %8 : tensor<128x512xf32>", [WIDE], [])
    assert end.op_name == "func.return"
    both = estimator.get_estimate(SimpleNamespace(mlir_string=MODULE, ops_list=[dot, add, end]))
    expected = predictor.predict(MODULE, device=hardware["device"], lowering="op")
    kernels = sum(k.total_us for k in expected.kernels) / 1e6
    assert both.success
    # Context corrections differ by a kernel's place, so the sums agree only nearly.
    assert both.runtime_estimate == pytest.approx(kernels, rel=0.5)
    assert estimator.handle_other(end).runtime_estimate == 0.0


def test_another_model_is_refused_and_the_digest_is_that_of_the_files(hespas, hardware, tmp_path):
    with pytest.raises(ModelError, match="run it with: opcast hespas"):
        hespas.OpcastEstimator({**hardware, "model_hash": "0" * 16})
    with pytest.raises(ValueError, match="model_hash"):
        hespas.OpcastEstimator({"device": hardware["device"]})
    assert model_hash("cpu-xgboost") != model_hash("default")


def test_the_command_adds_the_estimator_and_the_digest(hespas, hardware, tmp_path):
    if "stand_in" not in str(hespas.ComputeEstimator.__init__.__code__.co_filename):
        pytest.skip("the command runs all of HESPAS")
    program, config, out = tmp_path / "m.mlir", tmp_path / "c.json", tmp_path / "seconds.txt"
    program.write_text(MODULE)
    plain = {k: v for k, v in hardware.items() if k != "model_hash"} | {"lowering": "op"}
    config.write_text(json.dumps({"perf_estimator": {"method": "opcast", "hardware": plain}}))
    arguments = ["hespas", config, "--mlir_file", program, "--output", out]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert 0 < float(out.read_text()) < 1e-2
    config.write_text(json.dumps({"perf_estimator": {"method": "roofline"}}))
    with pytest.raises(DatasetError, match="method is 'roofline'"):
        CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    config.write_text("[]")
    with pytest.raises(DatasetError, match="not a HESPAS configuration"):
        CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_a_reduction_of_two_operands_gets_the_types_of_each(hespas):
    # As MLIR prints the argument of a maximum: operands and initial values alternate.
    text = hespas.op_program(
        """%6:2 = stablehlo.reduce(%3 init: %cst), (%4 init: %c) across dimensions = [1]
        : (tensor<4x8xf32>, tensor<4x8xi32>, tensor<f32>, tensor<i32>)
          -> (tensor<4xf32>, tensor<4xi32>)
        reducer(%a: tensor<f32>, %b: tensor<f32>) (%d: tensor<i32>, %e: tensor<i32>) {
          %7 = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
          %8 = stablehlo.select %7, %a, %b : tensor<i1>, tensor<f32>
          %9 = stablehlo.select %7, %d, %e : tensor<i1>, tensor<i32>
          stablehlo.return %8, %9 : tensor<f32>, tensor<i32>
        }""",
        [((4, 8), "f32"), ((4, 8), "i32"), ((), "f32"), ((), "i32")],
        [((4,), "f32"), ((4,), "i32")],
    )
    parameters = read_program(text).program.entry_computation.parameters
    assert [(p.type.dtype, p.type.shape) for p in parameters] == [
        ("f32", (4, 8)), ("s32", (4, 8)), ("f32", ()), ("s32", ()),
    ]  # fmt: skip


def test_operations_with_regions_and_several_results_become_programs(hespas):
    text = hespas.op_program(
        "%2:2 = stablehlo.custom %0#1, %1 : (tensor<4xf32>, tensor<i32>) -> "
        "(tensor<4xf32>, tensor<2xi8>)",
        [((4,), "f32"), ((), "i32")], [((4,), "f32"), ((2,), "i8")],
    )  # fmt: skip
    assert "@main(%in0: tensor<4xf32>, %in1: tensor<i32>) -> (tensor<4xf32>, tensor<2xi8>)" in text
    assert "%out:2 = stablehlo.custom %in0, %in1 :" in text
    assert "return %out#0, %out#1 : tensor<4xf32>, tensor<2xi8>" in text
    with pytest.raises(ProgramError, match="has 1 operands"):
        hespas.op_program("%1 = stablehlo.negate %0 : tensor<4xf32>", [((4,), "f32")] * 2, [])
