"""A package of others, installed, adds an estimator, a device and a workload."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opcast

EXAMPLE = Path(__file__).parent.parent / "plugins" / "example"
CODE = """
import json, pathlib, sys
from opcast.datagen import zoo
from opcast.features.devices.catalogue import device_names, find_device
from opcast.features.kernels.extract import kernel_from_ir
from opcast.models.cost_model import CostModel
from opcast.models.core.registry import estimator_names, make_estimator

chip = find_device("Example Chip")
kernel = kernel_from_ir("HloModule m\\nENTRY e {\\n  p = f32[8] parameter(0)\\n"
                        "  ROOT r = f32[8] add(p, p)\\n}\\n")
model = CostModel(make_estimator("constant", seconds=3e-6))
model.save("model")
text = zoo.build("square", batch=4, width=32).mlir(debug_info=False)
import opcast
print(json.dumps({
    "estimator": "constant" in estimator_names(),
    "device": "example-chip" in device_names() and chip.bandwidth,
    "h100": find_device("h100-sxm").bandwidth,
    "family": "square" in zoo.all_families(),
    "dot": "tensor<4x32xf32>" in text and "stablehlo.dot_general" in text,
    "latency_us": opcast.load("model").latency_us(kernel, chip),
}))
"""


@pytest.mark.slow
def test_an_installed_package_is_found(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", site, source], check=True, capture_output=True
    )
    root = Path(opcast.__file__).parent.parent
    paths = os.pathsep.join(map(str, (site, root)))
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == pytest.approx(6.7e12)
    assert found["h100"] == pytest.approx(3.35e12)
    assert found["latency_us"] == pytest.approx(3.0)
    assert all(found[k] for k in ("estimator", "family", "dot"))
