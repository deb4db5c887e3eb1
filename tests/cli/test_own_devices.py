"""A chip that no catalogue lists, in one's own table: imported, left out, calibrated to, judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.features.devices.catalogue import find_device, load_device_file
from opcast.features.operators import op_features
from opcast.models.operators import OpModel

from ..support.cases import later

CHIP = """name: zephyr-1
platform: gpu
hbm_bandwidth_gbps: 4000
memory_gb: 96
peak_tflops: {f32: 60, bf16: 1200}
core_count: 132
"""


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, op_rows: Callable[..., pd.DataFrame]) -> Path:
    """A folder with a table of three chips, the file of one of them, and the imported dataset."""
    root = tmp_path_factory.mktemp("lab")
    (root / "zephyr.yaml").write_text(CHIP)
    own = load_device_file(root / "zephyr.yaml")
    parts = []
    for seed, spec in enumerate((find_device("h100-sxm"), find_device("l40s"), own)):
        rows = op_rows("kernel/linear", 400, seed).assign(device=spec.name, dtype="bf16")
        base = op_features(rows, "kernel/linear", {spec.name: spec}).base_s
        noise = np.exp(np.random.default_rng(seed).normal(0, 0.03, len(rows)))
        parts.append(rows.assign(latency_us=base * noise * 1.3e6, source="mylab", op="linear"))
    table = pd.concat(parts).drop(columns=["key", "method"])
    table["split"] = np.where(np.arange(len(table)) % 5 == 0, "val", "train")
    table.to_csv(root / "table.csv", index=False)
    said = _run(
        "data", "import", "published", root / "table.csv", "--out", root / "ops",
        "--device", root / "zephyr.yaml",
    )  # fmt: skip
    assert "1200 samples of 3 devices" in said
    return root


def _train(lab: Path, out: str, *options: object) -> str:
    fixed = ("--model", "ridge", "--no-track", "--max-rows", 400)
    return _run("train", "--data", lab / "ops", "--out", lab / out, *fixed, *options)


@pytest.fixture(scope="module")
def trained(lab: Path) -> Path:
    """A model of all three chips."""
    _train(lab, "all")
    return lab / "all"


@pytest.mark.parametrize("by_file", [later(False), True])
def test_ones_own_chip_is_left_out_and_then_calibrated_to(lab: Path, by_file: bool) -> None:
    named = lab / "zephyr.yaml" if by_file else "zephyr-1"
    out = f"without-{by_file}"
    said = _train(lab, out, "--exclude-device", named)
    assert "zephyr-1" in said and "unseen" in said
    assert set(OpModel.load(lab / out).devices) == {"h100-sxm", "l40s"}
    adapted = lab / f"adapted-{by_file}"
    said = _run(
        "calibrate", "--device", named, "--data", lab / "ops", "--model", lab / out,
        "--samples", 10, "--out", adapted,
    )  # fmt: skip
    assert "zephyr-1: MAPE in % by samples of each family" in said
    # The description comes with the rows: 4000 GB/s are the file's.
    assert OpModel.load(adapted).devices["zephyr-1"].bandwidth == 4000e9
    # The adapted model knows the chip, so that its table needs no file.
    judged = lab / f"judged-{by_file}.csv"
    said = _run("evaluate", "--published", lab / "table.csv", "--model", adapted, "--out", judged)
    assert "zephyr-1" in said and "calibrated" in said


def test_a_chip_that_nothing_describes_is_refused_with_those_that_are(lab: Path) -> None:
    with pytest.raises(Exception, match=r"'zephyr-2'.*not in the catalogue.*described.*zephyr-1"):
        _train(lab, "none", "--exclude-device", "zephyr-2")
    with pytest.raises(Exception, match=r"no rows of t4.*its devices are h100-sxm, l40s, zephyr-1"):
        _run("calibrate", "--device", "t4", "--data", lab / "ops", "--model", _old(lab))


def _old(lab: Path) -> Path:
    if not (lab / "old").is_dir():
        _train(lab, "old", "--exclude-device", "zephyr-1")
    return lab / "old"


def test_drift_is_judged_on_ones_own_chip(lab: Path, trained: Path) -> None:
    asked = ("drift", "--data", lab / "table.csv")
    said = _run(*asked, "--model", trained)
    assert "zephyr-1" in said and "0 of" in said
    with pytest.raises(Exception, match=r"'zephyr-1' is not in the catalogue.*--device FILE"):
        _run(*asked, "--model", _old(lab))
    said = _run(*asked, "--model", _old(lab), "--device", lab / "zephyr.yaml")
    assert "zephyr-1" in said


def test_an_audit_takes_the_file_of_ones_own_chip(lab: Path, tmp_path: Path) -> None:
    table = pd.read_csv(lab / "table.csv")
    own = np.flatnonzero(table["device"] == "zephyr-1")
    # 4096³ in bf16 take 115 µs at the 1200 TFLOP/s that the file states.
    table.loc[own[0], ["b", "m", "n", "k", "latency_us"]] = [1, 4096, 4096, 4096, 60.0]
    table.to_csv(tmp_path / "table.csv", index=False)
    said = _run("audit", tmp_path / "table.csv")
    assert "400 rows of unknown devices were not checked: zephyr-1" in said
    assert "800 rows checked, 0 flagged" in said
    asked = ["audit", tmp_path / "table.csv", "--device", lab / "zephyr.yaml", "--json"]
    result = CliRunner().invoke(app, [str(a) for a in asked])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["rows"] == 1200 and found["impossible"] == 1
    assert found["reasons"][0]["reason"] == "above the peak"
