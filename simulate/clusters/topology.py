"""Topologies as data: dimensions of links, and the part of them that a group of devices spans.

A topology is a product of dimensions, innermost first (as in ASTRA-sim 2.0: Won et al., ISPASS
2023): rank ``r`` has the coordinate ``r % size`` in the first one, ``r // size % size'`` in the
second, and so on. Every dimension is a network between the devices that differ only in its
coordinate:

- ``ring``: each device has links to both neighbours;
- ``fully_connected``: a link from each device to every other;
- ``switch``: one port per device to a non-blocking switch;
- ``torus``: a grid of two or three axes, ``shape``, with a ring along each;
- ``fat_tree``: leaf switches with ``radix`` devices each under a non-blocking spine; the links of a
  leaf to the spine have ``1 / oversubscription`` of the bandwidth of its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from ...common.errors import DeviceError

#: Kinds of dimensions.
KINDS = ("ring", "fully_connected", "switch", "torus", "fat_tree")
#: Reduction inside the network: none, a tree of switches (InfiniBand SHARP), or a switch that reads
#: from and writes to many devices at a device's request (NVLink SHARP; NVLS in NCCL).
REDUCTIONS = ("", "tree", "multicast")

#: Algorithms inside a dimension (formulas: ``collectives/one_dimension.py``).
ALGORITHMS = (
    "ring",
    "direct",
    "one_shot",
    "tree",
    "halving_doubling",
    "scatter_gather",
    "in_network",
)


@dataclass(frozen=True)
class Dimension:
    """One dimension of a topology, in SI units.

    Attributes:
        kind: One of :data:`KINDS`.
        size: Number of devices along it.
        bandwidth: Bytes/s in one direction over all links of one device in this dimension: both
            links of a ring, every link of a fully connected one, the port of a switch.
        latency: Seconds between neighbouring devices: one link of a ring; through one switch (half
            on each of the two links). Between leaves of a fat tree it is twice this.
        launch: Seconds before the first byte of a collective moves.
        shape: Devices along each axis of a torus, innermost first.
        radix: Devices under a leaf of a fat tree.
        oversubscription: Bandwidth of a leaf's devices over the bandwidth to the spine.
        reduction: Reduction inside the network, one of :data:`REDUCTIONS`.
        efficiency: Fraction of ``bandwidth`` that collectives reach.
        algorithms: The :data:`ALGORITHMS` that the library implements here; a collective that
            none of them covers may use any. Empty for all.
        name: Label such as ``nvlink``.

    Raises:
        DeviceError: A figure is implausible.
    """

    kind: str
    size: int
    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0
    shape: tuple[int, ...] = ()
    radix: int = 0
    oversubscription: float = 1.0
    reduction: str = ""
    efficiency: float = 1.0
    algorithms: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for wrong, what, hint in self._faults():
            if wrong:
                raise DeviceError(what, where=f"dimension {self.name or self.kind!r}", hint=hint)

    def _faults(self) -> list[tuple[bool, str, str]]:
        torus, tree = self.kind == "torus", self.kind == "fat_tree"
        fits = len(self.shape) in (2, 3) and prod(self.shape) == self.size and min(self.shape) > 0
        leaves = self.radix > 0 and self.size % max(self.radix, 1) == 0
        shape = f"shape {list(self.shape)} is not {self.size} devices in 2 or 3 axes"
        under = f"radix {self.radix} does not divide {self.size} devices"
        reduces = not self.reduction or self.kind in ("switch", "fat_tree")
        others = [a for a in self.algorithms if a not in ALGORITHMS]
        # Negated comparisons ("not x > 0") also reject NaN.
        return [
            (self.kind not in KINDS, f"unknown kind {self.kind!r}", f"one of {', '.join(KINDS)}"),
            (self.size < 1, f"size {self.size} is below 1", "count the devices along it"),
            (not self.bandwidth > 0, f"bandwidth {self.bandwidth} is not above 0", "bytes/s"),
            (not self.latency >= 0, f"latency {self.latency} is below 0", "seconds"),
            (not self.launch >= 0, f"launch {self.launch} is below 0", "seconds"),
            (not 0 < self.efficiency <= 1, f"efficiency {self.efficiency}", "above 0, at most 1"),
            (not self.oversubscription >= 1, f"oversubscription {self.oversubscription}", "from 1"),
            (torus and not fits, shape, "give the shape, such as [4, 4]"),
            (tree and not leaves, under, "give the devices under a leaf switch"),
            (
                self.reduction not in REDUCTIONS,
                f"unknown reduction {self.reduction!r}",
                "tree, multicast, or none",
            ),
            (not reduces, f"a {self.kind} cannot reduce", "only switches do"),
            (bool(others), f"unknown algorithms {others}", f"some of {', '.join(ALGORITHMS)}"),
        ]

    @property
    def rate(self) -> float:
        """Bytes/s per device that collectives reach."""
        return self.bandwidth * self.efficiency

    @property
    def axes(self) -> tuple[int, ...]:
        """Devices along each axis, innermost first; one axis unless it is a torus."""
        return self.shape if self.kind == "torus" else (self.size,)

    def rings(self) -> tuple[Dimension, ...]:
        """The axes of a torus as rings with equal shares of the links; otherwise itself."""
        if self.kind != "torus":
            return (self,)
        share = self.bandwidth / len(self.shape)
        return tuple(
            replace(self, kind="ring", size=n, bandwidth=share, shape=()) for n in self.shape
        )


@dataclass(frozen=True)
class Topology:
    """Dimensions, innermost first.

    Attributes:
        dims: The dimensions.
    """

    dims: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        """Check that there is a dimension.

        Raises:
            DeviceError: There is none.
        """
        if not self.dims:
            raise DeviceError("a topology needs at least one dimension", where="topology")

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(d.size for d in self.dims)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Devices along every axis of every dimension, innermost first."""
        return tuple(n for d in self.dims for n in d.axes)

    def coordinates(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Coordinates of ranks along every axis; ``(n,)`` in, ``(n, n_axes)`` out.

        Raises:
            DeviceError: A rank does not exist.
        """
        # Checked before ``unravel_index``, so that the error names the rank.
        numbers = np.asarray(ranks, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.size):
            wrong = numbers[(numbers < 0) | (numbers >= self.size)][0]
            raise DeviceError(
                f"rank {wrong} is not one of {self.size} devices",
                where="topology",
                hint="check the groups, or take a larger cluster",
            )
        # NumPy's last axis varies fastest, a topology's first one: reverse both ways.
        return np.stack(np.unravel_index(numbers, self.axes[::-1])[::-1], axis=1)

    def group_dims(self, group: Sequence[int] | int) -> tuple[Dimension, ...]:
        """The part of each dimension that a group spans, in which its devices differ.

        Sibling groups of the same pattern are assumed to communicate at the same time, as in a
        partitioned program, so groups that interleave on a ring share its links.

        Args:
            group: Ranks; a ``range`` for strided groups; a number ``n`` for ranks ``0 … n-1``.

        Returns:
            Dimensions as the group sees them, innermost first; empty for a single device. An
            irregular group (not equal steps along each axis in all combinations) counts as one
            switch with the bandwidth, latency and launch cost of the slowest dimension it crosses.

        Raises:
            DeviceError: A rank does not exist, or is listed twice.
        """
        # A ``range`` is kept as the cache key: hashing it does not list its ranks.
        ranks = range(group) if isinstance(group, int) else group
        key = ranks if isinstance(ranks, range) else tuple(int(r) for r in ranks)
        return _group_dims(self, key)


@dataclass(frozen=True)
class Cluster:
    """Devices and their network.

    Attributes:
        name: Name such as ``dgx-h100-x128``.
        device: Name of the device in the catalogue, or of a device file.
        topology: Network of the devices.
        devices_per_node: Devices per box; the whole cluster if it is a single box.
        sources: Source of each figure, by key (``nvlink.bandwidth_gbps``).
        notes: Free text.
        host_memory: Bytes of host memory per box; 0 if unknown.
    """

    name: str
    device: str
    topology: Topology
    devices_per_node: int = 0
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    notes: str = field(default="", compare=False)
    host_memory: float = 0.0

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.topology.size

    @property
    def box(self) -> int:
        """Devices per box; 0 for a single box."""
        return self.devices_per_node if self.devices_per_node < self.size else 0

    @property
    def boxes(self) -> int:
        """Number of boxes; the last one may be partly filled."""
        return -(-self.size // (self.box or self.size))


# A step asks for the same few groups thousands of times; the size is an engineering choice.
@lru_cache(maxsize=4096)
def _group_dims(topology: Topology, ranks: range | tuple[int, ...]) -> tuple[Dimension, ...]:
    where = topology.coordinates(ranks)
    if len(set(ranks)) != len(ranks):
        raise DeviceError("a rank is in a group twice", where="topology", hint="check the groups")
    values = [np.unique(where[:, a]) for a in range(where.shape[1])]
    counts = [len(v) for v in values]
    steps = [int(v[1] - v[0]) if len(v) > 1 else 1 for v in values]
    even = all(np.all(np.diff(v) == s) for v, s in zip(values, steps, strict=True))
    spans, first = [], 0
    for d in topology.dims:
        last = first + len(d.axes)
        spans.append((d, tuple(counts[first:last]), tuple(steps[first:last])))
        first = last
    crossed = [(d, n, s) for d, n, s in spans if prod(n) > 1]
    # Regular: a full grid of evenly spaced coordinates. Counting suffices, as ranks are distinct.
    if even and prod(counts) == len(ranks):
        return tuple(part for d, n, s in crossed for part in _parts(d, n, s))
    # Pessimistic fallback for irregular groups: everything passes the slowest dimension.
    slowest = min((d for d, _, _ in crossed), key=lambda d: d.rate)
    flat = {"kind": "switch", "size": len(ranks), "shape": (), "radix": 0, "reduction": ""}
    return (replace(slowest, **flat, oversubscription=1.0),)  # type: ignore[arg-type]


def _parts(
    dim: Dimension, counts: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[Dimension, ...]:
    """The part of a dimension that a group sees, or several rings, the fastest innermost.

    A torus has a single bandwidth for all axes, that of the slowest. If one axis alone is faster
    than all of them together, the group uses its axes one after another, the slowest last.
    """
    if dim.kind == "torus" and prod(counts) < dim.size:
        rings = zip(dim.rings(), counts, steps, strict=True)
        used = [_part(ring, (n,), (s,)) for ring, n, s in rings if n > 1]
        used.sort(key=lambda ring: -ring.bandwidth)
        if used[0].bandwidth > len(used) * used[-1].bandwidth:
            return tuple(used)
    return (_part(dim, counts, steps),)


def _part(dim: Dimension, counts: tuple[int, ...], steps: tuple[int, ...]) -> Dimension:
    """The part of a dimension with ``counts`` devices, ``steps`` apart, on each axis."""
    size, step = prod(counts), steps[0]
    if size == dim.size:
        return dim
    if dim.kind == "fully_connected":
        # Links to devices outside the group are useless to it: nothing is forwarded.
        share = (size - 1) / (dim.size - 1)
        return replace(dim, size=size, bandwidth=dim.bandwidth * share)
    if dim.kind == "fat_tree":
        return _part_of_tree(dim, size, step)
    if dim.kind == "ring":
        return _part_of_ring(dim, size, step)
    if dim.kind == "torus":
        return _part_of_torus(dim, counts, steps)
    return replace(dim, size=size)


def _part_of_tree(dim: Dimension, size: int, step: int) -> Dimension:
    # Members of the group under one leaf. A group within a leaf never uses the spine; one that
    # fills its leaves unevenly counts as a switch with the rate and latency of the spine.
    under = max(dim.radix // step, 1)
    if size <= under or size % under:
        flat = 1.0 if size <= under else dim.oversubscription
        far = 1.0 if size <= under else 2.0
        return replace(
            dim,
            kind="switch",
            size=size,
            radix=0,
            oversubscription=1.0,
            bandwidth=dim.bandwidth / flat,
            latency=dim.latency * far,
        )
    return replace(dim, size=size, radix=under)


def _part_of_ring(dim: Dimension, size: int, step: int) -> Dimension:
    """Part of a ring: a strided group shares links with its siblings, a segment does not close.

    Neighbours are ``step`` links apart, and each link carries the messages of ``step`` groups. The
    ring of a segment returns over the same links, which halves the bandwidth again.
    """
    closed = size * step == dim.size
    share = step if closed else 2 * step
    return replace(dim, size=size, bandwidth=dim.bandwidth / share, latency=dim.latency * step)


def _part_of_torus(dim: Dimension, counts: tuple[int, ...], steps: tuple[int, ...]) -> Dimension:
    used = [
        _part(ring, (n,), (s,))
        for ring, n, s in zip(dim.rings(), counts, steps, strict=True)
        if n > 1
    ]
    if len(used) == 1:
        return used[0]
    # A torus has one bandwidth for all axes: the slowest axis counts for all of them.
    slowest = min(r.bandwidth for r in used)
    return replace(
        dim,
        size=prod(r.size for r in used),
        shape=tuple(r.size for r in used),
        bandwidth=slowest * len(used),
        latency=max(r.latency for r in used),
    )
