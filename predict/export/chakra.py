"""A partitioned program on a cluster as a folder of Chakra traces."""

from __future__ import annotations

from pathlib import Path

from ...common.errors import ProgramError
from ...features.devices.device import DeviceSpec
from ...simulate.chakra.folder import write_folder
from ...simulate.chakra.messages import EtNode, NodeType
from ...simulate.chakra.ranks import Work, process_groups, rank_trace
from ...simulate.clusters.topology import Cluster
from ..cluster.partitioned import PartitionedPrediction


def export_chakra(
    prediction: PartitionedPrediction, cluster: Cluster, device: DeviceSpec, out: Path
) -> dict[str, object]:
    """Write one trace a rank, and what else ASTRA-sim needs.

    Args:
        prediction: The program, predicted on the cluster.
        cluster: Cluster with as many devices as the program.
        device: Device of the cluster.
        out: Folder to write.

    Returns:
        Ranks, nodes of all ranks, kernels and computation of rank 0, and by collective the count
        and the bytes that rank 0 puts in.

    Raises:
        ProgramError: The cluster has more devices than the program, or a collective is unknown.
        DeviceError: ASTRA-sim cannot describe the network.
    """
    # ASTRA-sim reads one trace for each device of network.yml.
    if prediction.devices != cluster.size:
        raise ProgramError(
            f"the program is for {prediction.devices} devices, the cluster has {cluster.size}",
            where=cluster.name,
            hint="ASTRA-sim wants a trace for each device of the network",
        )
    # Chakra names process groups by number, the same in the traces of all ranks.
    groups = process_groups(prediction.nodes)
    # FLOPs and bytes are informative: roofline-enabled is 0, so durations come from the trace.
    work = [_work(prediction, node.members) for node in prediction.nodes]
    traces = [
        rank_trace(
            prediction.nodes,
            r,
            groups,
            prediction.transfer.tolist(),
            work,
            scheduled=prediction.scheduled,
        )
        for r in range(prediction.devices)
    ]
    write_folder(out, traces, groups, cluster, device)
    return summary(traces)


def summary(traces: list[list[EtNode]]) -> dict[str, object]:
    """What :func:`export_chakra` returns."""
    first = traces[0]
    collectives: dict[str, dict[str, int]] = {}
    for node in first:
        if node.collective:
            own = collectives.setdefault(node.collective, {"count": 0, "bytes": 0})
            own["count"] += 1
            own["bytes"] += node.bytes
    # Durations of collectives are left out: ASTRA-sim computes its own.
    computes = [n for n in first if n.type == NodeType.COMP]
    return {
        "ranks": len(traces),
        "nodes": sum(map(len, traces)),
        "compute_nodes": len(computes),
        "kernels": sum(n.kernels for n in first),
        "compute_us": sum(n.micros for n in computes),
        "collectives": collectives,
    }


def _work(prediction: PartitionedPrediction, members: tuple[int, ...]) -> Work:
    kernels = [prediction.kernels[m] for m in members]
    return Work(
        sum(k.flops * k.multiplicity for k in kernels),
        sum(k.bytes * k.multiplicity for k in kernels),
    )
