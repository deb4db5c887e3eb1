"""A network on which ASTRA-sim's collectives take the predicted times of a step.

ASTRA-sim computes the time of a collective itself. It treats a group of some of the ranks as one
ring, whose messages go through the first dimension of the network in which neighbours differ
(``CommunicatorGroup.cc``; ``MultiDimTopology.cpp`` of its analytical network). The network
therefore has a dimension for each axis of the plan, with a bandwidth and a latency fitted by least
squares to the step's collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ..clusters.topology import Dimension, Topology
from ..step.costs import Message
from ..step.plan import Group
from .ranks import SPLITS

#: Highest bandwidth of a dimension in bytes/s, used if latency alone explains all times or nothing
#: is sent. The format has no infinity; far above any current link.
MOST_BANDWIDTH = 1e14
#: Scales of the unknowns, so that both columns of the least squares are of similar size:
#: microseconds, and seconds for a megabyte at 1 TB/s.
_LATENCY, _PER_BYTE = 1e-6, 1e-12


class Axes:
    """Dimensions of the ranks, innermost first, such that every group covers whole ones.

    Args:
        groups: Groups that communicate.
        devices: Number of ranks.

    Attributes:
        sizes: Ranks along each dimension.
    """

    def __init__(self, groups: Sequence[Group], devices: int) -> None:
        cuts = {1, devices}
        for group in groups:
            cuts |= {group.stride, group.stride * group.size}
        self.cuts = [1]
        for cut in sorted(cuts):
            # Ends that do not nest cannot be axes of one grid; such a group shares one.
            if cut > self.cuts[-1] and cut % self.cuts[-1] == 0 and devices % cut == 0:
                self.cuts.append(cut)
        self.devices = devices
        self.sizes = [b // a for a, b in zip(self.cuts, self.cuts[1:], strict=False)]

    def of(self, group: Group) -> list[int]:
        """Axes that a group covers, innermost first; at least one."""
        low, high = group.stride, group.stride * group.size
        return [
            i for i, cut in enumerate(self.cuts[:-1]) if cut < high and self.cuts[i + 1] > low
        ] or [len(self.sizes) - 1]

    def members(self, group: Group, rank: int) -> tuple[int, ...]:
        """Ranks of the group of one rank, in the order of the ring.

        The outermost axis comes first: neighbours in the ring then differ in that axis, which has
        the slowest links, and not in the innermost.
        """
        first = rank - (rank // group.stride) % group.size * group.stride
        ranks = [first + i * group.stride for i in range(group.size)]
        outer = self.cuts[self.of(group)[-1]] // group.stride
        if outer <= 1 or group.size % outer:
            return tuple(ranks)
        return tuple(np.reshape(ranks, (-1, outer)).T.ravel().tolist())


def ring_work(kind: str, ranks: int, size: float) -> tuple[float, float]:
    """Number of messages that ASTRA-sim sends in series round a ring, and their bytes.

    ``Ring.cc``: an all-reduce takes 2 (n - 1) messages of 1/n of the buffer, a gather or scatter
    n - 1 of a rank's share, an all-to-all n (n - 1) / 2 of 1/n, since data travel n / 2 hops on
    average. Each collective is split into :data:`~.ranks.SPLITS` parts, one after the other.

    Args:
        kind: Kind of a :class:`~opcast.simulate.step.costs.Message`.
        ranks: Ranks in the ring.
        size: ``comm_size``, the bytes that a rank contributes.
    """
    n = ranks
    if kind == "send_recv":
        return 1.0, size
    messages, share = {
        "all_reduce": (2.0 * (n - 1), 1.0 / n),
        "all_gather": (n - 1.0, 1.0),
        "reduce_scatter": (n - 1.0, 1.0 / n),
        "alltoall": (n * (n - 1) / 2.0, 1.0 / n),
    }[kind]
    return SPLITS * messages, messages * share * size


def own_bytes(message: Message, axes: Axes) -> float:
    """``comm_size`` of a message.

    Steps count an all-gather's full buffer, ASTRA-sim a rank's share. A ring carries the data of an
    all-to-all n / 2 times, unlike the networks of real clusters: the size is reduced by that
    factor, so that links carry (n - 1) / n of a rank's buffer as in a direct exchange.
    """
    n = message.group.size
    if message.kind == "all_gather":
        return message.size / n
    if message.kind != "alltoall":
        return message.size
    sizes = [axes.sizes[i] for i in axes.of(message.group)]
    rounds = sum(sizes) - len(sizes) if n == axes.devices else n - 1
    return message.size * 2.0 * (n - 1) / n / rounds


def phases(message: Message, axes: Axes) -> list[tuple[int, float, float]]:
    """Axis, messages and bytes of each phase in which ASTRA-sim runs a collective.

    Some of the ranks form one ring. All ranks use one dimension after the other: an all-reduce
    scatters in all but the last, reduces there, and gathers on the way back
    (``Sys::generate_collective``).
    """
    size, own = own_bytes(message, axes), axes.of(message.group)
    if message.group.size < axes.devices or len(own) == 1 or message.kind == "send_recv":
        return [(own[-1], *ring_work(message.kind, message.group.size, size))]
    order = own[::-1] if message.kind == "all_gather" else own
    found = []
    for place, axis in enumerate(order):
        n = axes.sizes[axis]
        kind, times = message.kind, 1.0
        if kind == "all_reduce" and place < len(order) - 1:
            # Scattered, and gathered again: the same messages twice.
            kind, times = "reduce_scatter", 2.0
        sent, carried = ring_work(kind, n, size)
        found.append((axis, times * sent, times * carried))
        if message.kind == "all_gather":
            size *= n
        elif message.kind != "alltoall":
            size /= n
    return found


def fitted_network(counts: Mapping[Message, float], axes: Axes) -> Topology:
    """Fit bandwidth and latency of each axis.

    Args:
        counts: Executions of each message in a step, which are its weight.
        axes: The dimensions.
    """
    from scipy.optimize import nnls

    known = len(axes.sizes)
    assert prod(axes.sizes) == axes.devices
    rows = np.zeros((max(1, len(counts)), 2 * known))
    want = np.zeros(len(rows))
    for row, (message, count) in enumerate(counts.items()):
        want[row] = message.seconds * count
        for axis, sent, carried in phases(message, axes):
            rows[row, axis] += sent * _LATENCY * count
            rows[row, known + axis] += carried * _PER_BYTE * count
    found, _ = nnls(rows, want)
    latencies = found[:known] * _LATENCY
    rates = 1.0 / np.maximum(found[known:] * _PER_BYTE, 1.0 / MOST_BANDWIDTH)
    # A ring's bandwidth is that of both links, of which a collective uses one.
    return Topology(
        tuple(
            Dimension("ring", n, 2.0 * float(rate), float(latency), name=f"axis{i}")
            for i, (n, rate, latency) in enumerate(zip(axes.sizes, rates, latencies, strict=True))
        )
    )


def network_seconds(message: Message, axes: Axes, network: Topology) -> float:
    """Seconds that ASTRA-sim takes for a message on a network of :func:`fitted_network`.

    Phases of all ranks are added up; ASTRA-sim overlaps them with the first phase of a later part.
    """
    return sum(
        sent * network.dims[axis].latency + carried / (network.dims[axis].rate / 2.0)
        for axis, sent, carried in phases(message, axes)
    )
