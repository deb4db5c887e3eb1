"""Check whether a program or a training step fits a device's memory, and what would make it fit."""

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
    from .operator.torch_memory import Holder, TorchMemory
    from .program.case import ProgramCase

#: Fraction of a GPU's memory that JAX reserves by default and does not exceed
JAX_SHARE = 0.75
#: Bounds, in logarithms, of a compiler's stated memory requirement: gaps of the allocator and
#: scratch memory of libraries. Engineering estimate.
_COMPILED = (-0.02, 0.05)
#: The same for buffer lifetimes without a compiler: on GPUs, and elsewhere, as on TPUs, whose
#: layouts are padded. Peaks of 10 programs of the zoo by lowering ``xla`` were 0.86 to 1.09 times
#: these on an H100 and 0.86 to 1.96 times on a v5e.
_LIFETIMES = {"gpu": (-0.15, 0.12), "": (-0.2, 0.5)}
#: Donated arguments are suggested if they reduce the peak below this fraction.
_SAVING = 0.99


@dataclass(frozen=True)
class MemoryFit:
    """Memory that a run needs on a device, and whether it is available. In bytes.

    Attributes:
        subject: What is run.
        device: Name of the device.
        needed: Memory in which it can run, with its 90 % interval.
        capacity: Memory available to a process.
        parts: Components of the peak.
        risk: Largest accepted probability of running out of memory.
        change: The smallest change that would make it fit; empty if it fits or none is known.
        source: Source of the peak.
        notes: Limitations of the answer.
        beside: What else does not fit, such as data offloaded to the host; empty if all fits.
        holder: The source line that holds most of the peak; ``None`` if it is unknown.
        held: Peak that the device reports if there is room, with its 90 % interval; ``None`` if
            it equals the needed memory.
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
    holder: Holder | None = None
    held: Interval | None = None

    @property
    def peak(self) -> Interval:
        """Return the memory peak that ``opcast predict`` reports."""
        return self.held or self.needed

    @property
    def out_of_memory(self) -> float:
        """Return the probability that the device runs out of memory."""
        return 1.0 - self.needed.chance_below(self.capacity)

    @property
    def fits(self) -> bool:
        """Return whether that probability is accepted and nothing else is missing."""
        return self.out_of_memory <= self.risk and not self.beside

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as printed by ``opcast fit --json``."""
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
            "holder": self.holder and self.holder._asdict(),
            "change_to_fit": self.change,
            "source": self.source,
            "beside": self.beside,
            "notes": list(self.notes),
        }


def allowed(needed: Interval, capacity: float, risk: float) -> float:
    """Return the largest estimate whose probability of exceeding a capacity is at most ``risk``.

    Args:
        needed: An interval with the same relative width.
        capacity: Available memory.
        risk: Largest accepted probability of exceeding it.
    """
    return capacity * needed.value / needed.quantile(1.0 - risk)


def _capacity(spec: DeviceSpec) -> float:
    """Return the memory that a process can use on a device.

    Raises:
        DeviceError: It is unknown.
    """
    if not spec.memory_bytes:
        raise DeviceError(
            "the memory of the device is not known",
            where=spec.name,
            hint="give memory_gb in a device file",
        )
    return spec.usable_bytes


def program_fit(case: ProgramCase, risk: float, subject: str) -> MemoryFit:
    """Check whether a program fits as XLA runs it.

    Args:
        case: The program and device.
        risk: Largest accepted probability of running out of memory.
        subject: Name of the program.

    Raises:
        OpcastError: The program or device is not usable.
    """
    from .program.predictor import roofline_predictor

    source, lowered, spec = case.lower(roofline_predictor())
    most = _capacity(spec)
    # JAX reserves its share at once; elsewhere memory is allocated on demand.
    capacity = JAX_SHARE * most if spec.platform == "gpu" else most
    compiled = lowered.memory_source == "compiler"
    low, high = _COMPILED if compiled else _LIFETIMES.get(spec.platform, _LIFETIMES[""])
    peak = lowered.peak_memory_bytes
    parts = program_parts(source.program, peak)
    # Arguments are always held, regardless of temporaries.
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
    """Return the bytes of a program's arguments, separate results, and temporaries."""
    entry = program.entry_computation
    arguments = float(sum(op.result_bytes for op in entry.parameters))
    taken = {parameter for _, parameter in program.aliases}
    shared = sum(op.result_bytes for op in entry.parameters if int(op.attrs["index"]) in taken)
    results = max(0.0, entry.root_op.result_bytes - shared)
    rest = max(0.0, peak - arguments - results)
    return {"arguments": arguments, "results": results, "temporaries": rest}


def donatable(program: Program) -> list[tuple[int, int]]:
    """Return pairs of a result and an argument of its type that it could reuse but does not."""
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
    """Return the peak if results reused the memory of arguments.

    For HLO, the results' sizes are subtracted. Other programs are lowered again, since compilers
    place temporaries in a result's memory.
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
    """Return the smallest change that would make a program fit.

    Args:
        needed: Memory that it needs.
        donated: Memory that it would need with donated arguments.
        parts: Components of its peak.
        room: JAX's default capacity, and the whole capacity.
        risk: Largest accepted probability of running out of memory.
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
    """Check whether a program fits as PyTorch runs it.

    Args:
        predictor: Predictor of PyTorch programs.
        program: A PyTorch program.
        spec: The device.
        risk: Largest accepted probability of running out of memory.
        subject: Name of the program.

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
    # What the allocator reserves beyond what is allocated at the same time.
    parts["fragments"] = max(0.0, held.value - sum(parts.values()))
    limit = allowed(needed, capacity, risk)
    if needed.value > limit and not change:
        change = asked(spec.with_usable(limit)).change
    return MemoryFit(
        subject, spec.name, needed, capacity, parts, risk, change if needed.value > limit else "",
        memory.source, held=held, holder=next(iter(memory.holders), None),
    )  # fmt: skip


def step_fit(
    case: PlannedStep, cluster: str | Cluster, workload: Workload, risk: float, subject: str
) -> MemoryFit:
    """Check whether a training step fits the devices of a cluster.

    Args:
        case: Plan and framework.
        cluster: The cluster, or its name or file.
        workload: The model.
        risk: Largest accepted probability of running out of memory.
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
    # Upper limit for the peak of a plan that fits with the accepted risk.
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
