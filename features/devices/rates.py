"""Rates of a device that designs change, by the keys of a device file, and devices with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from .catalogue import device_of
from .device import DeviceSpec, MemoryLevel
from .sheet import sheet_of

#: Name of a device of which figures are changed, and of its file.
CHANGED = "what-if"
#: A device with one of its rates multiplied.
Scale = Callable[[DeviceSpec, float], DeviceSpec]


def _level(place: int) -> Scale:
    def scale(device: DeviceSpec, factor: float) -> DeviceSpec:
        levels = list(device.levels)
        levels[place] = MemoryLevel(levels[place].capacity, levels[place].bandwidth * factor)
        return replace(device, levels=tuple(levels))

    return scale


def _times(rates: dict[str, float], factor: float) -> dict[str, float]:
    return {name: rate * factor for name, rate in rates.items()}


#: The rates that kernels run at, all types of a unit together. The clock is that of what counts
#: cycles, at the same rates of the units.
RATES: dict[str, Scale] = {
    "peak_tflops": lambda d, f: replace(d, peak_flops=_times(d.peak_flops, f)),
    "vector_tflops": lambda d, f: replace(d, vector_flops=_times(d.vector_flops, f)),
    "boost_mhz": lambda d, f: replace(d, clock_hz=d.clock_hz * f),
    "hbm_bandwidth_gbps": _level(-1),
    "l2_bandwidth_gbps": _level(0),
    "power_w": lambda d, f: replace(d, power_w=d.power_w * f),
}


def rates_of(device: DeviceSpec) -> dict[str, Scale]:
    """Return the rates that a device has: one without a cache has none of it."""
    lacking = {
        "boost_mhz": not device.clock_hz,
        "l2_bandwidth_gbps": len(device.levels) < 2,
        "power_w": not device.power_w,
    }
    return {name: scale for name, scale in RATES.items() if not lacking.get(name)}


def changed_device(base: str, figures: Mapping[str, float]) -> DeviceSpec:
    """Make the device of a file that changes figures of a device of the catalogue.

    Args:
        base: Its name.
        figures: By the keys of a device file, in its units, such as ``hbm_bandwidth_gbps``.

    Raises:
        DeviceError: A key is unknown, or a figure is wrong.
    """
    file = Path(f"{CHANGED}.yaml")
    return device_of(sheet_of({"name": CHANGED, "base": base, **figures}, file))
