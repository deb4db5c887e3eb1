"""Costs of a cluster in a step: collectives, hosts, and cores occupied by collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ...models.collectives.on_cluster import ClusterCollectives
from ...simulate.clusters.topology import Cluster
from ...simulate.step.costs import Costs, OpLatency
from ...simulate.step.fitting import Host
from ...simulate.step.plan import Group

#: Time of a collective: name, bytes contributed by each rank, ranks, cluster.
CollectiveTime = Callable[[str, float, Sequence[int], Cluster], Interval]
#: Streaming multiprocessors that a collective occupies while kernels run: one per NCCL channel.
#: Engineering estimate; not fitted (12 % of an H100's 132).
COLLECTIVE_CORES = 16
#: Host memory per device (bytes) if the cluster file gives none: 2 TB for the eight devices of a
#: DGX H100 or H200 (NVIDIA's data sheets), 448 GB for the four of a TPU v5p host (Google Cloud,
#: machine type ct5p-hightpu-4t, from memory).
USUAL_HOST = {"gpu": 250e9, "tpu": 112e9}


def learned_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Interval:
    """Estimate a collective from the fitted curves where they apply, else from closed forms."""
    found = _collectives().estimate(kind, size, ranks, cluster)
    return Interval(found.latency, found.lo, found.hi)


def xla_time(kind: str, size: float, ranks: Sequence[int], cluster: Cluster) -> Interval:
    """Estimate a collective of a program that XLA runs, like :func:`learned_time`.

    XLA starts a collective only when all devices of the process have arrived, which delays small
    collectives.
    """
    found = _collectives().estimate(kind, size, ranks, cluster, backend="xla")
    return Interval(found.latency, found.lo, found.hi)


class ClusterNetwork:
    """Prices the collectives of one cluster.

    Args:
        cluster: The devices and their links.
        time: Estimates the time of a collective.
    """

    def __init__(self, cluster: Cluster, time: CollectiveTime = learned_time) -> None:
        self.cluster, self.time = cluster, time

    def __call__(self, kind: str, size: float, group: Group) -> Interval:
        """Return the time of a collective.

        Args:
            kind: Collective, see :class:`~opcast.simulate.step.costs.CommCall`.
            size: Bytes, see there.
            group: Participating devices.
        """
        ranks = self._ranks(group)
        # Steps count an all-gather's full buffer, as nccl-tests does; the estimators count what one
        # rank contributes. For every other collective the two conventions agree.
        own = size / len(ranks) if kind == "all_gather" else size
        return self.time(kind, own, ranks, self.cluster)

    def _ranks(self, group: Group) -> Sequence[int]:
        """Return the ranks of a group; if it fills its last node partly, as many of every node.

        The last node then has the fewest ports for its share of the bytes, and the others wait.
        """
        ranks = range(0, group.size * group.stride, group.stride)
        box = self.cluster.box
        inside = box // group.stride if box and box % group.stride == 0 else 1
        few = group.size % inside
        if group.size < inside or not few:
            return ranks
        starts = range(0, ranks.stop, box)
        return [start + at for start in starts for at in range(0, few * group.stride, group.stride)]


def host_of(cluster: Cluster, spec: DeviceSpec) -> Host:
    """Return the memory of a node's host: from the cluster file, or the usual size per device."""
    box = cluster.devices_per_node or cluster.size
    if cluster.host_memory:
        return Host(box, cluster.host_memory, "host_memory_gb of the cluster")
    usual = USUAL_HOST.get(spec.platform, USUAL_HOST["gpu"])
    said = f"{usual / 1e9:.0f} GB per device assumed; set host_memory_gb in a cluster file"
    return Host(box, usual * box, said)


def cluster_costs(cluster: Cluster, spec: DeviceSpec, latency: OpLatency) -> Costs:
    """Return the costs of operators on a device, collectives between devices, and the host."""
    return Costs(latency, ClusterNetwork(cluster), spec.host_link, contention(spec))


def contention(spec: DeviceSpec) -> float:
    """Return the share of compute cores that a running collective takes away from kernels.

    A GPU's collectives are kernels themselves; a TPU's interconnect has its own DMA engines.
    """
    if spec.platform != "gpu" or not spec.core_count:
        return 0.0
    # Limit for chips with few cores; engineering estimate.
    return min(0.5, COLLECTIVE_CORES / spec.core_count)


# One instance for all clusters: it holds the fitted parameters, which a sweep must not reload.
@lru_cache(maxsize=1)
def _collectives() -> ClusterCollectives:
    return ClusterCollectives()
