"""Export of a partitioned program or a simulated step to a folder of Chakra traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...common.errors import ProgramError
from ...common.progress import tracked
from ...features.devices.device import DeviceSpec
from ...simulate.chakra.folder import write_folder
from ...simulate.chakra.messages import EtNode, NodeType
from ...simulate.chakra.ranks import Work, comm_type, least_bytes, process_groups, rank_trace
from ...simulate.chakra.step_network import Axes, fitted_network, network_seconds, own_bytes
from ...simulate.chakra.step_ranks import Ranks, StageBlocks, StageTrace, stage_blocks, stage_trace
from ...simulate.clusters.topology import Cluster, Topology
from ...simulate.collectives.choose import COLLECTIVES
from ...simulate.program.nodes import Collective, Node
from ...simulate.step.blocks import Stage
from ...simulate.step.compose import stage_orders
from ...simulate.step.costs import Costs, Message
from ...simulate.step.plan import Group, Plan
from ..cluster.partitioned import PartitionedPrediction
from ..cluster.step import StepPrediction

#: Nodes per rank above which neighbouring layers are merged into blocks (engineering choice: a
#: thousand ranks then take a minute on one core and 200 MB).
MOST_NODES = 4000


def export_chakra(
    prediction: PartitionedPrediction, cluster: Cluster, device: DeviceSpec, out: Path
) -> dict[str, object]:
    """Write one trace per rank, and the other files that ASTRA-sim needs.

    Args:
        prediction: The program, predicted on the cluster.
        cluster: Cluster with as many devices as the program.
        device: Device of the cluster.
        out: Folder to write.

    Returns:
        Ranks, nodes of all ranks, kernels and computation of rank 0, and by collective the count
        and the bytes that rank 0 contributes.

    Raises:
        ProgramError: The cluster has more devices than the program, or a collective is unknown.
        DeviceError: ASTRA-sim cannot describe the network.
    """
    # ASTRA-sim reads one trace for each device of network.yml.
    if prediction.devices != cluster.size:
        raise ProgramError(
            f"the program is for {prediction.devices} devices, the cluster has {cluster.size}",
            where=cluster.name,
            hint="ASTRA-sim needs one trace for each device of the network",
        )
    nodes, order = _in_order_of_start(prediction)
    transfer = prediction.transfer[order].tolist()
    nodes, axes, network = _program_network(nodes, transfer, prediction.devices)
    # Chakra identifies process groups by number, the same in the traces of all ranks.
    groups = process_groups(nodes)
    # FLOPs and bytes are informative: roofline-enabled is 0, so durations come from the trace.
    work = [_work(prediction, node.members) for node in nodes]
    traces = [
        rank_trace(nodes, r, groups, transfer, work, scheduled=prediction.scheduled)
        for r in range(prediction.devices)
    ]
    if axes is not None:
        groups = {axes.members(_group(ranks), ranks[0]): name for ranks, name in groups.items()}
    write_folder(out, traces, groups, cluster, device, network)
    return summary(traces)


def _program_network(
    nodes: list[Node], transfer: list[float], devices: int
) -> tuple[list[Node], Axes | None, Topology | None]:
    """Fit a network to a program's collectives, as for a step.

    Returns:
        The nodes, with all-to-alls sized for ASTRA-sim's ring algorithm; the axes; the network.
        Axes and network are ``None`` if nothing is sent or the groups are not axes of a grid.
    """
    found: dict[int, Message] = {}
    for place, (node, seconds) in enumerate(zip(nodes, transfer, strict=True)):
        own = node.collective
        if own is None or own.kind == "broadcast":
            continue
        message = _message(own, seconds / node.times)
        if message is None:
            return nodes, None, None
        if message.group.size > 1:
            found[place] = message
    if not found:
        return nodes, None, None
    axes = Axes([m.group for m in found.values() if m.kind != "send_recv"], devices)
    counts = Counter[Message]()
    for place, message in found.items():
        counts.update({message: nodes[place].times})
    told = list(nodes)
    for place, message in found.items():
        own = nodes[place].collective
        if own is not None and message.kind == "alltoall":
            scaled = replace(own, size=own_bytes(message, axes))
            told[place] = replace(nodes[place], collective=scaled)
    return told, axes, fitted_network(counts, axes)


def _message(own: Collective, seconds: float) -> Message | None:
    """Return a program's collective as a step's; ``None`` if its groups are not an axis."""
    if comm_type(own.kind) is None:
        pairs = own.groups or tuple(zip(own.group, own.group[1:], strict=False))
        far = [abs(pair[1] - pair[0]) for pair in pairs if pair[0] != pair[1]]
        # Wrapping around a ring counts as one hop; the nearest partners identify the axis.
        group = Group(2, min(far)) if far else Group(1, 1)
        return Message("send_recv", "send_recv", group, own.size, seconds)
    # Named as in tables of measured collectives.
    kind = COLLECTIVES[own.kind.removeprefix("ragged_")].measured
    groups = [ranks for ranks in own.groups or (own.group,) if len(ranks) > 1]
    if not groups:
        return Message(kind, kind, Group(1, 1), own.size, seconds)
    if len({_group(ranks) for ranks in groups}) > 1 or not all(map(_regular, groups)):
        return None
    group = _group(groups[0])
    size = max(own.size, least_bytes(group.size))
    return Message(kind, kind, group, size * (group.size if kind == "all_gather" else 1), seconds)


def _group(ranks: Sequence[int]) -> Group:
    """Return the size and stride of evenly spaced ranks."""
    first, second = sorted(ranks)[:2]
    return Group(len(ranks), second - first)


def _regular(ranks: Sequence[int]) -> bool:
    """Return whether ranks form one line along an axis of a grid."""
    size, stride = _group(ranks)
    first = min(ranks)
    line = [first + i * stride for i in range(size)]
    return sorted(ranks) == line and first // stride % size == 0


def _in_order_of_start(
    prediction: PartitionedPrediction,
) -> tuple[list[Node], np.ndarray]:
    """Return the nodes in the order in which they are predicted to start, and their positions.

    A simulator runs a rank's kernels in the order of its trace. In program order it would wait for
    collectives while the predicted schedule runs other kernels.
    """
    # Stable: operands stay ahead of nodes that start at the same time.
    order = np.argsort(prediction.run.start, kind="stable")
    if prediction.scheduled:
        # Scheduled programs keep their order; a busy communicator only delays the start.
        order = np.arange(len(prediction.nodes))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    nodes = [
        replace(node, operands=tuple(int(place[o]) for o in node.operands))
        for node in (prediction.nodes[at] for at in order)
    ]
    return nodes, order


def export_step(
    prediction: StepPrediction,
    costs: Costs,
    cluster: Cluster,
    device: DeviceSpec,
    out: Path,
    most_nodes: int = MOST_NODES,
) -> dict[str, object]:
    """Write a simulated step: its stages, micro-batches and collectives, for every rank.

    ``network.yml`` has a dimension per axis of the plan, on which ASTRA-sim's collectives take
    the predicted times (:mod:`opcast.simulate.chakra.step_network`).

    Args:
        prediction: The step.
        costs: Times of operators and collectives, from
            :meth:`~opcast.predict.cluster.step.StepPredictor.costs`.
        cluster: Cluster of the step.
        device: Device of the cluster.
        out: Folder to write.
        most_nodes: Nodes per rank above which neighbouring layers are merged.

    Returns:
        As :func:`export_chakra`, with the predicted step time, and the communication time of a rank
        (mean over stages) as predicted and by ASTRA-sim's formulas.

    Raises:
        ProgramError: The step runs on a single device.
    """
    workload, plan, step = prediction.workload, prediction.plan, prediction.step
    if plan.devices < 2:
        raise ProgramError(
            "a step on one device has no communication", hint="choose a larger cluster"
        )
    orders = stage_orders(plan, train=workload.mode == "train")
    units = _units_of_a_block(prediction, max(map(len, orders)), most_nodes)
    known = dict[Stage, StageBlocks]()
    for stage, times in zip(step.work, step.stages, strict=True):
        if stage not in known:
            known[stage] = stage_blocks(stage, costs, times, units)
    call = step.work[0].hop
    hop = Message(call.name, call.kind, call.group, call.size, step.hop)
    stages = [stage_trace(plan, known[own], orders, s, hop) for s, own in enumerate(step.work)]
    counts = Counter[Message]()
    for trace in stages:
        counts.update(talk.message for talk in trace.talks.values())
    axes = Axes([_axis(message, plan) for message in counts], plan.devices)
    network = fitted_network(counts, axes)
    ranks = Ranks(stages, axes)
    shown = tracked(ranks, plan.devices, "traces")
    write_folder(out, shown, ranks.groups, cluster, device, network)
    return {
        **_step_summary(stages, ranks),
        "step_us": step.total * 1e6,
        "latency_us": step.total * 1e6,
        "communication_us": 1e6 * sum(m.seconds * n for m, n in counts.items()) / len(stages),
        "astra_sim_communication_us": 1e6
        * sum(network_seconds(m, axes, network) * n for m, n in counts.items())
        / len(stages),
    }


def _axis(message: Message, plan: Plan) -> Group:
    """Return the group that determines an axis: all stages of a pipeline are one axis."""
    if message.name in ("pipeline", "tied"):
        return plan.pipeline_group
    return message.group


def _units_of_a_block(prediction: StepPrediction, tasks: int, most_nodes: int) -> int:
    """Return how many layers to merge into one block, so that a rank has few enough nodes."""
    layers = prediction.workload.layers / prediction.plan.pp + 2
    # Each layer has computation and up to three collectives.
    return max(1, round(4 * tasks * layers / most_nodes))


def _step_summary(stages: list[StageTrace], ranks: Ranks) -> dict[str, object]:
    """Return the counts of all ranks; those of rank 0 as for programs."""
    each = ranks.axes.devices // len(stages)
    first = summary([next(iter(ranks))])
    return {
        **first,
        "ranks": ranks.axes.devices,
        "nodes": each * sum(len(s.nodes) for s in stages),
        "dimensions": list(ranks.axes.sizes),
    }


def summary(traces: list[list[EtNode]]) -> dict[str, object]:
    """Return the summary that :func:`export_chakra` returns."""
    first = traces[0]
    collectives: dict[str, dict[str, int]] = {}
    for node in first:
        if node.collective:
            own = collectives.setdefault(node.collective, {"count": 0, "bytes": 0})
            own["count"] += 1
            own["bytes"] += node.bytes
    # Durations of collectives are excluded: ASTRA-sim computes its own.
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
