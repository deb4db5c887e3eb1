"""Latencies of collectives in a cluster, as the composition of a step asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...models.collectives.on_cluster import ClusterCollectives
from ...simulate.clusters.topology import Cluster
from ...simulate.collectives.choose import collective_latency_s
from ...simulate.step.calls import Estimate
from ...simulate.step.plan import Group

#: Time of a collective: name, bytes that each rank puts in, ranks, cluster.
CollectiveTime = Callable[[str, float, Sequence[int], Cluster], Estimate]
#: Width of the interval of a closed form, as a factor either way; an estimate.
FACTOR = 1.4


def learned_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Estimate:
    """By the shipped measurements where they apply, else by closed forms."""
    found = _collectives().estimate(kind, size, ranks, cluster)
    return Estimate(found.latency, found.lo, found.hi)


def analytical_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Estimate:
    """By closed forms alone."""
    found = collective_latency_s(kind, size, ranks, cluster)
    return Estimate(found, found / FACTOR, found * FACTOR)


class ClusterNetwork:
    """Collectives of one cluster.

    Args:
        cluster: Where the ranks are.
        time: Time of a collective.
    """

    def __init__(self, cluster: Cluster, time: CollectiveTime = learned_time) -> None:
        self.cluster, self.time = cluster, time

    def __call__(self, kind: str, size: float, group: Group) -> Estimate:
        """Time of a collective, ``size`` as in :class:`~opcast.simulate.step.calls.CommCall`."""
        ranks = range(0, group.size * group.stride, group.stride)
        own = size / group.size if kind == "all_gather" else size
        return self.time(kind, own, ranks, self.cluster)


@lru_cache(maxsize=1)
def _collectives() -> ClusterCollectives:
    return ClusterCollectives()
