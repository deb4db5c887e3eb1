"""Latencies of collectives in a cluster, in the form that the composition of a step calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...models.collectives.on_cluster import ClusterCollectives
from ...simulate.clusters.topology import Cluster
from ...simulate.collectives.choose import collective_latency_s
from ...simulate.step.costs import Estimate
from ...simulate.step.plan import Group

#: Time of a collective: name, bytes that each rank puts in, ranks, cluster.
CollectiveTime = Callable[[str, float, Sequence[int], Cluster], Estimate]
#: Half-width of a closed form's interval, as a factor either way. Engineering estimate; not fitted.
#: It holds only where closed forms are asked for by name (:func:`analytical_time`): the learned
#: model gives its own closed forms a factor of three (docs/collectives.md).
FACTOR = 1.4


def learned_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Estimate:
    """Estimate a collective from the fitted curves where they apply, else from closed forms."""
    found = _collectives().estimate(kind, size, ranks, cluster)
    return Estimate(found.latency, found.lo, found.hi)


def xla_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Estimate:
    """As :func:`learned_time`, for a collective of a program that XLA runs.

    XLA starts each collective when all devices of the process have met, which small ones wait for.
    """
    found = _collectives().estimate(kind, size, ranks, cluster, backend="xla")
    return Estimate(found.latency, found.lo, found.hi)


def analytical_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Estimate:
    """Estimate a collective from closed forms alone, without any measurement."""
    found = collective_latency_s(kind, size, ranks, cluster)
    return Estimate(found, found / FACTOR, found * FACTOR)


class ClusterNetwork:
    """Prices the collectives of one cluster.

    Args:
        cluster: The devices and their links.
        time: Estimates the time of a collective.
    """

    def __init__(self, cluster: Cluster, time: CollectiveTime = learned_time) -> None:
        self.cluster, self.time = cluster, time

    def __call__(self, kind: str, size: float, group: Group) -> Estimate:
        """Return the time of a collective.

        Args:
            kind: As of a :class:`~opcast.simulate.step.costs.CommCall`.
            size: As there.
            group: Devices that take part.
        """
        ranks = range(0, group.size * group.stride, group.stride)
        # Steps count an all-gather's full buffer, as nccl-tests does; the estimators count what one
        # rank contributes. For every other collective the two conventions agree.
        own = size / group.size if kind == "all_gather" else size
        return self.time(kind, own, ranks, self.cluster)


# One instance for all clusters: it holds the fitted parameters, which a sweep must not reload.
@lru_cache(maxsize=1)
def _collectives() -> ClusterCollectives:
    return ClusterCollectives()
