"""Choice of the plans to compile, and their costs, predicted as in ``predict --cluster``."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from math import inf

from ...common.errors import DatasetError, OpcastError, fault
from ...common.interval import Interval
from ...common.types import JsonObject
from ...features.lowering.options import LoweringOptions
from ...features.lowering.target_compiler.process import CompileSettings
from ...models.power.energy import energy_fields, program_energy
from ...simulate.clusters.topology import Cluster, Dimension, Topology
from ..api import loaded
from ..cluster.partitioned import PartitionedPrediction, predict_partitioned
from .case import PlanCase
from .cost import Screened
from .space import Change, Plan

#: Number of collectives on the critical path to keep in a row.
_WAITS = 5
#: Fields that are absent from the JSON data of pipelines and of other plans, respectively.
_PIPELINES_LACK = frozenset({"energy_lo_j", "energy_hi_j"})
_OTHERS_LACK = frozenset({"bubble_us", "sends_us", "stages"})
#: Maximum compiled plans over the same mesh with different ``tensor`` classes.
_SAME_MESH = 3
#: The screening overestimates memory, by up to 1.7 times for two decoders: plans up to this
#: multiple of the device's memory may fit. At most half of the compiled plans are such plans.
_MEMORY_SLACK = 2.0
#: Maximum share of pipelines among the compiled plans, since each has two to four programs.
_PIPELINES = 1 / 3


@dataclass(frozen=True)
class Wait:
    """Collectives on the critical path from one source line."""

    collective: str
    where: str
    us: float
    bytes: float


@dataclass(frozen=True)
class StageFigures:
    """Times (see ``StageSeconds``) and memory of a pipeline stage."""

    layers: int
    forward_us: float
    backward_us: float
    once_us: float
    memory_bytes_per_device: float


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan, or the program of a stage, that was passed to the compiler.

    Attributes:
        name: The plan as text; empty for a stage.
        plan: The plan; empty for the program as given and on one device.
        devices: Number of devices.
        screened_us: Time by the screening; ``None`` if unknown.
        key: Key of the result.
        error: Why it could not be compiled; empty for a :class:`CompiledPlan`.
        seconds: Duration of the compilation.
    """

    name: str = ""
    plan: Plan = field(default_factory=Plan)
    devices: int = 1
    screened_us: float | None = None
    key: str = ""
    error: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as stored in ``plan.json``."""
        plan, change = self.plan, self.plan.change
        about = {
            "plan": self.name,
            "mesh": plan.sizes,
            "tensor": list(plan.tensor),
            "remat": change.remat,
            "micro_batches": change.micro,
            "devices": self.devices,
            "screened_us": self.screened_us,
        }
        own = asdict(self)
        absent = _PIPELINES_LACK if own.get("stages") else _OTHERS_LACK
        figures = {k: v for k, v in own.items() if k not in absent.union(vars(PlanRow()))}
        ends = {"error": self.error, "seconds": self.seconds}
        return {**(about if self.name else {}), "key": self.key, **figures, **ends}


@dataclass(frozen=True, kw_only=True)
class CompiledPlan(PlanRow):
    """Times and memory of a compiled plan, with a 90 % interval.

    Attributes:
        bubble_us: Time in which stages wait for each other.
        sends_us: Time of transfers between stages.
        waits: Collectives on the critical path, the longest first.
        stages: Stages of a pipeline.
        energy_j: Joules of all devices; ``None`` if unknown.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    bubble_us: float = 0.0
    sends_us: float = 0.0
    memory_bytes_per_device: float
    fits: bool
    lowering: str
    collectives: object
    moved_bytes: float
    waits: list[Wait]
    stages: list[StageFigures] = field(default_factory=list)
    notes: list[str]
    energy_j: float | None = None
    energy_lo_j: float | None = None
    energy_hi_j: float | None = None

    def within(self, memory: float) -> CompiledPlan:
        """Return the plan for devices limited to some bytes; 0 for no limit."""
        fits = self.fits and (not memory or self.memory_bytes_per_device <= memory)
        return replace(self, fits=fits)

    @classmethod
    def from_dict(cls, data: JsonObject) -> CompiledPlan:
        """Read the data of :meth:`to_dict`.

        Raises:
            DatasetError: A field is missing, as in files of earlier versions.
        """
        name = data.get("plan", "")
        own = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        for f in fields(cls):
            # A field has no default if both are the same marker.
            if f.name not in own and f.default is f.default_factory:
                said = f"the row of {name or 'a stage'} has no {f.name}"
                raise DatasetError(said, hint="use another folder")
        change = Change(data.get("remat", 0), data.get("micro_batches", 1))
        mesh, tensor = data.get("mesh", {}), data.get("tensor", ())
        own["plan"] = Plan(tuple(mesh.items()), tuple(tensor), change)
        own["waits"] = [Wait(**wait) for wait in data["waits"]]
        own["stages"] = [StageFigures(**stage) for stage in data.get("stages", [])]
        return cls(**own, name=name)


@dataclass(frozen=True)
class PlanJob:
    """Settings that all plans share; can be pickled to another process.

    Attributes:
        case: Settings of the search.
        cluster: The cluster.
        timeout_s: Time limit of a compilation.
    """

    case: PlanCase
    cluster: Cluster
    timeout_s: float = 3600.0


#: Key of a plan, and the program with its shardings. Bytes instead of a path, since other hosts do
#: not share the results folder.
Annotated = tuple[str, bytes]


def judge_plans(job: PlanJob, programs: Sequence[Annotated]) -> list[PlanRow]:
    """Return one row per annotated program; one that cannot be compiled has an ``error``."""
    rows: list[PlanRow] = []
    for key, program in programs:
        started = time.monotonic()
        try:
            row: PlanRow = _judged(job, program)
        except OpcastError as error:
            row = PlanRow(error=str(error))
        except Exception as error:  # a failing plan must not stop the others
            row = PlanRow(error=str(fault(error)))
        rows.append(replace(row, key=key, seconds=time.monotonic() - started))
    return rows


