"""A partitioned program on a cluster as a folder of Chakra traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...common.errors import ProgramError
from ...features.devices.device import DeviceSpec
from ...simulate.chakra.folder import write_folder
from ...simulate.chakra.messages import EtNode, NodeType
from ...simulate.chakra.ranks import Work, process_groups, rank_trace
from ...simulate.clusters.topology import Cluster
from ...simulate.program.nodes import Node
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
    nodes, order = _in_order_of_start(prediction)
    # Chakra names process groups by number, the same in the traces of all ranks.
    groups = process_groups(nodes)
    # FLOPs and bytes are informative: roofline-enabled is 0, so durations come from the trace.
    work = [_work(prediction, node.members) for node in nodes]
    transfer = prediction.transfer[order].tolist()
    traces = [
        rank_trace(nodes, r, groups, transfer, work, scheduled=prediction.scheduled)
        for r in range(prediction.devices)
    ]
    write_folder(out, traces, groups, cluster, device)
    return summary(traces)


def _in_order_of_start(
    prediction: PartitionedPrediction,
) -> tuple[list[Node], np.ndarray]:
    """Return the nodes in the order in which they are predicted to start, and their positions.

    A simulator runs a rank's kernels in the order of its trace. Program order would have it wait
    for collectives behind which the predicted schedule runs other kernels.
    """
    # Stable: operands stay in front of those that start with them, in no time.
    order = np.argsort(prediction.run.start, kind="stable")
    if prediction.scheduled:
        # Issued in their place; a busy communicator only delays the start.
        order = np.arange(len(prediction.nodes))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    nodes = [
        replace(node, operands=tuple(int(place[o]) for o in node.operands))
        for node in (prediction.nodes[at] for at in order)
    ]
    return nodes, order


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
