"""Readings of tools and drivers, as they print them."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from opcast.datagen.campaign.machine import (
    COLUMNS,
    Telemetry,
    amd_reading,
    nvidia_reading,
    rocm_reading,
)

#: Prints lines as nvidia-smi does; an old driver refuses the power of the moment.
SMI = """#!/bin/sh
case "$*" in *instant*) [ -e "{old}" ] && echo 'not a valid field' && exit 2;; esac
echo "$*" >> "{log}"
while :; do echo "2026/11/28 10:20:53.125, 1980, 2619, 312.50, 45, [N/A]"; sleep 0.05; done
"""


def test_a_line_of_nvidia_smi() -> None:
    at, *rest = nvidia_reading("2026/11/28 10:20:53.125, 1980, 2619, 312.50, 45, 98\n")
    assert at == pytest.approx(datetime(2026, 11, 28, 10, 20, 53, 125000).timestamp())
    assert rest == [1980.0, 2619.0, 312.5, 45.0, 98.0]
    assert len(COLUMNS) == 6
    assert nvidia_reading("2026/11/28 10:20:53.125, [N/A], 1, 2, 3, 4")[1] == ""
    assert nvidia_reading("No devices were found") == []


@pytest.mark.parametrize("old", (False, True))
def test_nvidia_smi_is_read_while_a_campaign_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    tool, log, mark = tmp_path / "nvidia-smi", tmp_path / "log", tmp_path / "old"
    tool.write_text(SMI.format(old=mark, log=log))
    tool.chmod(0o755)
    if old:
        mark.touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    path = tmp_path / "telemetry.csv"
    with Telemetry(path, "gpu"):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (
            not path.exists() or path.read_text().count("\n") < 3
        ):
            time.sleep(0.05)
    lines = path.read_text().splitlines()
    assert len(lines) >= 3
    assert lines[0].split(",")[1:] == ["1980.0", "2619.0", "312.5", "45.0", ""]
    assert ("power.draw.instant" in log.read_text()) != old
    assert "--id=3" in log.read_text()


def test_files_of_amds_driver(tmp_path: Path) -> None:
    folder = tmp_path / "device" / "hwmon" / "hwmon2"
    folder.mkdir(parents=True)
    for name, value in {
        "freq1_input": 2100000000, "freq2_input": 1300000000, "power1_average": 650000000,
        "temp1_input": 41000, "temp2_input": 58000,
    }.items():  # fmt: skip
        (folder / name).write_text(f"{value}\n")
    (tmp_path / "device" / "gpu_busy_percent").write_text("97\n")
    assert amd_reading(folder) == [2100.0, 1300.0, 650.0, 58.0, 97.0]
    (folder / "power1_input").write_text("700000000\n")  # of the moment, on newer cards
    (folder / "temp2_input").unlink()
    assert amd_reading(folder)[2:4] == [700.0, 41.0]


def test_json_of_rocm_smi() -> None:
    card = {
        "sclk clock speed:": "(2100Mhz)",
        "mclk clock speed:": "(1300Mhz)",
        "Current Socket Graphics Package Power (W)": "651.0",
        "Temperature (Sensor junction) (C)": "58.0",
        "GPU use (%)": "97",
    }
    assert rocm_reading(json.dumps({"card0": card})) == [2100.0, 1300.0, 651.0, 58.0, 97.0]
    assert rocm_reading("{}") == rocm_reading("ERROR") == []


def test_a_cpu_tells_its_clock_if_linux_does(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.csv"
    with Telemetry(path, "cpu"):
        time.sleep(0.5)
    for line in path.read_text().splitlines():
        assert len(line.split(",")) == len(COLUMNS)


def test_a_tpu_tells_nothing(tmp_path: Path) -> None:
    with Telemetry(tmp_path / "telemetry.csv", "tpu"):
        pass
    assert (tmp_path / "telemetry.csv").read_text() == ""
