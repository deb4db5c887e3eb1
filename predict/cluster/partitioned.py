"""Predict a partitioned program on a cluster: one device's kernels overlapped with collectives.

Every device runs the same program (SPMD), so only one is simulated, and one replica group of each
collective represents all of them. A scheduled program keeps its order, its start/done pairs and its
synchronous collectives. In an unoptimized program, collectives are first rewritten as XLA's passes
would. Kernels, and the gaps between them, take as long as in a program for a single device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...common.errors import ProgramError
from ...common.interval import InSeconds, Interval, step_fields
from ...datagen.partition.program import partition_annotated
from ...features.devices.device import DeviceSpec
from ...features.ir.partitioning import (
    annotated_devices,
    check_several_devices,
    joined_devices,
)
from ...features.ir.platforms import platform_of
from ...features.ir.reader import SourceProgram, read_program
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...features.lowering.lower import lower_with
from ...features.lowering.op import whole_notes
from ...features.lowering.options import DEFAULTS, LoweringOptions
from ...features.lowering.xla_collectives import optimise_collectives
from ...models.program.schedule_cost import least_wall
from ...models.steps.effects import device_context
from ...models.steps.model import StepModel
from ...models.trust.calibrator import NORMAL_90
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.program.nodes import Node, check_devices, combine_all, program_nodes
from ...simulate.program.streams import StreamRun, run_streams
from ..devices import cluster_device, resolve_device
from ..program.model_notes import model_notes
from ..program.predictor import Predictor, roofline_predictor
from .network import CollectiveTime, contention, xla_time
from .program_seconds import ProgramSeconds, program_seconds
from .spread import COMPOSITION_ERROR

#: Framework whose effects apply to partitioned programs: XLA's.
_COMPILED = "jax"
#: Note on a program that opcast partitioned.
_SPLIT = (
    "partitioned along its shardings by XLA's partitioner for CPUs; the device's compiler may "
    "choose other collectives (lowering xla)"
)
#: Eight-bit float operands in a kernel's text; 8-bit integers are mostly a library's workspace.
_NARROW = re.compile(r"\bf8e\w+\[")


@dataclass(frozen=True)
class PartitionedPrediction(InSeconds):
    """Time of a partitioned program on a cluster; seconds.

    Attributes:
        run: Schedule of the nodes.
        nodes: Kernels and collectives of one device.
        transfer: Seconds of each node's collective without contention, over all executions.
        interval: The time with its 90 % interval.
        cluster: Name of the cluster.
        device: Name of its device.
        lowering: Lowering of the program, or ``scheduled``.
        peak_memory_bytes: Peak memory of one device.
        capacity_bytes: Memory available to programs on the device; 0 if unknown.
        notes: Known limits of the prediction.
        sources: Share of the computation time by kind of estimate.
        kernels: Kernels that ``members`` of the nodes refer to.
        devices: Devices that the program was partitioned for.
        scheduled: Whether the program's order of collectives is kept.
    """

    run: StreamRun
    nodes: tuple[Node, ...]
    transfer: np.ndarray
    interval: Interval
    cluster: str
    device: str
    lowering: str
    peak_memory_bytes: float
    capacity_bytes: float
    notes: tuple[str, ...]
    sources: dict[str, float]
    kernels: tuple[Kernel, ...] = ()
    devices: int = 1
    scheduled: bool = False

    def __repr__(self) -> str:
        """Return a summary: time, interval, cluster and number of kernels."""
        kernels = f"{len(self.kernels)} kernels on each device of {self.cluster}"
        return f"PartitionedPrediction({self._said()}, {kernels})"

    @property
    def latency_us(self) -> float:
        """Time of one run in microseconds."""
        return self.interval.value * 1e6

    @property
    def lo_us(self) -> float:
        """Lower bound of the 90 % interval in microseconds."""
        return self.interval.lo * 1e6

    @property
    def hi_us(self) -> float:
        """Upper bound of the 90 % interval in microseconds."""
        return self.interval.hi * 1e6

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into one device's memory; ``None`` if its size is unknown."""
        if not self.capacity_bytes:
            return None
        return self.peak_memory_bytes <= self.capacity_bytes

    def by_collective(self) -> dict[str, tuple[float, float, float]]:
        """Return count, bytes contributed and isolated seconds over all executions, by kind."""
        sums: dict[str, tuple[float, float, float]] = {}
        for node, seconds in zip(self.nodes, self.transfer.tolist(), strict=True):
            own = node.collective
            if own is not None:
                count, size, time = sums.get(own.kind, (0.0, 0.0, 0.0))
                more = own.size * node.times
                sums[own.kind] = (count + node.times, size + more, time + seconds)
        return sums

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast predict --cluster --json`` prints it."""
        r = self.run
        return {
            **step_fields(self.interval),
            "compute_us": r.compute * 1e6,
            "communication_us": float(self.transfer.sum()) * 1e6,
            "exposed_communication_us": r.exposed * 1e6,
            "collectives": {
                kind: {"count": n, "bytes": size, "alone_us": time * 1e6}
                for kind, (n, size, time) in self.by_collective().items()
            },
            "critical_path": [self.nodes[p].name for p in r.critical],
            "memory_bytes_per_device": self.peak_memory_bytes,
            "fits": self.fits,
            "sources": self.sources,
            "cluster": self.cluster,
            "device": self.device,
            "lowering": self.lowering,
            "notes": list(self.notes),
        }


def predict_partitioned(
    program: object,
    cluster: Cluster | str | Path,
    predictor: Predictor | None = None,
    options: LoweringOptions = DEFAULTS,
    *,
    collective: CollectiveTime = xla_time,
) -> PartitionedPrediction:
    """Predict a program that has already been partitioned.

    Args:
        program: Path, text or bytes of StableHLO with explicit collectives or of HLO, or a
            ``FunctionCall`` of a function over a mesh.
        cluster: Cluster, its name or file; at least as many devices as the program's partitions.
        predictor: Predicts the kernels as in a single-device program; ``None`` for rooflines.
        options: Lowering options, as for one device (scheduled HLO is not changed); ``device``
            ``None`` for the one that the cluster names.
        collective: Time of a collective.

    Raises:
        ProgramError: The program cannot be read, is for more devices than the cluster has or for a
            single one, or has shardings but no collectives.
        DeviceError: The cluster names no device, and none is given.
        LoweringError: The compiler of the device refuses the program.
    """
    cluster = find_cluster(cluster)
    asked = predictor or roofline_predictor()
    if options.device is None:
        spec = cluster_device(cluster, asked.devices)
    else:
        spec = resolve_device(options.device, asked.devices)
    source = read_program(program, trip_counts=options.trip_counts, platform=platform_of(spec))
    check_several_devices(source, cluster.name, cluster.size, spec.name)
    own = source.program
    devices = own.num_replicas * own.num_partitions
    # A compiler has fixed the order and the fusions of scheduled HLO.
    if own.dialect == "hlo" and own.is_scheduled:
        options = replace(options, lowering="xla")
    else:
        # A compiler gets the program unchanged and runs these passes itself. The other lowerings do
        # not handle collectives, so XLA's rewrites (all-reduce to reduce-scatter, merging of equal
        # collectives) are applied before.
        source = source.with_program(optimise_collectives(own))
    lowered = lower_with(source, replace(options, device=spec))
    scheduled = lowered.lowering == "xla"
    annotated = _is_annotated(source)
    if not scheduled and annotated:
        # The target's compiler would partition the program.
        parts = read_program(partition_annotated(source), trip_counts=options.trip_counts)
        source = parts.with_program(optimise_collectives(parts.program))
        split = lower_with(source, replace(options, device=spec, lowering=lowered.lowering))
        whole = whole_notes(own, [])
        notes = [note for note in lowered.notes if note not in (*whole, *split.notes)]
        lowered = replace(split, notes=[*notes, *split.notes, _SPLIT])
    _check_partitioned(lowered, devices, cluster, source.origin, split=annotated)
    # Latencies do not depend on the cluster; only the simulation is repeated for the interval.
    # On a cluster of one device the result equals that of ``--device``, without sustained load.
    trained = predictor is not None and cluster.size > 1
    load = _Load.of(lowered.kernels, spec) if trained else None
    factors = load.kernels if load is not None else 1.0
    times = program_seconds(lowered, spec, asked.model_for(spec), factors)
    job = _Job(lowered, cluster, collective, devices, scheduled, contention(spec), load)
    nodes, transfer, run = job.run(times.kernels)
    notes = [*_notes(lowered, scheduled, devices, cluster), *times.notes]
    notes += model_notes(asked.model_for(spec), lowered.kernels, spec) if predictor else []
    interval, least = job.interval(times, run), least_wall(lowered, spec)
    return PartitionedPrediction(
        run=run,
        nodes=tuple(nodes),
        transfer=transfer,
        interval=interval._replace(lo=max(interval.lo, min(least, interval.value))),
        cluster=cluster.name,
        device=spec.name,
        lowering="scheduled" if scheduled else lowered.lowering,
        peak_memory_bytes=lowered.peak_memory_bytes,
        capacity_bytes=spec.usable_bytes,
        notes=tuple(notes),
        sources=times.sources,
        kernels=tuple(lowered.kernels),
        devices=devices,
        scheduled=scheduled,
    )


@dataclass(frozen=True)
class _Load:
    """Learned factors for kernels and collectives under sustained load.

    Kernels and collectives were measured alone and briefly. A training step keeps the chip at its
    power limit and the network busy; the slowdown is learned from steps of compiled frameworks, as
    for plans (``docs/steps.md``).

    Attributes:
        kernels: Factor on each kernel, shape ``(n,)``.
        ends: Further factors on each kernel at both bounds of the 90 % interval, shape ``(2, n)``.
        inside: Factor on collectives within a node.
        between: Factor on collectives between nodes.
    """

    kernels: np.ndarray
    ends: np.ndarray
    inside: float
    between: float

    @classmethod
    def of(cls, kernels: Sequence[Kernel], spec: DeviceSpec) -> _Load | None:
        """Return the factors for the kernels of a GPU; ``None`` for other devices.

        A TPU's kernel times are its compiler's estimates, not measurements of short bursts.
        """
        if spec.platform != "gpu":
            return None
        table = StepModel.find().table
        wide, narrow = (device_context(spec, bits, _COMPILED, launched=False) for bits in (16, 8))
        factor, width = np.ones(len(kernels)), np.zeros(len(kernels))
        for place, kernel in enumerate(kernels):
            if kernel.kind in ("gemm", "conv"):
                context = narrow if _NARROW.search(kernel.ir) else wide
                factor[place] = table.effects(context).product
                width[place] = NORMAL_90 * table.log_deviations(context)["product"]
        effects = table.effects(wide)
        ends = np.exp(np.stack([-width, width]))
        return cls(factor, ends, effects.inside, effects.between)


@dataclass
class _Job:
    """One program on one cluster, simulated once per set of latencies."""

    lowered: LoweredProgram
    cluster: Cluster
    collective: CollectiveTime
    devices: int
    scheduled: bool
    contention: float = 0.0
    load: _Load | None = None

    def run(self, seconds: np.ndarray, side: int = 0) -> tuple[list[Node], np.ndarray, StreamRun]:
        """Simulate the program; return nodes, seconds of their collectives, and the schedule.

        Args:
            seconds: Seconds of one execution of each kernel.
            side: Time of each collective to use: 0 for the estimate, 1 and 2 for the lower and
                upper bound of its interval.
        """
        nodes = program_nodes(
            self.lowered.kernels, seconds.tolist(), self.devices, scheduled=self.scheduled
        )
        check_devices(nodes, self.cluster.size)
        if not self.scheduled:
            # XLA's combiner passes for all-reduce, all-gather and reduce-scatter run before
            # scheduling, so compiled programs have been through them.
            nodes = combine_all(nodes)
        transfer = np.array([self._transfer(node, side) for node in nodes])
        links = [self._links(node) for node in nodes]
        run = run_streams(
            nodes, transfer, links, scheduled=self.scheduled, contention=self.contention
        )
        return nodes, transfer, run

    def interval(self, times: ProgramSeconds, run: StreamRun) -> Interval:
        """Return the 90 % interval; kernels, collectives and composition err independently."""
        total = run.makespan
        # Without collectives nothing is composed: the result must equal that of one device.
        own = COMPOSITION_ERROR * total if self._talks() else 0.0
        widths = []
        for side, factor in ((1, times.low), (2, times.high)):
            # The program is simulated anew at each bound, so that hidden time does not widen the
            # interval; independent errors then add in quadrature.
            shifts = [
                self.run(times.kernels * factor)[2].makespan - total,
                self.run(times.kernels, side)[2].makespan - total,
                own,
            ]
            if self.load is not None:
                slower = self.load.ends[side - 1]
                shifts.append(self.run(times.kernels * slower)[2].makespan - total)
            widths.append(float(np.sqrt(np.square(shifts).sum())))
        return Interval.around(total, *widths)

    def _talks(self) -> bool:
        return any(kernel.kind == "collective" for kernel in self.lowered.kernels)

    def _transfer(self, node: Node, side: int) -> float:
        own = node.collective
        if own is None:
            return 0.0
        seconds = self.collective(own.kind, own.size, own.group, self.cluster)[side]
        if self.load is not None:
            box = self.cluster.box
            outside = box and min(own.group) // box != max(own.group) // box
            seconds *= self.load.between if outside else self.load.inside
        return node.times * seconds

    def _links(self, node: Node) -> frozenset[object]:
        if node.collective is None:
            return frozenset()
        # Collectives across the same dimension share its links; ``run_streams`` splits them fairly.
        dims = self.cluster.topology.group_dims(node.collective.group)
        return frozenset((d.kind, d.name) for d in dims)


def _is_annotated(source: SourceProgram) -> bool:
    """Return whether a program has shardings but is not partitioned yet."""
    own = source.program
    if own.dialect != "stablehlo" or own.num_partitions < 2 or own.num_replicas > 1:
        return False
    return joined_devices(source) == 1 and annotated_devices(source) > 1


def _check_partitioned(
    lowered: LoweredProgram, devices: int, cluster: Cluster, origin: str, *, split: bool
) -> None:
    if devices > (most := cluster.size):
        what = f"the program is for {devices} devices, the cluster has {most}"
        hint = "use a cluster with as many devices as the program was partitioned for"
        raise ProgramError(what, where=origin, hint=hint)
    # An unpartitioned module may have num_partitions = N, but every device would then run the whole
    # program, and the time would be wrong by about that factor. A program split along its shardings
    # may need no collective, such as a forward pass split along the batch.
    if devices > 1 and not split and not any(k.kind == "collective" for k in lowered.kernels):
        raise ProgramError(
            f"the program is for {devices} devices but has no collectives",
            where=origin,
            hint="partition it first: opcast zoo export --mesh writes partitioned programs, and so "
            "does a compiler (optimised HLO)",
        )


def _notes(lowered: LoweredProgram, scheduled: bool, devices: int, cluster: Cluster) -> list[str]:
    notes = list(lowered.notes)
    if not scheduled and devices > 1:
        notes.append(
            "the program is not scheduled: its collectives were combined and overlapped as XLA "
            "would, and its ops counted by the lowering " + lowered.lowering
        )
    if devices < cluster.size:
        notes.append(f"the program uses {devices} of {cluster.size} devices")
    return notes
