"""Rows of the report on devices: programs of the zoo, lowered and predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import CompilerStartError, LoweringError, OpcastError
from ...common.files import own_data

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...features.kernels.kernel import LoweredProgram
    from ...predict.program.predictor import Predictor


#: Programs by name: family of the zoo and settings.
PROGRAMS: dict[str, str] = own_data("workflows/reports/reports.yaml")["devices"]
#: Relative tolerance for comparisons of sums in float64.
ROUNDING = 1e-9


@dataclass(frozen=True)
class DeviceRow:
    """A program on a device, with the times of one run.

    Attributes:
        program: Name of the program.
        device: Name of the device.
        lowering: ``xla``, ``fused`` or ``op``.
        lower_s: Seconds that the lowering took now; milliseconds if it was in the cache.
        compile_s: Seconds that the compiler took when it made what is in the cache.
        kernels: Kernels that take time.
        executions: Their executions.
        roofline_us: Program time of kernels at roofline and floor.
        learned_us: Program time of kernels by the shipped model.
        learned_lo_us: Lower end of its 90 % interval.
        learned_hi_us: Upper end.
        compiler_us: The same of the TPU compiler's own estimates, the roofline where it gives none;
            ``None`` for other platforms.
        least_us: Program time that physics allows, without launch and dispatch.
        undercut: Kernels whose latency is below what physics allows.
        unclamped_us: Program time of the model's estimates before they are clamped to physics.
        clamped: Kernels whose estimate was clamped to what physics allows.
        worst: Least ratio of an estimate to what physics allows; 1 if none is below.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        fits: Whether that is within the device's memory; ``None`` if unknown.
        error: Why there are no figures; empty if there are.
    """

    program: str
    device: str
    lowering: str = ""
    lower_s: float = 0.0
    compile_s: float = 0.0
    kernels: int = 0
    executions: float = 0.0
    roofline_us: float = 0.0
    learned_us: float = 0.0
    learned_lo_us: float = 0.0
    learned_hi_us: float = 0.0
    compiler_us: float | None = None
    least_us: float = 0.0
    undercut: int = 0
    unclamped_us: float = 0.0
    clamped: int = 0
    worst: float = 1.0
    peak_memory_bytes: float = 0.0
    memory_source: str = ""
    fits: bool | None = None
    error: str = ""


def known_programs(names: Sequence[str]) -> dict[str, str]:
    """Select programs of the report by name; all if none is given.

    Raises:
        OpcastError: A name is unknown.
    """
    for name in names:
        if name not in PROGRAMS:
            choices = ", ".join(PROGRAMS)
            raise OpcastError(f"the report has no program {name!r}", hint=f"it has: {choices}")
    return {name: PROGRAMS[name] for name in names or PROGRAMS}


def rows(
    predictor: Predictor,
    programs: dict[str, str],
    devices: Sequence[DeviceSpec],
    lowering: str = "xla",
) -> Iterator[DeviceRow]:
    """Yield a row for each program and device."""
    for name, text in programs.items():
        source = build_program(text)
        for device in devices:
            yield device_row(predictor, name, source, device, lowering)


def build_program(text: str, **changed: Any) -> SourceProgram:
    """Build a program of the zoo.

    Args:
        text: Family and settings, as in :data:`PROGRAMS`.
        changed: Settings to take instead.
    """
    from ...datagen.zoo import build, parse_settings
    from ...features.ir.reader import read_program

    family, *pairs = text.split()
    settings = {**parse_settings(family, pairs), **changed}
    workload = build(family, **settings)
    # As a function, which each device lowers for its platform.
    return read_program(workload.jitted, *workload.abstract_args)


def device_row(
    predictor: Predictor,
    name: str,
    source: SourceProgram,
    device: DeviceSpec,
    lowering: str = "xla",
) -> DeviceRow:
    """Predict a program on a device; if that fails, the row holds the reason.

    Raises:
        CompilerStartError: The compiler is installed, but does not start.
    """
    from ...features.lowering.lower import lower

    start = time.perf_counter()
    try:
        lowered = lower(source, lowering, cache=predictor.cache, device=device)
    # A compiler that does not start would fail for every program: the report ends instead.
    except CompilerStartError:
        raise
    # A program that one device's compiler refuses is a row with a reason, not the end of a report.
    except LoweringError as error:
        return DeviceRow(name, device.name, error=error.what)
    seconds = time.perf_counter() - start
    return replace(figures(predictor, name, lowered, device), lower_s=seconds)


def figures(
    predictor: Predictor, name: str, lowered: LoweredProgram, device: DeviceSpec
) -> DeviceRow:
    """Predict a lowered program at all fidelities."""
    from ...features.table.roofline import least_seconds
    from ...models.program.schedule_cost import schedule_cost

    model = predictor.model_for(device)
    kernels = lowered.kernels
    learned = model.predict_kernels(kernels, device)
    by_model, program = model.predict_in_program(lowered, device, learned)
    # Per kernel: the roofline with L2, without launch, below which no implementation can be.
    least = least_seconds(kernels, device)
    takes = np.array([k.takes_time for k in kernels], bool)
    undercut = takes & (by_model.latency < least * (1 - ROUNDING))
    # Answers are clamped to physics; the unclamped estimates show the model's own.
    clamped = takes & (learned.estimate < least * (1 - ROUNDING))
    ratios = learned.estimate[clamped] / least[clamped]
    peak, memory = lowered.peak_memory_bytes, device.memory_bytes
    return DeviceRow(
        name,
        device.name,
        lowered.lowering,
        compile_s=lowered.compile_seconds,
        kernels=int(takes.sum()),
        executions=float(sum(k.multiplicity for k in kernels if k.takes_time)),
        roofline_us=_physics_us(predictor, lowered, device),
        learned_us=program.latency * 1e6,
        learned_lo_us=program.lo * 1e6,
        learned_hi_us=program.hi * 1e6,
        compiler_us=_compiler_us(predictor, lowered, device),
        # The same schedule with these times: a bound of the program that allows for all of its
        # overlap.
        least_us=schedule_cost(least, lowered, device).makespan * 1e6,
        undercut=int(undercut.sum()),
        unclamped_us=schedule_cost(learned.estimate, lowered, device).makespan * 1e6,
        clamped=int(clamped.sum()),
        worst=float(ratios.min(initial=1.0)),
        peak_memory_bytes=peak,
        memory_source=lowered.memory_source,
        fits=peak <= memory if memory else None,
    )


def _physics_us(
    predictor: Predictor,
    lowered: LoweredProgram,
    device: DeviceSpec,
    cycles: np.ndarray | None = None,
) -> float:
    """Program time in µs with rooflines for kernels, or with estimated cycles where there are."""
    from ...models.estimators.linear import RooflineEstimator

    prediction = RooflineEstimator().predict(lowered.kernels, device)
    if cycles is not None:
        # The compiler leaves some kernels without an estimate, zero cycles; those keep the
        # roofline.
        estimated = np.where(cycles > 0, cycles / device.clock_hz, prediction.latency)
        prediction = replace(prediction, latency=estimated)
    # Only the kernels differ: launches and overlap come from the learned prediction.
    program_model = predictor.model_for(device).program_model
    wall = program_model.predict(prediction.latency, lowered, device, prediction.lo, prediction.hi)
    return wall.latency * 1e6


def _compiler_us(predictor: Predictor, lowered: LoweredProgram, device: DeviceSpec) -> float | None:
    cycles = np.array([k.cycles for k in lowered.kernels], float)
    # Kernels carry cycles only where libtpu compiled them.
    if device.platform != "tpu" or not device.clock_hz or not cycles.any():
        return None
    return _physics_us(predictor, lowered, device, cycles)
