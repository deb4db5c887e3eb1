"""What a cluster costs a step: its collectives, its hosts, and the cores that collectives take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...features.devices.device import DeviceSpec
from ...models.collectives.on_cluster import ClusterCollectives
from ...simulate.clusters.topology import Cluster
from ...simulate.step.costs import Costs, Estimate, OpLatency
from ...simulate.step.fitting import Host
from ...simulate.step.plan import Group

#: Time of a collective: name, bytes that each rank puts in, ranks, cluster.
CollectiveTime = Callable[[str, float, Sequence[int], Cluster], Estimate]
#: Streaming multiprocessors that a collective occupies beside kernels: one for each NCCL channel.
#: Engineering estimate; not fitted (12 % of an H100's 132).
COLLECTIVE_CORES = 16
#: Bytes of a host's memory for each device under it, where no file says: 2 TB for the eight of a
#: DGX H100 or H200 (NVIDIA's data sheets), 448 GB for the four of a TPU v5p host (Google Cloud,
#: machine type ct5p-hightpu-4t, from memory).
USUAL_HOST = {"gpu": 250e9, "tpu": 112e9}


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
        ranks = self._ranks(group)
        # Steps count an all-gather's full buffer, as nccl-tests does; the estimators count what one
        # rank contributes. For every other collective the two conventions agree.
        own = size / len(ranks) if kind == "all_gather" else size
        return self.time(kind, own, ranks, self.cluster)

    def _ranks(self, group: Group) -> Sequence[int]:
        """Ranks of a group; of one that fills its last box in part, as many of every box as of it.

        That box has fewest ports for its share of the bytes, and the others wait for it.
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
    """Memory of the host of a box: as the cluster's file says, or usual for so many devices."""
    box = cluster.devices_per_node or cluster.size
    if cluster.host_memory:
        return Host(box, cluster.host_memory, "host_memory_gb of the cluster")
    usual = USUAL_HOST.get(spec.platform, USUAL_HOST["gpu"])
    said = f"{usual / 1e9:.0f} GB a device taken as usual; host_memory_gb of a cluster file says it"
    return Host(box, usual * box, said)


def cluster_costs(cluster: Cluster, spec: DeviceSpec, latency: OpLatency) -> Costs:
    """Costs of operators on a device, of collectives between them, and of its host."""
    return Costs(latency, ClusterNetwork(cluster), spec.host_link, contention(spec))


def contention(spec: DeviceSpec) -> float:
    """Share of the compute cores that a running collective takes away from kernels.

    Collectives of a GPU are kernels themselves; a TPU's interconnect has DMA engines of its own.
    """
    if spec.platform != "gpu" or not spec.core_count:
        return 0.0
    # Guard for chips with few cores; engineering estimate.
    return min(0.5, COLLECTIVE_CORES / spec.core_count)


# One instance for all clusters: it holds the fitted parameters, which a sweep must not reload.
@lru_cache(maxsize=1)
def _collectives() -> ClusterCollectives:
    return ClusterCollectives()
