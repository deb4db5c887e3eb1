"""What a board's power leaves of the FP32 peak, and whose power bounds which chip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.features.devices.catalogue import device_names, find_device, load_device_file
from opcast.features.devices.device import DeviceSpec
from opcast.features.operators.machine import power_rate

#: Power beyond 20 W over that of the FP32 peak at the energy of an operation, by device; the others
#: have enough.
CAPPED = {
    "p4": (75 - 20) / (17 * 5.7),
    "t4": (70 - 20) / (27 * 8.14),
    "a100-pcie-40gb": (250 - 20) / (12.5 * 19.5),
    "mi100": (300 - 20) / (12.5 * 46.1),
    "mi210": (300 - 20) / (12.5 * 45.3),
    "mi250": (280 - 20) / (12.5 * 45.3),
    "mi250x": (280 - 20) / (12.5 * 47.9),
    "a40": (300 - 20) / (12.5 * 37.4),
    "rtx-3090": (350 - 20) / (12.5 * 35.6),
    "rtx-a6000": (300 - 20) / (12.5 * 38.7),
    "a10": (150 - 20) / (12.5 * 31.2),
    "a10g": (300 - 20) / (12.5 * 35),
    "h100-sxm": (700 - 20) / (14 * 66.9),
    "h100-pcie": (350 - 20) / (14 * 51.2),
    "h100-nvl": (400 - 20) / (14 * 60),
    "h200-sxm": (700 - 20) / (14 * 66.9),
    "h200-nvl": (600 - 20) / (14 * 60),
    "h800-sxm": (700 - 20) / (14 * 66.9),
    "h20": (400 - 20) / (14 * 39.5),
    "gh200": (900 - 20) / (14 * 67),
    "gh200-144gb": (900 - 20) / (14 * 67),
    "l4": (72 - 20) / (14 * 30.3),
    "l40s": (350 - 20) / (14 * 91.6),
    "rtx-4090": (450 - 20) / (14 * 82.6),
    "rtx-6000-ada": (300 - 20) / (14 * 91.1),
    "l40": (300 - 20) / (14 * 90.5),
    "l20": (275 - 20) / (14 * 59.8),
    "b200": (1000 - 20) / (14 * 74.5),
    "rtx-pro-6000": (600 - 20) / (14 * 117),
    "rtx-5090": (575 - 20) / (14 * 104.8),
    "rtx-2080-ti": (250 - 20) / (27 * 13.45),
    "rtx-3090-ti": (450 - 20) / (12.5 * 40),
    "rtx-pro-6000-max-q": (300 - 20) / (14 * 110),
}


def sustained(spec: DeviceSpec) -> float:
    """Share of the FP32 peak that the power limit feeds."""
    return min(1.0, power_rate(spec) / spec.matrix_peak("f32"))


def chip(folder: Path, text: str) -> DeviceSpec:
    path = folder / "chip.yaml"
    path.write_text(f"name: chip\n{text}")
    return load_device_file(path)


def drawn(share: float) -> float:
    """Share of the peak's power at a share of its clock: the voltage falls to a half."""
    return share * (0.5 + 0.5 * share) ** 2


@pytest.mark.parametrize("name", device_names())
def test_power_bounds_the_devices_that_it_was_read_off_and_their_kin(name: str) -> None:
    assert drawn(sustained(find_device(name))) == pytest.approx(CAPPED.get(name, 1.0), rel=5e-3)


def test_one_energy_explains_the_chips_that_their_power_holds() -> None:
    """Shares of the peak that large FP32 products reach in NeuSight's tables, their median."""
    reached = {"a100-pcie-40gb": 0.78, "h100-sxm": 0.74, "mi100": 0.64, "mi210": 0.63, "l4": 0.28}
    for name, share in reached.items():
        # Tiles take their part, too: what power leaves is no less than what was reached.
        assert share < sustained(find_device(name)) < 1.25 * share


def test_a_chip_is_not_bounded_by_the_energy_of_another_process() -> None:
    mi100 = find_device("mi100")
    assert sustained(mi100) < 0.7
    # AMD's later chips are not MI100, and of a process without a reading nothing is known.
    for architecture in ("cdna3", "cdna4", "xe2", "rubin", ""):
        assert sustained(replace(mi100, architecture=architecture)) == 1.0
    assert sustained(replace(mi100, power_w=0.0)) == 1.0


@pytest.mark.parametrize("base", ["h100-sxm", "l4", "mi100", "t4", "v100-sxm"])
@pytest.mark.parametrize("factor", [0.5, 2, 4])
def test_power_that_a_file_does_not_give_grows_with_its_rate(
    tmp_path: Path, base: str, factor: float
) -> None:
    one = find_device(base)
    cores = int(one.core_count * factor)
    for text in (f"core_count: {cores}\n", f"boost_mhz: {one.clock_hz / 1e6 * factor}\n"):
        more = chip(tmp_path, f"base: {base}\n{text}hbm_bandwidth_gbps: 9000\n")
        assert more.matrix_peak("f32") == pytest.approx(factor * one.matrix_peak("f32"), rel=0.02)
        assert more.power_w - 20 == pytest.approx(factor * (one.power_w - 20), rel=0.02)
        assert sustained(more) == pytest.approx(sustained(one))
        assert "as the rate of f32" in more.provenance["power_w"]


def test_power_follows_a_rate_that_the_file_lists(tmp_path: Path) -> None:
    more = chip(tmp_path, "base: h100-sxm\npeak_tflops: {f32: 133.8}\n")
    assert more.power_w == pytest.approx(20 + 2 * 680)
    assert sustained(more) == pytest.approx(sustained(find_device("h100-sxm")))


def test_power_stays_with_the_rate(tmp_path: Path) -> None:
    h100 = find_device("h100-sxm")
    assert chip(tmp_path, "base: h100-sxm\nhbm_bandwidth_gbps: 9000\n").power_w == h100.power_w
    own = chip(tmp_path, "base: h100-sxm\ncore_count: 528\npower_w: 700\n")
    # What the file says holds: 680 W for 4 × 66.9 TFLOP/s at 14 pJ.
    assert own.power_w == 700
    assert drawn(sustained(own)) == pytest.approx(680 / (14 * 4 * 66.9))
