"""Whether a program or a training step fits the memory of a device, and what would if not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp
from typing import TYPE_CHECKING

from ..common.errors import DeviceError
from ..common.interval import Interval

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..features.ir.program import Program
    from ..features.ir.reader import SourceProgram
    from ..simulate.clusters.topology import Cluster
    from ..simulate.step.workload import Workload
    from .cluster.step_case import PlannedStep
    from .operator.torch_framework import TorchPredictor
    from .operator.torch_memory import TorchMemory
    from .program.case import ProgramCase

#: Share of a GPU's memory that JAX takes by default, and does not grow beyond
#: (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).
JAX_SHARE = 0.75
#: Ends in logarithms of what a compiler says a program needs: the allocator's gaps and scratch of
#: libraries. Engineering estimate.
_COMPILED = (-0.02, 0.05)
#: The same of the lifetimes of buffers without a compiler: on GPUs, and elsewhere, as on TPUs,
#: whose layouts pad. Peaks of 10 programs of the zoo by lowering ``xla`` were 0.86 to 1.09
#: times these on an H100 and 0.86 to 1.96 times on a v5e.
_LIFETIMES = {"gpu": (-0.15, 0.12), "": (-0.2, 0.5)}
#: Share of a peak that donated arguments leave at most, or they are not named.
_SAVING = 0.99


@dataclass(frozen=True)
class MemoryFit:
    """What a run needs of a device's memory, and whether it has that. Bytes.

    Attributes:
        subject: What is run.
        device: Name of the device.
        needed: What it can run in, with its 90 % interval.
        capacity: What a process can have.
        parts: What the peak is made of.
        risk: Largest probability of running out that is accepted.
        change: The smallest change with which it would fit; empty if it fits, or none is known.
        source: What the peak is from.
        notes: What limits the answer.
        beside: What else does not fit, such as what is offloaded to the host; empty for nothing.
        held: Peak of what the device sees if there is room, with its 90 % interval; ``None`` if
            that is what is needed.
    """

    subject: str
    device: str
    needed: Interval
    capacity: float
    parts: dict[str, float]
    risk: float
    change: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()
    beside: str = ""
    held: Interval | None = None

    @property
    def peak(self) -> Interval:
        """The peak of memory that ``opcast predict`` answers."""
        return self.held or self.needed

    @property
    def out_of_memory(self) -> float:
        """Probability that the device runs out of memory."""
        return 1.0 - self.needed.chance_below(self.capacity)

    @property
    def fits(self) -> bool:
        """Whether that probability is accepted, and nothing else is lacking."""
        return self.out_of_memory <= self.risk and not self.beside

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast fit --json`` prints it."""
        return {
            "subject": self.subject,
            "device": self.device,
            "fits": self.fits,
            "out_of_memory": self.out_of_memory,
            "risk": self.risk,
            "peak_memory_bytes": self.peak.value,
            "lo_bytes": self.peak.lo,
            "hi_bytes": self.peak.hi,
            "needed_bytes": self.needed.value,
            "capacity_bytes": self.capacity,
            "parts_bytes": self.parts,
            "change_to_fit": self.change,
            "source": self.source,
            "beside": self.beside,
            "notes": list(self.notes),
        }


def allowed(needed: Interval, capacity: float, risk: float) -> float:
    """Largest estimate that has no larger risk, if its interval is as wide as another's.

    Args:
        needed: The other.
        capacity: What there is.
        risk: Largest probability of more.
    """
    return capacity * needed.value / needed.quantile(1.0 - risk)


def _capacity(spec: DeviceSpec) -> float:
    """What a process can have of a device.

    Raises:
        DeviceError: It is not known.
    """
    if not spec.memory_bytes:
        raise DeviceError(
            "the memory of the device is not known",
            where=spec.name,
            hint="give memory_gb in a device file",
        )
    return spec.usable_bytes


