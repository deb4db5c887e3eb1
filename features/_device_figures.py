"""Whether the figures of a device description are figures, and its name a name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import DeviceSpec

#: Characters of a name.
MAX_NAME = 200
_ABOVE_ZERO = ("floor",)
_NOT_BELOW = (
    "launch_gap", "dispatch", "core_count", "clock_hz", "memory_bytes", "lanes_per_core",
    "power_w", "link_bandwidth", "inter_node_bandwidth", "host_bandwidth", "devices_per_node",
    "shared_bytes_per_core",
)  # fmt: skip


def check_name(name: Any) -> str:
    """A name that a file can be called after and a terminal can print.

    Raises:
        ValueError: It is none: empty, too long, with slashes or control characters.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        raise ValueError(f"{str(name)[:MAX_NAME]!r} is no name")
    if not name.isprintable() or set("/\\") & set(name) or name.startswith("."):
        raise ValueError(f"name {name!r} has characters that no name has")
    return name


def check_figures(spec: DeviceSpec) -> None:
    """Check names and figures.

    Raises:
        ValueError: A figure is none, is not finite, or below what it can be.
    """
    check_name(spec.name)
    if spec.platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform {spec.platform!r} is not cpu, gpu or tpu")
    for table in ("peak_flops", "vector_flops"):
        for dtype, rate in getattr(spec, table).items():
            _number(f"{table}.{dtype}", rate, above=True)
    if not spec.levels:
        raise ValueError("levels is empty")
    for level in spec.levels:
        _number("capacity", level.capacity, above=False, finite=False)
        _number("bandwidth", level.bandwidth, above=True)
    for name in (*_ABOVE_ZERO, *_NOT_BELOW):
        _number(name, getattr(spec, name), above=name in _ABOVE_ZERO)


def _number(name: str, value: Any, *, above: bool, finite: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, not a number")
    if value != value or (finite and math.isinf(value)) or value < 0 or (above and value == 0):
        raise ValueError(f"{name} is {value!r}")
