"""Latencies of collectives in a cluster, as the composition of a step asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..simulate.algorithms import collective_latency_s
from ..simulate.step.calls import Estimate
from ..simulate.step.plan import Group
from ..simulate.topology import Cluster

#: Seconds of a collective: name, bytes that each rank puts in, ranks, cluster.
CollectiveSeconds = Callable[[str, float, Sequence[int], Cluster], float]
#: Width of the interval of a collective, as a factor either way: mean error of nominal figures.
FACTOR = 1.4


class ClusterNetwork:
    """Collectives of one cluster.

    Args:
        cluster: Where the ranks are.
        seconds: Cost of a collective; analytical by default.
        factor: Width of the interval, as a factor either way.
    """

    def __init__(
        self, cluster: Cluster, seconds: CollectiveSeconds = collective_latency_s,
        factor: float = FACTOR,
    ) -> None:  # fmt: skip
        self.cluster, self.seconds, self.factor = cluster, seconds, factor

    def __call__(self, kind: str, size: float, group: Group) -> Estimate:
        """Time of a collective, ``size`` as in :class:`~opcast.simulate.step.calls.CommCall`."""
        ranks = range(0, group.size * group.stride, group.stride)
        own = size / group.size if kind == "all_gather" else size
        found = self.seconds(kind, own, ranks, self.cluster)
        return Estimate(found, found / self.factor, found * self.factor)
