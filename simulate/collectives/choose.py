"""Collectives over a topology: choice of the algorithm and its closed-form time.

``time = launch + latency + transfer``: the cost of starting, the latencies of dependent steps, and
bytes over the limiting bandwidth. Formulas for one dimension are in ``one_dimension``, those for
several dimensions here.

**Bytes** are what *each rank contributes*: the whole buffer for ``all_reduce``, ``reduce_scatter``,
``all_to_all`` (all blocks including that for itself), ``broadcast`` (the root's),
``collective_permute`` and ``send_recv``; one rank's share for ``all_gather``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from ...common.errors import DeviceError
from ..clusters.topology import Cluster, Dimension, Topology
from .one_dimension import IN_DIMENSION, allowed, fastest
from .trees import Cost, flow_rate, leaves

#: Kinds whose bytes take one route, called ``direct``: there is no algorithm to choose.
_POINT_TO_POINT = ("collective_permute", "send_recv")


class Collective(NamedTuple):
    """Names of a collective in other tools.

    Attributes:
        aliases: Other spellings in HLO, StableHLO and nccl-tests.
        measured: Operation in tables of measured collectives; empty if they do not contain it.
        gathers: Whether its size there is the gathered buffer rather than one rank's contribution.
        chakra: Chakra's type; empty for transfers, which are sends and receives.
    """

    aliases: tuple[str, ...] = ()
    measured: str = ""
    gathers: bool = False
    chakra: str = ""


#: Supported collectives; half of a transfer is priced as the whole transfer.
COLLECTIVES = {
    "all_reduce": Collective((), "all_reduce", chakra="ALL_REDUCE"),
    "all_gather": Collective((), "all_gather", gathers=True, chakra="ALL_GATHER"),
    "reduce_scatter": Collective((), "reduce_scatter", chakra="REDUCE_SCATTER"),
    "all_to_all": Collective(("alltoall",), "alltoall", chakra="ALL_TO_ALL"),
    "ragged_all_to_all": Collective(chakra="ALL_TO_ALL"),
    "collective_permute": Collective(("permute",), "collective_permute"),
    "broadcast": Collective(("collective_broadcast",), chakra="BROADCAST"),
    "send_recv": Collective(("send", "recv", "sendrecv", "p2p"), "send_recv"),
}
_ALIASES = {alias: name for name, own in COLLECTIVES.items() for alias in own.aliases}
#: Algorithms that can be forced; ``auto`` takes the fastest.
ALGORITHMS = (*IN_DIMENSION, "hierarchical", "multi_ring")


@dataclass(frozen=True)
class CollectiveCost:
    """Time of a collective in seconds.

    Attributes:
        algorithm: The algorithm, as in :data:`ALGORITHMS`; ``none`` for a single rank.
        launch: Fixed cost before the first byte moves.
        latency: Latencies of the dependent steps.
        transfer: Bytes over bandwidth.
    """

    algorithm: str
    launch: float
    latency: float
    transfer: float

    @property
    def total(self) -> float:
        """Sum of the three parts."""
        return self.launch + self.latency + self.transfer


def collective_name(kind: str) -> str:
    """Convert a name of HLO, StableHLO or nccl-tests to one of :data:`COLLECTIVES`.

    Raises:
        DeviceError: There is no such collective.
    """
    # ``all-reduce-start`` is HLO's asynchronous form, ``all_reduce_perf`` the nccl-tests binary.
    name = kind.lower().replace("-", "_").removesuffix("_start").removesuffix("_perf")
    name = _ALIASES.get(name, name)
    if name not in COLLECTIVES:
        raise DeviceError(f"unknown collective {kind!r}", hint=f"one of {', '.join(COLLECTIVES)}")
    return name


def collective_cost(
    kind: str,
    bytes_per_rank: float,
    group: Sequence[int] | int,
    cluster: Cluster | Topology,
    algorithm: str = "auto",
    skew: float = 1.0,
) -> CollectiveCost:
    """Time of a collective, split into launch, latency and transfer.

    Args:
        kind: One of :data:`COLLECTIVES`, or its name in HLO or nccl-tests.
        bytes_per_rank: Bytes that each rank contributes (see the module's docstring).
        group: Ranks of one replica group, in any order; a ``range``; or a number of ranks starting
            at 0. ``collective_permute`` shifts from each rank to the next; ``send_recv`` has two
            ranks, both of which may send.
        cluster: Cluster or topology that the ranks belong to.
        algorithm: One of :data:`ALGORITHMS`, or ``auto`` for the fastest.
        skew: Bytes of the busiest rank over the mean, for an all-to-all with uneven blocks.

    Raises:
        DeviceError: The collective, the algorithm or a rank does not exist, or the algorithm does
            not support the collective over the dimensions; the message lists those that do.
    """
    name = collective_name(kind)
    topology = cluster.topology if isinstance(cluster, Cluster) else cluster
    # Negated comparisons also reject NaN.
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
    # An uneven all-to-all ends with its busiest rank: it is priced as an even one of that size.
    size = float(bytes_per_rank) * (skew if name.endswith("all_to_all") else 1.0)
    plain = name.removeprefix("ragged_")
    return dims_cost(plain, size, topology.group_dims(group), algorithm)


def dims_cost(
    kind: str, size: float, dims: tuple[Dimension, ...], algorithm: str = "auto"
) -> CollectiveCost:
    """Time of a collective over ``dims``, as :meth:`Topology.group_dims` returns them."""
    if not dims:
        return CollectiveCost("none", 0.0, 0.0, 0.0)
    # One library call runs the phases of all dimensions, so it is launched once, at the highest of
    # their launch costs.
    launch = max(d.launch for d in dims)
    alone = len(dims) == 1 and kind not in _POINT_TO_POINT
    # ``auto`` honours the dimension's list of algorithms; an algorithm named by the caller is
    # evaluated even if the library would not choose it.
    taken = set(allowed(kind, dims[0], size)) if alone and algorithm == "auto" else {algorithm}
    found = [
        CollectiveCost(name, launch, *cost)
        for name, cost in candidates(kind, size, dims)
        if name in taken or (algorithm == "auto" and not alone)
    ]
    if not found:
        fitting = sorted({name for name, _ in candidates(kind, size, dims)})
        raise DeviceError(
            f"{algorithm} does not do {kind} over {' × '.join(d.kind for d in dims)}",
            hint=f"these do: {', '.join(fitting)}, or auto",
        )
    return min(found, key=lambda c: c.total)


def candidates(kind: str, size: float, dims: tuple[Dimension, ...]) -> Iterator[tuple[str, Cost]]:
    """The algorithms that implement ``kind`` over ``dims``, with their cost without the launch."""
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
    """Send from each rank to the next: all latencies on the route, and its slowest link.

    A message takes one link of a ring, of a torus's axis or of a fully connected dimension, and the
    whole port of a switch.
    """
    axes = [ring for d in dims for ring in d.rings() if ring.size > 1]
    latency = sum(d.latency * (2 if leaves(d) > 1 else 1) for d in axes)
    return latency, size / min(_link_rate(d) for d in axes)


def _link_rate(dim: Dimension) -> float:
    # One message takes one of a ring's two links. Between two ranks both links go to the same
    # neighbour, so the whole bandwidth is available.
    return dim.rate / 2 if dim.kind == "ring" and dim.size > 2 else flow_rate(dim)


def hierarchical(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost:
    """One dimension after another, each with its fastest algorithm.

    All-reduce: reduce-scatter in the inner dimensions, all-reduce of the rest across the outermost,
    all-gather back inwards (Cho et al., *BlueConnect*, MLSys 2019). All-gather and broadcast go
    from the outermost dimension inwards, reduce-scatter outwards, so that slow outer links carry
    least; all-to-all sends all its bytes through each dimension in turn.
    """
    parts: list[Cost] = []
    if kind == "all_reduce":
        # ``left`` is the size that a rank still holds: each inner reduce-scatter divides it by its
        # ranks, so that the slowest, outermost links carry the smallest share.
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
        # A rank's contribution grows with every gathered dimension and shrinks with every scattered
        # one; a broadcast and an all-to-all keep their size.
        growth = {"all_gather": 1, "reduce_scatter": -1}.get(kind, 0)
        for dim in reversed(dims) if inwards else dims:
            parts.append(fastest(kind, dim, size)[1])
            size *= float(dim.size) ** growth
    return sum(p[0] for p in parts), sum(p[1] for p in parts)


def multi_ring(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost | None:
    """Rings over all ranks of two switched dimensions, one for each rank of a box.

    Each of the ``g`` rings takes ``1/g`` of the bytes and leaves a box at a different rank, so that
    all network ports are busy; ``n = g N`` ranks in all, messages of ``m`` bytes. The largest of
    three bounds applies: the network port sends ``n-1`` messages, the port inside the box
    ``(g-1)(n-1)``, and a message passes ``n-1`` ranks, crossing boxes every ``g``-th time; a
    message that starts farthest from the network waits there for those ahead of it (rings as in [P]
    of ``one_dimension``; ports as in the channels of NVIDIA's *NCCL*).
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
    # Fraction of the hops between boxes that also leave their leaf switch: a second latency each.
    spine = leaves(outer) / outer.size if leaves(outer) > 1 else 0.0
    # Bound of the ports. A port inside carries the edges of all rings but the one that leaves the
    # box at its rank.
    serial = edges * max(across, (g - 1) * inside) + hop
    ways: list[Cost] = []
    # Bound of the dependent chain, by the distance of a message's first rank from the network port.
    for away in range(g):
        far = (edges - away - 1) // g + 1 if edges > away else 0
        latency = (edges - far) * inner.latency + (far + ceil(far * spine)) * outer.latency
        wait = away * max(across - step, 0.0)
        ways.append((latency, max((edges - far) * inside + far * across + wait, serial - latency)))
    return max(ways, key=sum)


def direct_over(kind: str, size: float, dims: tuple[Dimension, ...]) -> Cost | None:
    """All-to-all in one step: inside to the rank with the receiver's number, then across.

    Every switched dimension carries all blocks whose receiver differs in it, concurrently, each as
    in :func:`~.one_dimension.direct`. The outermost starts with the blocks that need no other
    dimension, and then idles until those from inside arrive.
    """
    if kind != "all_to_all" or any(d.kind not in ("switch", "fat_tree") for d in dims):
        return None
    known = [c for d in dims if (c := IN_DIMENSION["direct"](kind, d, size)) is not None]
    inside = sum(c[0] for c in known[:-1])
    # Of the outermost dimension's blocks, one in (ranks of a box) needs no hop inside first.
    alone = known[-1][1] * dims[-1].size / prod(d.size for d in dims)
    latency, idle = inside + known[-1][0], max(inside - alone, 0.0)
    return latency, max(*(c[1] for c in known[:-1]), known[-1][1] + idle - inside)
