"""Rows of the report on devices: zoo programs, lowered and predicted."""

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


#: Programs by name: zoo family and settings.
PROGRAMS: dict[str, str] = own_data("workflows/reports/reports.yaml")["devices"]
#: Relative tolerance for comparisons of sums in float64.
ROUNDING = 1e-9


@dataclass(frozen=True)
class DeviceRow:
    """Prediction of a program on a device.

    Attributes:
        program: Name of the program.
        device: Name of the device.
        lowering: ``xla``, ``fused`` or ``op``.
        lower_s: Seconds of this lowering; milliseconds if it was cached.
        compile_s: Seconds of the original compilation.
        kernels: Number of kernels that take time.
        executions: Number of their executions.
        roofline_us: Time of the program with kernels at the roofline.
        learned_us: Time of the program by the shipped model.
        learned_lo_us: Lower bound of its 90 % interval.
        learned_hi_us: Upper bound.
        compiler_us: Time of the program by the TPU compiler's estimates, and the roofline where it
            has none; ``None`` for other platforms.
        least_us: Physical lower bound of the time, without launch and dispatch.
        undercut: Number of kernels whose latency is below the physical bound.
        unclamped_us: Time of the program by the model's estimates before clamping to the bounds.
        clamped: Number of kernels whose estimate was clamped.
        worst: Smallest ratio of an estimate to its bound; 1 if none is below.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        fits: Whether the peak is within the device's memory; ``None`` if unknown.
        error: Reason for missing figures; empty if there are none.
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
    """Build a zoo program.

    Args:
        text: Family and settings, as in :data:`PROGRAMS`.
        changed: Settings to override.
    """
    from ...datagen.zoo import build, parse_settings
    from ...features.ir.reader import read_program

    family, *pairs = text.split()
    settings = {**parse_settings(family, pairs), **changed}
    workload = build(family, **settings)
    # A function, which is lowered for the platform of each device.
    return read_program(workload.jitted, *workload.abstract_args)


def device_row(
    predictor: Predictor,
    name: str,
    source: SourceProgram,
    device: DeviceSpec,
    lowering: str = "xla",
) -> DeviceRow:
    """Predict a program on a device; if that fails, the row contains the reason.

    Raises:
        CompilerStartError: The compiler is installed, but does not start.
    """
    from ...features.lowering.lower import lower

    start = time.perf_counter()
    try:
        lowered = lower(source, lowering, cache=predictor.cache, device=device)
    # Would fail for every program, so the report ends.
    except CompilerStartError:
        raise
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
    # Bound of each kernel: the roofline with L2, without launch.
    least = least_seconds(kernels, device)
    takes = np.array([k.takes_time for k in kernels], bool)
    undercut = takes & (by_model.latency < least * (1 - ROUNDING))
    # Predictions are clamped to the bounds, ``estimate`` is not.
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
        # The same schedule with the bounds of the kernels, so that it includes all overlap.
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
    """Program time in µs with kernels at the roofline, or at their estimated cycles."""
    from ...models.estimators.linear import RooflineEstimator

    prediction = RooflineEstimator().predict(lowered.kernels, device)
    if cycles is not None:
        # Kernels with zero cycles have no estimate.
        estimated = np.where(cycles > 0, cycles / device.clock_hz, prediction.latency)
        prediction = replace(prediction, latency=estimated)
    # Launches and overlap are those of the learned prediction.
    program_model = predictor.model_for(device).program_model
    wall = program_model.predict(prediction.latency, lowered, device, prediction.lo, prediction.hi)
    return wall.latency * 1e6


def _compiler_us(predictor: Predictor, lowered: LoweredProgram, device: DeviceSpec) -> float | None:
    cycles = np.array([k.cycles for k in lowered.kernels], float)
    # Only libtpu estimates cycles.
    if device.platform != "tpu" or not device.clock_hz or not cycles.any():
        return None
    return _physics_us(predictor, lowered, device, cycles)
