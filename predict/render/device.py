"""Output of a device with the source of each value, or of the catalogue as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ...common.units import plain
from ...features.devices.device import DeviceSpec
from ...features.devices.sheet import NUMBERS, RATES, TERA
from .parts import Column, fitted_table, plain_table


class Figure(NamedTuple):
    """A value of a device.

    Attributes:
        key: Key in the device file, such as ``peak_tflops.bf16``.
        value: Value in the unit of the key.
        source: Source of the value.
        defaulted: Whether it is missing in the device file and was filled by a rule.
    """

    key: str
    value: float
    source: str
    defaulted: bool


#: A device, with its values by key.
_Known = tuple[DeviceSpec, dict[str, Figure]]


def figures(spec: DeviceSpec) -> list[Figure]:
    """List all known values of a device, in the order of a device file."""
    # Converted from SI to the units of a device file, whose keys are printed.
    values = [(key, si / NUMBERS[key]) for key, si in _numbers(spec).items() if si]
    values += _rates(spec)
    source = spec.provenance
    return [
        Figure(key, value, source.get(key, spec.source), key in spec.defaulted)
        for key, value in values
    ]


def print_device(console: Console, spec: DeviceSpec) -> None:
    """Print a device with its sources; values filled by a rule are marked ``default``."""
    about = ", ".join(filter(None, (spec.vendor, spec.architecture, spec.platform)))
    console.print(Text(f"{spec.name}  ({about})", style="bold"))
    if spec.aliases:
        console.print(Text(f"also: {', '.join(spec.aliases)}"))
    table = plain_table("figure", "value", "", "source", right=("value",), fold=("source",))
    for figure in figures(spec):
        table.add_row(
            figure.key,
            plain(figure.value, 5),
            Text("default" if figure.defaulted else "", style="yellow"),
            Text(figure.source.removeprefix("default: ")),
        )
    console.print(table)
    if spec.extra.get("notes"):
        console.print(Text(f"note: {spec.extra['notes']}", style="yellow"))


def print_devices(console: Console, specs: Iterable[DeviceSpec]) -> None:
    """Print devices side by side, one per line."""
    columns: tuple[Column[_Known], ...] = (
        Column("name", lambda d: d[0].name, justify="left"),
        *(
            Column(name, partial(_cell, key), rank)
            for name, key, rank in (
                ("cores", "core_count", 4),
                ("f32 vector", "vector_tflops.f32", 3),
                ("bf16", "peak_tflops.bf16", 0),
                ("f8", "peak_tflops.f8e4m3fn", 2),
                ("s8", "peak_tflops.s8", 6),
                ("L2 MB", "l2_mb", 5),
                ("L2 GB/s", "l2_bandwidth_gbps", 7),
                ("GB/s", "hbm_bandwidth_gbps", 0),
                ("GB", "memory_gb", 0),
                ("link GB/s", "link_gbps", 1),
                ("W", "power_w", 1),
            )
        ),
        Column("also", lambda d: d[0].aliases[0] if d[0].aliases else "", 8, "left"),
    )
    known = ((spec, {figure.key: figure for figure in figures(spec)}) for spec in specs)
    console.print(fitted_table(console.width, columns, known))
    console.print(
        "rates in TFLOPS of the matrix unit unless stated otherwise; ~ marks values from a rule; "
        "sources: opcast device NAME"
    )


def _cell(key: str, device: _Known) -> str:
    figure = device[1].get(key)
    if figure is None:
        return "–"
    value = f"{figure.value:.4g}" if figure.value < 1e4 else f"{figure.value:.0f}"
    # Values from a rule are less certain than those of a data sheet.
    return f"~{value}" if figure.defaulted else value


def _numbers(spec: DeviceSpec) -> dict[str, float]:
    """Return values by key in SI units; 0 where unknown."""
    # The last level is main memory; the one before it is the last cache.
    cache = spec.levels[-2] if len(spec.levels) > 1 else None
    return {
        "core_count": spec.core_count,
        "lanes_per_core": spec.lanes_per_core,
        "boost_mhz": spec.clock_hz,
        "shared_kb_per_core": spec.shared_bytes_per_core,
        "efficient_cores": float(spec.extra.get("efficient_cores", 0.0)),
        "efficient_lanes_per_core": float(spec.extra.get("efficient_lanes_per_core", 0.0)),
        "efficient_mhz": float(spec.extra.get("efficient_hz", 0.0)),
        "array_rows": spec.array_rows,
        "array_columns": spec.array_columns,
        "arrays_per_core": spec.arrays_per_core,
        "l2_mb": cache.capacity if cache else 0.0,
        "l2_bandwidth_gbps": cache.bandwidth if cache else 0.0,
        "hbm_bandwidth_gbps": spec.bandwidth,
        "memory_gb": spec.memory_bytes,
        "power_w": spec.power_w,
        "link_gbps": spec.link_bandwidth,
        "pair_link_gbps": float(spec.extra.get("pair_link_bandwidth", 0.0)),
        "inter_node_gbps": spec.inter_node_bandwidth,
        "pcie_gbps": spec.host_bandwidth,
        "devices_per_node": spec.devices_per_node,
        "launch_floor_us": spec.floor,
        "launch_gap_us": spec.launch_gap,
        "dispatch_us": spec.dispatch,
    }


def _rates(spec: DeviceSpec) -> Iterator[tuple[str, float]]:
    for table, rates in zip(RATES, (spec.peak_flops, spec.vector_flops), strict=True):
        for dtype in RATES[table]:
            if dtype in rates:
                yield f"{table}.{dtype}", rates[dtype] / TERA