def program_fit(case: ProgramCase, risk: float, subject: str) -> MemoryFit:
    """Find out whether a program fits as XLA runs it.

    Args:
        case: The program on a device.
        risk: Largest probability of running out that is accepted.
        subject: What it is called.

    Raises:
        OpcastError: The program or device is not usable.
    """
    from .program.predictor import roofline_predictor

    source, lowered, spec = case.lower(roofline_predictor())
    most = _capacity(spec)
    # JAX takes its share at once; elsewhere memory is taken as it is needed.
    capacity = JAX_SHARE * most if spec.platform == "gpu" else most
    compiled = lowered.memory_source == "compiler"
    low, high = _COMPILED if compiled else _LIFETIMES.get(spec.platform, _LIFETIMES[""])
    peak = lowered.peak_memory_bytes
    parts = program_parts(source.program, peak)
    # Arguments are there, whatever is between them.
    floor = min(parts["arguments"], peak)
    needed = Interval(peak, max(floor, peak * exp(low)), peak * exp(high))
    change = ""
    if needed.value > allowed(needed, capacity, risk):
        donated = _donated_peak(case, source, peak)
        change = _program_change(needed, donated, parts, (capacity, most), risk)
    return MemoryFit(
        subject, spec.name, needed, capacity, parts, risk, change, lowered.memory_source,
        tuple(lowered.notes),
    )  # fmt: skip


def program_parts(program: Program, peak: float) -> dict[str, float]:
    """Bytes of a program's arguments, of results beside them, and of what is between."""
    entry = program.entry_computation
    arguments = float(sum(op.result_bytes for op in entry.parameters))
    taken = {parameter for _, parameter in program.aliases}
    shared = sum(op.result_bytes for op in entry.parameters if int(op.attrs["index"]) in taken)
    results = max(0.0, entry.root_op.result_bytes - shared)
    rest = max(0.0, peak - arguments - results)
    return {"arguments": arguments, "results": results, "temporaries": rest}


def donatable(program: Program) -> list[tuple[int, int]]:
    """Results that could take the place of arguments of their type and do not, with these."""
    entry = program.entry_computation
    outputs, parameters = zip(*program.aliases, strict=True) if program.aliases else ((), ())
    donated = {*parameters, *program.donors}
    free: dict[tuple[object, ...], list[int]] = {}
    for own in entry.parameters:
        if (number := int(own.attrs["index"])) not in donated:
            free.setdefault(own.type[:2], []).append(number)
    return [
        (number, free[kind[:2]].pop(0))
        for number, kind in enumerate(entry.root_op.results)
        if number not in outputs and free.get(kind[:2])
    ]


def _donated_peak(case: ProgramCase, source: SourceProgram, peak: float) -> float:
    """Peak if results took the place of arguments, of HLO as much less as they are large.

    Else the program is lowered again: compilers put temporaries where a result will be.
    """
    from .program.predictor import roofline_predictor

    pairs = donatable(source.program)
    if not pairs:
        return peak
    if source.kind == "hlo":
        results = source.program.entry_computation.root_op.results
        return peak - sum(results[output].nbytes for output, _ in pairs)
    from ..features.ir.mlir.shardings import with_donations

    module = with_donations(source.module, pairs, ())
    again = replace(case, program=module, arguments=(), keywords={})
    return min(peak, again.lower(roofline_predictor()).lowered.peak_memory_bytes)


def _program_change(
    needed: Interval,
    donated: float,
    parts: dict[str, float],
    room: tuple[float, float],
    risk: float,
) -> str:
    """The smallest change with which a program that does not fit would.

    Args:
        needed: What it needs.
        donated: What it would need with donated arguments.
        parts: What its peak is made of.
        room: What JAX takes by default, and all that it can have.
        risk: Largest probability of running out that is accepted.
    """
    limits = [allowed(needed, own, risk) for own in room]

    def share(peak: float) -> str:
        part = ceil(100 * peak * needed.quantile(1.0 - risk) / needed.value / room[1]) / 100
        return f"XLA_PYTHON_CLIENT_MEM_FRACTION={part:g} (JAX takes {JAX_SHARE:g} by default)"

    if needed.value <= limits[1]:
        return share(needed.value)
    if donated > needed.value * _SAVING:
        donated = needed.value
    first = ["donated arguments (donate_argnums)"] if donated < needed.value else []
    if donated <= limits[0]:
        return f"{first[0]}: results then take their place"
    if donated <= limits[1]:
        return " and ".join((*first, share(donated)))
    fixed = min(donated, parts["arguments"] + parts["results"] - (needed.value - donated))
    for limit, more in zip(limits, ([], [share(limits[1])]), strict=True):
        left = int(100 * (limit - fixed) / (donated - fixed)) if donated > fixed else 0
        if left > 0:
            smaller = f"{left}% of the temporaries (a smaller batch, jax.checkpoint)"
            return " and ".join((*first, *more, smaller))
    return " and ".join((*first, f"sharding over {ceil(donated / limits[0])} devices or more"))


