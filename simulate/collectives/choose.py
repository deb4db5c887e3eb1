"""Collectives over a topology: which algorithm, and how long it takes.

``time = launch + latency + transfer``: what it costs to begin, the latencies of the steps that
follow each other, and the bytes over the bandwidth of what limits. Formulas inside one dimension
are in ``one_dimension``, over several dimensions here.

**Bytes** are what *each rank puts in*: the whole buffer for ``all_reduce``, ``reduce_scatter``,
``all_to_all`` (all blocks, its own included), ``broadcast`` (the root's), ``collective_permute``
and ``send_recv``; one rank's share for ``all_gather``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from ...common.errors import DeviceError
from ..clusters.topology import Cluster, Dimension, Topology
from .one_dimension import IN_DIMENSION, allowed, fastest
from .trees import Cost, flow_rate, leaves

#: Collectives that can be estimated.
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ragged_all_to_all",
    "collective_permute",
    "broadcast",
    "send_recv",
)
#: Other names of them.
ALIASES = {
    "alltoall": "all_to_all",
    "collective_broadcast": "broadcast",
    "permute": "collective_permute",
    "send": "send_recv",
    "recv": "send_recv",
    "sendrecv": "send_recv",
    "p2p": "send_recv",
}
#: Algorithms that can be forced; ``auto`` takes the fastest.
ALGORITHMS = (*IN_DIMENSION, "hierarchical", "multi_ring")
_POINT_TO_POINT = ("collective_permute", "send_recv")


@dataclass(frozen=True)
class CollectiveCost:
    """Time of a collective, in seconds.

    Attributes:
        algorithm: The algorithm, as in :data:`ALGORITHMS`; ``none`` for a single rank.
        launch: Before the first byte.
        latency: Of the steps that follow each other.
        transfer: Bytes over bandwidth.
    """

    algorithm: str
    launch: float
    latency: float
    transfer: float

    @property
    def total(self) -> float:
        """Seconds altogether."""
        return self.launch + self.latency + self.transfer


def collective_name(kind: str) -> str:
    """The collective's name here, from that of HLO, StableHLO or nccl-tests.

    Raises:
        DeviceError: There is no such collective.
    """
    name = kind.lower().replace("-", "_").removesuffix("_start").removesuffix("_perf")
    name = ALIASES.get(name, name)
    if name not in COLLECTIVES:
        raise DeviceError(f"unknown collective {kind!r}", hint=f"one of {', '.join(COLLECTIVES)}")
    return name


def collective_latency_s(
    kind: str,
    bytes_per_rank: float,
    group: Sequence[int] | int,
    cluster: Cluster | Topology,
    algorithm: str = "auto",
    skew: float = 1.0,
) -> float:
    """Seconds of a collective, by the analytical form; arguments as :func:`collective_cost`."""
    return collective_cost(kind, bytes_per_rank, group, cluster, algorithm, skew).total


def collective_cost(
    kind: str,
    bytes_per_rank: float,
    group: Sequence[int] | int,
    cluster: Cluster | Topology,
    algorithm: str = "auto",
    skew: float = 1.0,
) -> CollectiveCost:
    """Time of a collective, by part.

    Args:
        kind: One of :data:`COLLECTIVES`, or its name in HLO or nccl-tests.
        bytes_per_rank: What each rank puts in (see above).
        group: Ranks in one replica group, in any order; a ``range``; or a number of ranks from 0
            on. ``collective_permute`` shifts from each rank to the next; ``send_recv`` has two
            ranks, of which both may send.
        cluster: Where they are.
        algorithm: One of :data:`ALGORITHMS`, or ``auto`` for the fastest.
        skew: Bytes of the busiest rank over the mean, for all-to-all of uneven blocks.

    Raises:
        DeviceError: The collective, the algorithm or a rank does not exist, or the algorithm does
            not fit the collective and the dimensions; the message says which do.
    """
    name = collective_name(kind)
    topology = cluster.topology if isinstance(cluster, Cluster) else cluster
    if not bytes_per_rank >= 0 or not skew >= 1:
        raise DeviceError(
            f"{bytes_per_rank} bytes with skew {skew}",
            where=name,
            hint="bytes are at least 0, skew at least 1",
        )
    if algorithm not in ("auto", *ALGORITHMS):
        raise DeviceError(
            f"unknown algorithm {algorithm!r}", where=name, hint=f"one of {', '.join(ALGORITHMS)}"
        )
    size = float(bytes_per_rank) * (skew if name.endswith("all_to_all") else 1.0)
    plain = name.removeprefix("ragged_")
    return dims_cost(plain, size, topology.group_dims(group), algorithm)


def dims_cost(
    kind: str, size: float, dims: tuple[Dimension, ...], algorithm: str = "auto"
) -> CollectiveCost:
    """Time of a collective over ``dims``, as :meth:`Topology.group_dims` gives them."""
    if not dims:
        return CollectiveCost("none", 0.0, 0.0, 0.0)
    launch = max(d.launch for d in dims)
    alone = len(dims) == 1 and kind not in _POINT_TO_POINT
    taken = set(allowed(kind, dims[0], size)) if alone and algorithm == "auto" else {algorithm}
    candidates = [
        CollectiveCost(name, launch, *cost)
        for name, cost in _candidates(kind, size, dims)
        if name in taken or (algorithm == "auto" and not alone) or kind in _POINT_TO_POINT
    ]
    if not candidates:
        fitting = sorted({name for name, _ in _candidates(kind, size, dims)})
        raise DeviceError(
            f"{algorithm} does not do {kind} over {' × '.join(d.kind for d in dims)}",
            hint=f"these do: {', '.join(fitting)}, or auto",
        )
    return min(candidates, key=lambda c: c.total)


def fitting_algorithms(
    kind: str, size: float, dims: tuple[Dimension, ...]
) -> list[tuple[str, float]]:
    """Algorithms that do ``kind`` over ``dims``, each with its seconds without launch cost."""
    return [(name, sum(cost)) for name, cost in _candidates(kind, size, dims)]


def _candidates(kind: str, size: float, dims: tuple[Dimension, ...]) -> Iterator[tuple[str, Cost]]:
    if kind in _POINT_TO_POINT:
        yield "direct", _neighbour(size, dims)
    elif len(dims) == 1:
        for name, cost in IN_DIMENSION.items():
            costs = cost(kind, dims[0], size)
            if costs is not None:
                yield name, costs
    else:
        yield "hierarchical", hierarchical(kind, size, dims)
        for name, many in (("multi_ring", multi_ring), ("direct", direct_over)):
            costs = many(kind, size, dims)
            if costs is not None:
                yield name, costs


def _neighbour(size: float, dims: tuple[Dimension, ...]) -> Cost:
    """From each rank to the next: every latency on the way, and the slowest of the links.

    A message takes one link of a ring, of a torus's axis or of a fully connected dimension, and the
    whole port of a switch.
    """
    axes = [ring for d in dims for ring in d.rings() if ring.size > 1]
    latency = sum(d.latency * (2 if leaves(d) > 1 else 1) for d in axes)
    return latency, size / min(_link_rate(d) for d in axes)


def _link_rate(dim: Dimension) -> float:
    return dim.rate / 2 if dim.kind == "ring" and dim.size > 2 else flow_rate(dim)


def hierarchical(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost:
    """One dimension after another, each with its fastest algorithm.

    All-reduce: reduce-scatter in the inner dimensions, all-reduce of what is left across the
    outermost, all-gather inwards again (Cho et al., *BlueConnect*, MLSys 2019). All-gather and
    broadcast go from the outermost dimension inwards, reduce-scatter outwards, so that slow outer
    links carry least; all-to-all sends all its bytes through each dimension in turn.
    """
    parts: list[Cost] = []
    if kind == "all_reduce":
        left = size
        for dim in dims[:-1]:
            parts.append(fastest("reduce_scatter", dim, left)[1])
            left /= dim.size
        parts.append(fastest("all_reduce", dims[-1], left)[1])
        for dim in reversed(dims[:-1]):
            parts.append(fastest("all_gather", dim, left)[1])
            left *= dim.size
    else:
        inwards = kind in ("all_gather", "broadcast")
        growth = {"all_gather": 1, "reduce_scatter": -1}.get(kind, 0)
        for dim in reversed(dims) if inwards else dims:
            parts.append(fastest(kind, dim, size)[1])
            size *= float(dim.size) ** growth
    return sum(p[0] for p in parts), sum(p[1] for p in parts)


def multi_ring(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost | None:
    """Rings over all ranks of two switched dimensions, one for each rank of a box.

    Each of the ``g`` rings takes ``1/g`` of the bytes and leaves a box by another rank, so that all
    network ports are busy; ``n = g N`` ranks in all, messages of ``m`` bytes. Three bounds, of
    which the largest holds: the port to the network sends ``n-1`` messages, the port inside
    ``(g-1)(n-1)``, and a message passes ``n-1`` ranks, every ``g``-th time between boxes; one that
    begins farthest from the network waits there for those ahead of it (rings as in [P] of
    ``one_dimension``; ports as NVIDIA's *NCCL* forms its channels).
    """
    if len(dims) != 2 or any(d.kind not in ("switch", "fat_tree") for d in dims):
        return None
    if kind not in ("all_reduce", "all_gather", "reduce_scatter") or leaves(dims[0]) > 1:
        return None
    inner, outer = dims
    g, n = inner.size, inner.size * outer.size
    message = (size if kind == "all_gather" else size / n) / g
    edges, port = (2 if kind == "all_reduce" else 1) * (n - 1), flow_rate(outer)
    inside, step = message / inner.rate, inner.latency + message / inner.rate
    across = message / port
    hop = outer.latency * (2 if leaves(outer) > 1 else 1)
    spine = leaves(outer) / outer.size if leaves(outer) > 1 else 0.0
    serial = edges * max(across, (g - 1) * inside) + hop
    ways: list[Cost] = []
    for away in range(g):
        far = (edges - away - 1) // g + 1 if edges > away else 0
        latency = (edges - far) * inner.latency + (far + ceil(far * spine)) * outer.latency
        wait = away * max(across - step, 0.0)
        ways.append((latency, max((edges - far) * inside + far * across + wait, serial - latency)))
    return max(ways, key=sum)


def direct_over(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost | None:
    """All-to-all at once: inside to the rank with the same number as the receiver, then across.

    Every switched dimension carries all blocks whose receiver differs in it, at the same time, each
    as in :func:`~.one_dimension.direct`; the outermost begins with the blocks that it alone
    carries, and is idle if those from inside are not there yet when it has sent them.
    """
    if kind != "all_to_all" or any(d.kind not in ("switch", "fat_tree") for d in dims):
        return None
    known = [c for d in dims if (c := IN_DIMENSION["direct"](kind, d, size)) is not None]
    inside = sum(c[0] for c in known[:-1])
    alone = known[-1][1] * dims[-1].size / prod(d.size for d in dims)
    latency, idle = inside + known[-1][0], max(inside - alone, 0.0)
    return latency, max(*(c[1] for c in known[:-1]), known[-1][1] + idle - inside)


def ring_seat(ring: int, place: int, per_box: int) -> int:
    """Rank at a place of ring number ``ring`` of :func:`multi_ring`.

    Even boxes are passed upwards from rank ``ring``, odd ones downwards from the rank before it, so
    that a ring enters the next box at the rank with the same number.
    """
    box, step = divmod(place, per_box)
    inside = ring + step if box % 2 == 0 else ring - 1 - step
    return box * per_box + inside % per_box