def judge_alone(job: PlanJob, program: bytes) -> PlanRow:
    """Return the row of a program for one device, predicted as in ``predict --device``."""
    (row,) = judge_plans(replace(job, cluster=alone(job.cluster)), [("", program)])
    return row


def alone(cluster: Cluster) -> Cluster:
    """Return a cluster of one device."""
    network = Topology((Dimension("switch", 1, 1.0),))
    return Cluster(cluster.device, cluster.device, network)


def _judged(job: PlanJob, program: bytes) -> CompiledPlan:
    settings = CompileSettings(timeout_s=job.timeout_s, progress=False)
    options = LoweringOptions(job.case.lowering, settings=settings)
    made = predict_partitioned(program, job.cluster, loaded(job.case.model), options)
    own: JsonObject = made.to_dict() | {
        "fits": made.fits is not False,
        "moved_bytes": sum(n.collective.whole * n.times for n in made.nodes if n.collective),
        "waits": _waits(made),
        **energy_fields(_energy(job, made)),
    }
    return CompiledPlan(**{f.name: own[f.name] for f in fields(CompiledPlan) if f.name in own})


def _energy(job: PlanJob, made: PartitionedPrediction) -> Interval | None:
    """Return the joules of all devices, by the power law for kernels and idle power otherwise."""
    import numpy as np

    from ...features.table.roofline import roofline
    from ..devices import cluster_device

    spec = cluster_device(job.cluster, loaded(job.case.model).devices)
    kernels = [k for k in made.kernels if k.takes_time and k.kind != "collective"]
    if not kernels:
        return None
    seconds = roofline(kernels, spec).latency_s
    counts = np.array([k.multiplicity for k in kernels])
    # Rooflines distribute the simulated computation time over the kernels.
    seconds = seconds * (made.run.compute / max(float((seconds * counts).sum()), 1e-12))
    joules = program_energy(kernels, seconds, made.interval, spec)
    return Interval(*(made.devices * j for j in joules)) if joules else None


def _waits(made: PartitionedPrediction) -> list[Wait]:
    """Return the collectives on the critical path by source line, the longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for place in made.run.critical:
        node = made.nodes[place]
        if node.collective is None:
            continue
        lines = [
            f"{s.file}:{s.line}" if s.file else s.op
            for member in node.members or ()
            for s in made.kernels[member].sources
        ]
        key = (node.collective.kind, lines[0] if lines else node.name)
        length = float(made.run.end[place] - made.run.start[place])
        seconds[key] += length * 1e6
        moved[key] += node.collective.whole * node.times
    return [
        Wait(kind, where, us, moved[kind, where])
        for (kind, where), us in sorted(seconds.items(), key=lambda item: -item[1])[:_WAITS]
    ]


def axes_of(screened: Iterable[Screened]) -> list[str]:
    """Return the mesh axes that occur in plans."""
    return list(dict.fromkeys(axis for own in screened for axis in own.plan.sizes))


def chosen(screened: Sequence[Screened], most: int, devices: int, memory: float) -> list[Plan]:
    """Return plans worth compiling: the fastest, one per kind, and the best over fewer devices.

    Args:
        screened: All plans, the fastest first.
        most: Maximum number of plans.
        devices: Devices of the cluster.
        memory: Bytes that may be used per device; 0 if unknown.

    Returns:
        Plans in the order in which to compile them, since a budget may end the search early.
    """
    most_memory = _MEMORY_SLACK * memory or inf
    fit = [s for s in screened if s.memory <= most_memory]
    # If nothing fits, the plans that need least show how much is missing.
    ordered = fit or sorted(screened, key=lambda s: s.memory)
    full = [s for s in ordered if s.plan.devices == devices]
    fewer: dict[int, Screened] = {}
    for own in ordered:
        if own.plan.devices < devices:
            fewer.setdefault(own.plan.devices, own)
    least = min(full or ordered, key=lambda s: s.memory)
    # The plans that people try first, over as many devices as the batch and a node allow.
    pure = ([s for s in fit if list(s.plan.sizes) == [axis]] for axis in ("data", "tensor"))
    kinds = [max(of, key=lambda s: (s.plan.devices, -s.seconds)).plan for of in pure if of]
    # The fastest of every other kind: the screening ranks plans within a kind best.
    for axis in axes_of(ordered):
        if not any(axis in plan.sizes for plan in [(full or ordered)[0].plan, *kinds]):
            kinds.append(next(s.plan for s in [*full, *ordered] if axis in s.plan.sizes))
    meshes: Counter[tuple[tuple[tuple[str, int], ...], Change]] = Counter()
    plans: list[Plan] = []
    doubtful = 0
    staged = int(least.plan.stages > 1)
    for own in full:
        doubts = bool(memory) and own.memory > memory
        kind = own.plan.mesh, own.plan.change
        if own.plan.stages > 1 and own is not least:
            if staged >= max(int(_PIPELINES * most), 1):
                continue
            staged += 1
        if meshes[kind] < _SAME_MESH and not (doubts and 2 * doubtful > most):
            meshes[kind] += 1
            doubtful += doubts
            plans.append(own.plan)
    room = max(most - 1 - len(kinds) - min(len(fewer), 2), 1)
    # One of each kind before further plans, since a budget may end the search early.
    picked = [*plans[:1], *kinds, *plans[1:room], least.plan]
    picked += [s.plan for s in islice(fewer.values(), 2)]
    return list(dict.fromkeys([*picked, *plans[room:]]))[:most]