def torch_fit(
    predictor: TorchPredictor, program: object, spec: DeviceSpec, risk: float, subject: str
) -> MemoryFit:
    """Find out whether a program fits as PyTorch runs it.

    Args:
        predictor: Whose kernels.
        program: A program of PyTorch.
        spec: The device.
        risk: Largest probability of running out that is accepted.
        subject: What it is called.

    Raises:
        OpcastError: The program or device is not usable, or its memory cannot be predicted.
    """
    recording = predictor.record(program, spec)
    capacity = _capacity(spec)

    def asked(own: DeviceSpec) -> TorchMemory:
        memory = predictor.price(recording, own).memory
        if memory is None:
            raise DeviceError("the memory of this program cannot be predicted", where=subject)
        return memory

    memory = asked(spec)
    needed, change = memory.needed, memory.change
    held = memory.measured_as("memory")
    parts = {**{k: float(v) for k, v in memory.parts.items()}, "context": memory.context_bytes}
    # What the allocator holds beyond what is allocated, at the same time.
    parts["fragments"] = max(0.0, held.value - sum(parts.values()))
    limit = allowed(needed, capacity, risk)
    if needed.value > limit and not change:
        change = asked(spec.with_usable(limit)).change
    return MemoryFit(
        subject, spec.name, needed, capacity, parts, risk, change if needed.value > limit else "",
        memory.source, held=held,
    )  # fmt: skip


def step_fit(
    case: PlannedStep, cluster: str | Cluster, workload: Workload, risk: float, subject: str
) -> MemoryFit:
    """Find out whether a training step fits the devices of a cluster.

    Args:
        case: Plan and framework.
        cluster: Where.
        workload: The model.
        risk: Largest probability of running out that is accepted.
        subject: Name of the model.

    Raises:
        OpcastError: The plan does not fit the model or the cluster.
    """
    from ..models.core.registry import OPERATOR_MODEL
    from ..models.steps.memory import interval_of
    from .cluster.step import StepPredictor
    from .operator.step_operators import load_step_model

    usual = case.predictor(cluster, load_step_model(OPERATOR_MODEL))
    spec, framework = usual.spec, usual.framework
    capacity = _capacity(spec)
    plan, other, why = case.taken(usual, workload)
    # Of a plan that fits as likely as is wanted, the peak is at most this.
    unit = interval_of(usual.learned.memory, framework, 1.0)
    margin = spec.with_usable(allowed(unit, capacity, risk))
    predictor = StepPredictor(
        usual.cluster, None, margin, framework, learned=usual.learned, latency=usual.latency
    )
    found = predictor.predict(workload, plan)
    worst = found.fit.worst
    parts = {name: own for name, own in worst.to_dict().items() if name != "total"}
    needed = interval_of(usual.learned.memory, framework, worst.total)
    notes: tuple[str, ...] = ()
    if other is not None:
        least = usual.fit(workload, other).worst.total
        notes = (f"{why} it needs {least / 2**30:.2f} GiB",)
    name = f"{subject} with {found.plan.text()} on {usual.cluster.name}"
    return MemoryFit(
        name, spec.name, needed, capacity, parts,
        risk, found.fit.change or "", f"counted, by {framework or 'an average framework'}",
        notes, beside="" if found.fit.host_fits else found.fit.reason(),
    )  # fmt: skip
