"""Slices: chips in a ring, grid or torus."""

from __future__ import annotations

from functools import cache

from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec
from .topology import Cluster, Dimension, Topology

#: How devices of some kinds are joined, with the keys that the head of its file explains.
Rule = JsonObject


def sources_of(rule: Rule, dim: str, device: DeviceSpec, link: str = "") -> dict[str, str]:
    """Source of each figure, as ``<dimension>.<key>``."""
    result = {f"{dim}.{key}": text for text, keys in rule["sources"].items() for key in keys}
    if link:
        where = device.provenance.get(link, "the device file")
        result[f"{dim}.bandwidth_gbps"] = f"{link} of {device.name}: {where}"
    return result


def shape_of(count: int, rule: Rule) -> tuple[int, ...]:
    """Chips along each axis of a slice of so many devices, as even as may be; empty if none is.

    Slices are powers of two, or made of whole cubes where the hardware is.
    """
    cores = rule.get("cores_per_chip", 1)
    chips, rest = divmod(count, min(cores, count))
    cube, axes = rule.get("cube", 0), rule["axes"]
    if rest:
        return ()
    if cube and chips % cube**axes == 0:
        return tuple(cube * n for n in _grid(chips // cube**axes, axes))
    return () if chips & (chips - 1) else tuple(_grid(chips, axes))


def slice_of(
    device: DeviceSpec, count: int, rule: Rule, name: str, shape: tuple[int, ...]
) -> Cluster:
    """Chips in a grid, and the cores of a chip inside."""
    cores = min(rule.get("cores_per_chip", 1), count)
    chips = count // cores
    dims: list[Dimension] = []
    start = {"latency": rule["latency_us"] * 1e-6, "launch": rule["launch_us"] * 1e-6}
    if cores > 1:
        dims.append(Dimension("switch", cores, rule["core_gbps"] * 1e9, **start, name="cores"))
    grid = [n for n in shape if n > 1]
    per_axis = device.link_bandwidth / rule["axes"]
    # An axis without wrap-around links sends what returns over the same links: half the bandwidth
    # of a ring. Exact for collectives, half of what one transfer gets (docs/clusters.md).
    # Cubes close every axis of whole ones by optical switches.
    cube = rule.get("cube", 1)
    speed = [per_axis / (1 if n >= rule["wraps"] and n % cube == 0 else 2) for n in grid]
    common = {**start, "efficiency": rule["efficiency"], "name": "ici"}
    # A torus shares its bandwidth equally between its axes. Axes of different speed (one closed,
    # one open) become rings of their own, and collectives take them one after another.
    if len(grid) > 1 and len(set(speed)) == 1:
        dims.append(Dimension("torus", chips, sum(speed), shape=tuple(grid), **common))
    else:
        dims += [Dimension("ring", n, s, **common) for n, s in zip(grid, speed, strict=True)]
    sources = sources_of(rule, "ici", device, "link_gbps")
    # A topology needs a dimension, even for a single chip.
    if not dims:
        dims = [Dimension("ring", 1, device.link_bandwidth, **common)]
    return Cluster(name, device.name, Topology(tuple(dims)), count, sources)


@cache
def _grid(chips: int, axes: int) -> list[int]:
    """Factor ``chips`` into numbers that are as equal as possible, smallest first."""
    if axes == 1:
        return [chips]
    # The smallest axis is at most the root; of several the one whose rest is most even.
    smallest = [n for n in range(1, round(chips ** (1 / axes)) + 1) if chips % n == 0]
    grids = [sorted([n, *_grid(chips // n, axes - 1)]) for n in smallest]
    return min(grids, key=lambda grid: (grid[-1], -grid[0]))
