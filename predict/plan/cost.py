"""Screening cost of a plan: fast enough for thousands of plans.

A program is summarized once: its kernels by the classes of their dimensions, and its ops by what
they would communicate. A plan divides the kernels' time by the shardings of their dimensions, and
adds collectives: sums over a sharded dimension are reduced, operands that an op needs whole are
gathered, sharded parameters are gathered before use, and gradients are reduced. The best plans are
then compiled (``search.py``), so the screening only has to rank them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple, TypeVar

from ...common.errors import OpcastError
from ...features.ir.reader import SourceProgram
from ...features.kernels.memory import memory_over_time
from ...features.lowering.fused.lower import lower_fused
from ...features.lowering.op import lower_op
from ...models.cost_model import CostModel
from ...simulate.clusters.topology import Cluster
from ..cluster.network import xla_time
from ..cluster.program_seconds import program_seconds
from ..devices import cluster_device
from ..program.predictor import Predictor
from .arguments import Argument
from .dimensions import PRODUCTS, Dimensions, Place, Step, product_flops
from .space import Cuts, Plan, Space, assign, cut_parts, fsdp_dimension, group_ranks

#: Share of the computation that can hide collectives of parameters and gradients. Engineering
#: estimate: XLA starts them early and waits late, but nothing is left to hide the last gradients.
_HIDDEN = 0.6
#: Bytes up to which XLA's combiner passes merge collectives, as in ``simulate/program/nodes.py``.
_COMBINED = 30 * 2**20


#: Key of a part of a program, such as the number of a stage.
Part = TypeVar("Part", bound=Hashable)


class Event(NamedTuple):
    """A collective that a plan adds.

    Attributes:
        kind: Name of the collective, as in ``simulate/collectives/choose.py``.
        axes: Mesh axes that it spans.
        size: Bytes that a device contributes.
        hidden: Whether it communicates parameters or gradients, which are not needed at once.
        where: Source line of the op that needs it.
    """

    kind: str
    axes: tuple[str, ...]
    size: float
    hidden: bool
    where: str


@dataclass(frozen=True)
class Screened:
    """Screening cost of a plan.

    Attributes:
        plan: The plan.
        seconds: Time of a run.
        compute: Seconds of kernels.
        waiting: Seconds of collectives that kernels wait for.
        hidden: Seconds of collectives that can overlap with kernels.
        memory: Peak bytes per device.
    """

    plan: Plan
    seconds: float
    compute: float
    waiting: float
    hidden: float
    memory: float


@dataclass(frozen=True)
class _Operand:
    classes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Record:
    """Inputs that determine the collectives of an op; equal ones of all layers share a record.

    ``parts`` is the number of micro-batches over which its result is accumulated, 1 for none.
    """

    classes: tuple[int, ...]
    operands: tuple[_Operand, ...]
    at: tuple[tuple[tuple[int, int], ...], ...]
    results: int
    nbytes: int
    tail: bool
    where: str
    parts: int


class Sheet:
    """A program summarized for one type of device.

    Args:
        source: The program, for one device.
        found: Dimensions of the program.
        arguments: Arguments of the program.
        space: Dimensions that may be sharded.
        cluster: Cluster of the plans.
        predictor: Predicts the kernels of one device.
        micro: Number of micro-batches of a step.
    """

    def __init__(
        self,
        source: SourceProgram,
        found: Dimensions,
        arguments: Sequence[Argument],
        space: Space,
        cluster: Cluster,
        predictor: Predictor,
        micro: int = 1,
    ) -> None:
        self.micro, self.entry = micro, source.program.entry
        self.found, self.arguments, self.space = found, arguments, space
        self.cluster, self.device = cluster, cluster_device(cluster, predictor.devices)
        self.tails = found.tails(space.batch)
        self._kernels(source, predictor.model_for(self.device))
        merged = self._merged()
        made = ((s, self._record(s, reduces=s.place not in merged)) for s in found.steps)
        self._recorded = [(step, record) for step, record in made if record is not None]
        self._sum(self._timed, self._recorded)
        # Times of collectives, shared by plans over the same mesh.
        self._time = lru_cache(maxsize=None)(self._seconds)

    def _kernels(self, source: SourceProgram, model: CostModel) -> None:
        """Group the kernels of one device by the classes of their dimensions."""
        try:
            lowered = lower_fused(source, self.device)
        except OpcastError:
            lowered = lower_op(source, self.device)
        seconds = program_seconds(lowered, self.device, model).kernels
        first: dict[int, Step] = {}
        for step in self.found.steps:
            if step.op.source is not None:
                first.setdefault(step.op.source.index, step)
        self._timed: list[tuple[Step | None, float, float]] = []
        for kernel, own in zip(lowered.kernels, seconds.tolist(), strict=True):
            steps = [first[s.index] for s in kernel.sources if s.index in first]
            main = max(steps, key=self._weight) if steps else None
            floor = min(own, self.device.floor)
            times = kernel.multiplicity
            self._timed.append((main, (own - floor) * times, floor * times))
        profile = memory_over_time(lowered.module) if lowered.module is not None else None
        peak = max(profile.bytes, default=0.0) - profile.resident if profile else 0.0
        self.activations = max(peak, 0.0)
        weights: Counter[tuple[tuple[int, ...], bool]] = Counter()
        for step in self.found.steps:
            for leaf, kind in enumerate(step.op.results):
                key = self.found.value_classes((step.place, leaf)), step.place in self.tails
                weights[key] += kind.nbytes
        total = sum(weights.values()) or 1
        self.values = [(key, weight / total) for key, weight in weights.items()]

    def _sum(
        self,
        timed: Iterable[tuple[Step | None, float, float]],
        recorded: Iterable[tuple[Step, _Record]],
    ) -> None:
        """Sum kernels and collectives over the classes that determine their cost."""
        groups: dict[tuple[tuple[int, ...], bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for main, work, floor in timed:
            # Parameter updates run on the shards of the parameter.
            update = main is not None and main.op.opcode not in PRODUCTS
            update = update and main is not None and main.place in self.tails
            group = groups[self._classes(main) if main else (), update]
            group[0] += work
            group[1] += floor
        self.groups = dict(groups)
        self.records: dict[_Record, float] = defaultdict(float)
        for step, record in recorded:
            self.records[record] += step.times

    def parts(
        self, of: Callable[[Step | None], Part], arguments: Mapping[Part, Sequence[Argument]]
    ) -> dict[Part, Sheet]:
        """Split the sheet; its parts share the times of collectives.

        Args:
            of: Returns the part of an op; for ``None`` that of kernels without known ops.
            arguments: Arguments that each part holds; the keys are all parts.
        """
        timed: dict[Part, list[tuple[Step | None, float, float]]] = defaultdict(list)
        for own in self._timed:
            timed[of(own[0])].append(own)
        recorded: dict[Part, list[tuple[Step, _Record]]] = defaultdict(list)
        for found in self._recorded:
            recorded[of(found[0])].append(found)
        made = {}
        for part, held in arguments.items():
            sheet = copy(self)
            sheet.arguments = held
            sheet._sum(timed[part], recorded[part])
            made[part] = sheet
        return made

    def _weight(self, step: Step) -> tuple[float, int]:
        own = step.op.opcode in PRODUCTS
        kinds = [self.found.types[o].shape for o in step.operands] if own else []
        return product_flops(step, kinds) if own else 0.0, step.op.result_bytes

    def _classes(self, step: Step) -> tuple[int, ...]:
        return tuple(self.found.axis_class(step, axis) for axis in step.axes)

    def _merged(self) -> set[Place]:
        """Return products whose partial sums are added to others before they are reduced.

        XLA turns a sum of all-reduces into an all-reduce of the sum: gradients from queries, keys
        and values to their common input are reduced once.
        """
        sums: dict[Place, frozenset[int]] = {}
        merged: set[Place] = set()
        for step in self.found.steps:
            if step.op.opcode in PRODUCTS:
                along = zip(step.axes, self._classes(step), strict=True)
                sums[step.place] = frozenset(c for axis, c in along if axis.summed and c)
            elif step.op.opcode == "add" and len(step.operands) == 2:
                left, right = (self.found.root(o)[0] for o in step.operands)
                if left != right and sums.get(left) and sums.get(left) == sums.get(right):
                    sums[step.place] = sums[left]
                    # The reduction of the sum is attributed to its first product.
                    merged.add(right)
        return merged

    def _record(self, step: Step, *, reduces: bool) -> _Record | None:
        classes = self._classes(step)
        known = self.space.batch | {self.space.sequence, self.space.expert, *self.space.tensor}
        met = [c for c in classes if c in known and c]
        operands = tuple(
            _Operand(self.found.value_classes(o), self.found.types[o].nbytes) for o in step.operands
        )
        covered = {at for axis in step.axes for at in axis.operands}
        broken = any(
            c in known and c and (k, d) not in covered
            for k, own in enumerate(operands)
            for d, c in enumerate(own.classes)
        )
        summed = reduces and any(
            a.summed and c in known and c for a, c in zip(step.axes, classes, strict=True)
        )
        if not (broken or summed or len(set(met)) < len(met)):
            return None
        # Results first, so that they are assigned an axis before summed dimensions.
        order = sorted(range(len(classes)), key=lambda n: step.axes[n].summed)
        source = step.op.source
        return _Record(
            tuple(classes[n] for n in order),
            operands,
            tuple(step.axes[n].operands for n in order),
            sum(not axis.summed for axis in step.axes),
            step.op.result_bytes if reduces else 0,
            step.place in self.tails,
            f"{source.file}:{source.line}" if source and source.file else step.op.opcode,
            self.micro if step.place in self.tails and step.place[0] != self.entry else 1,
        )

    def cost(self, plan: Plan) -> Screened:
        """Estimate the time and memory of a plan."""
        cuts, sizes = self.space.cuts(plan), plan.sizes
        compute = 0.0
        for (classes, update), (work, floors) in self.groups.items():
            parts = cut_parts(assign(classes, cuts), sizes)
            compute += work / (parts * sizes.get("fsdp", 1) if update else parts) + floors
        waiting = 0.0
        later: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        largest: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        for event, times in self.events(plan).items():
            if event.hidden:
                key = (event.kind, event.axes)
                later[key] += event.size * times
                largest[key] = max(largest[key], event.size)
            else:
                own = self._time(event.kind, event.axes, round(event.size), plan.mesh)
                waiting += own * times
        hidden = least = 0.0
        for (kind, axes), total in later.items():
            # Merged up to a limit; larger ones are separate.
            size = max(_COMBINED, largest[kind, axes])
            count = ceil(total / size)
            hidden += count * self._time(kind, axes, round(total / count), plan.mesh)
            # Nothing is left to compute during the last of them.
            least = max(least, self._time(kind, axes, round(total / count), plan.mesh))
        seconds = compute + waiting + max(least, hidden - _HIDDEN * compute)
        return Screened(plan, seconds, compute, waiting, hidden, self.memory(plan))

    def events(self, plan: Plan) -> dict[Event, float]:
        """Return the collectives of a plan, with the number of executions."""
        cuts, sizes = self.space.cuts(plan), plan.sizes
        found: dict[Event, float] = defaultdict(float)
        for record, times in self.records.items():
            for event in self._of(record, cuts, sizes):
                # XLA moves the all-reduce of a sum over loop iterations behind the loop
                # (while_loop_all_reduce_code_motion.cc); reduce-scatters of gradients stay inside.
                sums = event.hidden and event.kind == "all_reduce"
                found[event] += times / record.parts if sums else times
        if "fsdp" in sizes:
            for own in self.arguments:
                if fsdp_dimension(own, cuts, sizes) < 0:
                    continue
                # Once in the forward and once in the backward pass.
                for use in own.uses[:2]:
                    value = use.step.operands[use.operand]
                    classes = self.found.value_classes(value)
                    size = self.found.types[value].nbytes / sizes["fsdp"]
                    size /= cut_parts(assign(classes, cuts), sizes)
                    where = use.step.op.source
                    line = f"{where.file}:{where.line}" if where and where.file else own.name
                    event = Event("all_gather", ("fsdp",), size, True, line)
                    found[event] += use.step.times
        return found

    def _of(self, record: _Record, cuts: Cuts, sizes: dict[str, int]) -> list[Event]:
        loop = assign(record.classes, cuts, record.results)
        found = []
        for k, own in enumerate(record.operands):
            cut = assign(own.classes, cuts)
            for d, axes in enumerate(cut):
                if not axes:
                    continue
                place = next((n for n, at in enumerate(record.at) if (k, d) in at), -1)
                moved = tuple(a for a in axes if place < 0 or a not in loop[place])
                if moved:
                    local = own.nbytes / cut_parts(cut, sizes)
                    other = {
                        a
                        for n, at in enumerate(record.at)
                        for a in loop[n]
                        if n != place and any(j == k for j, _ in at)
                    }
                    kind = "all_to_all" if set(moved) <= other else "all_gather"
                    found.append(Event(kind, moved, local, record.tail, record.where))
        partial = tuple(a for axes in loop[record.results :] for a in axes)
        if partial and record.nbytes:
            local = record.nbytes / cut_parts(loop[: record.results], sizes)
            if record.tail and "fsdp" in partial:
                # Its parameter is sharded: each device keeps its shard of the gradient.
                found.append(Event("reduce_scatter", ("fsdp",), local, True, record.where))
                partial = tuple(a for a in partial if a != "fsdp")
                local /= sizes["fsdp"]
            if partial:
                found.append(Event("all_reduce", partial, local, record.tail, record.where))
        return found

    def _seconds(
        self, kind: str, axes: tuple[str, ...], size: int, mesh: tuple[tuple[str, int], ...]
    ) -> float:
        return xla_time(kind, float(size), group_ranks(axes, mesh), self.cluster)[0]

    def memory(self, plan: Plan) -> float:
        """Return the peak bytes per device: arguments, and activations by their shardings."""
        cuts, sizes = self.space.cuts(plan), plan.sizes
        total = 0.0
        for own in self.arguments:
            parts = cut_parts(assign(own.classes, cuts), sizes)
            if fsdp_dimension(own, cuts, sizes) >= 0:
                parts *= sizes["fsdp"]
            total += own.type.nbytes / parts
        # Gradients of parameters are sharded like the parameters.
        fsdp = sizes.get("fsdp", 1)
        share = sum(
            weight / (cut_parts(assign(classes, cuts), sizes) * (fsdp if tail else 1))
            for (classes, tail), weight in self.values
        )
        return total + self.activations * share
