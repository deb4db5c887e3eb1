"""TPU slices: chips in a ring, grid or torus."""

from __future__ import annotations

from functools import cache

from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec
from .topology import Cluster, Dimension, Topology

#: Rule for connecting devices; the head of its YAML file explains the keys.
Rule = JsonObject


def sources_of(rule: Rule, dim: str, device: DeviceSpec, link: str = "") -> dict[str, str]:
    """Source of each figure, by ``<dimension>.<key>``."""
    result = {f"{dim}.{key}": text for text, keys in rule["sources"].items() for key in keys}
    if link:
        where = device.provenance.get(link, "the device file")
        result[f"{dim}.bandwidth_gbps"] = f"{link} of {device.name}: {where}"
    return result


def shape_of(count: int, rule: Rule) -> tuple[int, ...]:
    """Chips along each axis of a slice of ``count`` devices, as even as possible, or empty.

    The number of chips is a power of two, or a multiple of a cube if the hardware consists of
    cubes.
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
    """A cluster of chips in a grid, with the cores of each chip as innermost dimension."""
    cores = min(rule.get("cores_per_chip", 1), count)
    chips = count // cores
    dims: list[Dimension] = []
    start = {"latency": rule["latency_us"] * 1e-6, "launch": rule["launch_us"] * 1e-6}
    if cores > 1:
        dims.append(Dimension("switch", cores, rule["core_gbps"] * 1e9, **start, name="cores"))
    grid = [n for n in shape if n > 1]
    per_axis = device.link_bandwidth / rule["axes"]
    # Without wrap-around links the return traffic of a ring uses the same links: half the
    # bandwidth. Exact for collectives, half of the bandwidth of a single transfer
    # (docs/clusters.md). Optical switches close every axis that consists of whole cubes.
    cube = rule.get("cube", 1)
    speed = [per_axis / (1 if n >= rule["wraps"] and n % cube == 0 else 2) for n in grid]
    common = {**start, "efficiency": rule["efficiency"], "name": "ici"}
    # A torus shares its bandwidth equally between its axes. Axes of different speed (one closed,
    # one open) become separate rings, which collectives take one after another.
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
    """Factor ``chips`` into ``axes`` numbers as equal as possible, smallest first."""
    if axes == 1:
        return [chips]
    # The smallest axis is at most the root; among several, take the one with the most even rest.
    smallest = [n for n in range(1, round(chips ** (1 / axes)) + 1) if chips % n == 0]
    grids = [sorted([n, *_grid(chips // n, axes - 1)]) for n in smallest]
    return min(grids, key=lambda grid: (grid[-1], -grid[0]))
