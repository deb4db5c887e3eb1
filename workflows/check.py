"""Compare predictions with a run on this machine, and with the TPU compiler's estimates."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DeviceError, ProfileError
from ..common.types import JsonObject
from ..features.devices.identity import anchors_of, compare_anchors, with_speed

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.devices.device import DeviceSpec
    from ..features.kernels.kernel import Kernel, LoweredProgram
    from ..predict.program.predictor import KernelEstimate, Prediction, Predictor

#: Seconds of whole executions of each program; long enough to average over the speeds of a shared
#: processor, which alternate within seconds. Engineering estimate.
_WALL_SECONDS = 2.0
#: Ratio of a run to the sum of its kernels from which the gap is reported. Normally gaps between
#: kernels, and kernels without a trace event, take less than half of a program.
_BUSY = 1.5


@dataclass(frozen=True)
class CheckedKernel:
    """Prediction and measurement of a kernel; times of one execution in µs.

    Attributes:
        name: Instruction name.
        kind: Kind of kernel.
        runs: Executions per program run.
        predicted_us: Prediction.
        lo_us: Lower bound of its interval.
        hi_us: Upper bound of its interval.
        measured_us: Median of the executions; nan if the trace has no event for it.
        origin: Main StableHLO op and source line that it came from.
    """

    name: str
    kind: str
    runs: float
    predicted_us: float
    lo_us: float
    hi_us: float
    measured_us: float
    origin: str


@dataclass(frozen=True)
class CheckResult:
    """Prediction and measurement of a program.

    Attributes:
        name: Name of the program.
        prediction: Prediction of the program.
        measured_us: Median wall time of one run.
        p10_us: 10th percentile of the wall time.
        p90_us: 90th percentile of the wall time.
        kernels: Kernels in schedule order.
        speed: Present speed of the machine relative to its measurement, by class of work; empty if
            it is unchanged.
    """

    name: str
    prediction: Prediction
    measured_us: float
    p10_us: float
    p90_us: float
    kernels: tuple[CheckedKernel, ...]
    speed: Mapping[str, float] = field(default_factory=dict)

    @property
    def inside(self) -> bool:
        """Whether the measured time is inside the predicted interval."""
        return self.prediction.lo_us <= self.measured_us <= self.prediction.hi_us

    @property
    def error(self) -> float:
        """Relative error of the whole program: ``(predicted - measured) / measured``."""
        return self.prediction.latency_us / self.measured_us - 1.0

    @property
    def kernel_errors(self) -> np.ndarray:
        """Absolute relative errors of the measured kernels."""
        # The reshape keeps two columns where there are no kernels.
        pairs = np.array([(k.predicted_us, k.measured_us) for k in self.kernels]).reshape(-1, 2)
        known = pairs[np.isfinite(pairs[:, 1])]
        return np.asarray(np.abs(known[:, 0] / known[:, 1] - 1.0))

    def to_dict(self) -> JsonObject:
        """Convert to the output of ``opcast check --json``; missing measurements are null."""
        return {
            "name": self.name,
            "device": self.prediction.device,
            "model": self.prediction.model,
            "predicted_us": self.prediction.latency_us,
            "lo_us": self.prediction.lo_us,
            "hi_us": self.prediction.hi_us,
            "measured_us": self.measured_us,
            "p10_us": self.p10_us,
            "p90_us": self.p90_us,
            "error": self.error,
            "speed": dict(self.speed),
            "notes": list(self.prediction.notes),
            "kernels": [
                # JSON has no NaN.
                {name: None if value != value else value for name, value in asdict(k).items()}
                for k in self.kernels
            ],
        }


def check_programs(
    programs: Sequence[Path | str], predictor: Predictor, *, progress: bool = False
) -> list[CheckResult]:
    """Predict programs, run them on the local device like the profiler, and compare.

    Anchors are measured before and after the programs. If the machine's speed has changed since it
    was described, predictions are scaled by class of work, intervals cover both speeds, and a note
    reports it (``features/devices/identity.py``).

    Args:
        programs: Paths of StableHLO programs.
        predictor: Loaded model, which must include the local device.
        progress: Whether to show the progress of measuring.

    Raises:
        OpcastError: A program cannot be read, compiled or run, or the device is unknown.
    """
    from ..datagen.profile.anchors import READINGS, present_anchors, typical
    from ..datagen.profile.plan import ProfileSettings
    from ..datagen.profile.profile import profile
    from ..features.dataset import Dataset
    from ..features.ir.reader import read_program
    from ..features.lowering.lower import lower
    from ..predict.devices import resolve_device

    device = resolve_device("local", predictor.model.devices)
    # Lowered by this machine's compiler, so that the kernels are those of the run.
    lowered = [lower(read_program(Path(p)), cache=predictor.cache) for p in programs]
    # Half of the readings before and half after, as for the probe. A machine whose measurement has
    # no anchors cannot be compared.
    then = anchors_of(device)
    anchors = [present_anchors(READINGS // 2)] if then else []
    with tempfile.TemporaryDirectory(prefix="opcast-check-") as scratch:
        profile(
            scratch,
            # No waiting for a quiet machine, because the anchors record its speed.
            ProfileSettings(replicate_share=0.0, wall_s=_WALL_SECONDS, patience=0.0),
            sources=[Path(p) for p in programs],
            device_spec=device,
            progress=progress,
        )
        _raise_failures(Path(scratch))
        frame = Dataset.load(scratch).frame
    if then:
        anchors.append(present_anchors(READINGS // 2))
    speed = compare_anchors(typical(anchors), then)
    now = with_speed(device, speed)
    predictions = [predictor.predict_lowered(low, now) for low in lowered]
    return [
        replace(_compare(Path(program), low, prediction, frame), speed=speed.ratios)
        for program, low, prediction in zip(programs, lowered, predictions, strict=True)
    ]


def _raise_failures(folder: Path) -> None:
    """Raise the first failure that a profile run recorded, which the profiler only skips."""
    failures = folder / "failures.jsonl"
    if failures.is_file():
        first = json.loads(failures.read_text().splitlines()[0])
        raise ProfileError(str(first["reason"]), where=str(first["program"]))


def _compare(
    path: Path, lowered: LoweredProgram, prediction: Prediction, frame: pd.DataFrame
) -> CheckResult:
    # The profiler's name of a program given by path.
    own = frame[frame["program"] == f"given-{path.stem}"]
    wall = own[own["level"] == "program"].iloc[0]
    kernels = own[own["level"] != "program"]
    # By content rather than name, because equal kernels share a row.
    label = dict(zip(kernels["kernel_hash"], kernels["latency_us_p50"], strict=True))
    pairs = zip(lowered.kernels, prediction.kernels, strict=True)
    return CheckResult(
        name=path.stem,
        prediction=prediction,
        measured_us=float(wall["latency_us_p50"]),
        p10_us=float(wall["latency_us_p10"]),
        p90_us=float(wall["latency_us_p90"]),
        kernels=tuple(_checked(k, p, float(label.get(k.hash, math.nan))) for k, p in pairs),
    )


def _checked(kernel: Kernel, predicted: KernelEstimate, measured_us: float) -> CheckedKernel:
    from ..predict.program.prediction import origin

    return CheckedKernel(
        name=kernel.name,
        kind=kernel.kind,
        runs=kernel.multiplicity,
        predicted_us=predicted.latency_us,
        lo_us=predicted.lo_us,
        hi_us=predicted.hi_us,
        measured_us=measured_us,
        origin=origin(predicted),
    )


def print_check(console: Console, result: CheckResult, top: int = 10) -> None:
    """Print predictions beside measurements, for the costliest kernels and the program."""
    from rich.text import Text

    from ..common.units import duration
    from ..predict.render.parts import Compared, compared_table, compared_total, print_notes

    timed = [k for k in result.kernels if np.isfinite(k.measured_us)]
    # Sorted by measured time, so that badly underestimated kernels are shown.
    rows = [
        Compared(k.predicted_us, k.lo_us, k.hi_us, k.measured_us, k.runs, k.kind, k.name, k.origin)
        for k in sorted(timed, key=lambda k: -k.measured_us * k.runs)[:top]
    ]
    table = compared_table(console.width, rows, "measured", "kernel")
    p = result.prediction
    console.print(Text.assemble((result.name, "bold"), f" on {p.device}"))
    console.print(table)
    errors = result.kernel_errors
    if len(errors):
        console.print(
            f"{len(errors)} kernels measured, median absolute error {np.median(errors):.0%}"
        )
    total = Compared(p.latency_us, p.lo_us, p.hi_us, result.measured_us)
    span = f" ({duration(result.p10_us)}–{duration(result.p90_us)})"
    console.print(compared_total(total, "measured", span))
    print_notes(console, [*p.notes, *_beyond_kernels(result)])


def _beyond_kernels(result: CheckResult) -> list[str]:
    """Warn if a run took much longer than the sum of its kernels."""
    inside = sum(k.measured_us * k.runs for k in result.kernels if np.isfinite(k.measured_us))
    if not result.kernels or result.measured_us < _BUSY * inside:
        return []
    factor = result.measured_us / inside if inside else math.inf
    return [
        f"a run took {factor:.1f} times as long as the sum of its kernels: other work on the "
        "machine slowed it down, or the program waits for its host; check again"
    ]


@dataclass(frozen=True)
class Agreement:
    """Compiler's estimates and predictions of a program; sums are over all executions.

    Attributes:
        program: Name of the program's file.
        device: Name of the device.
        kernels: Number of kernels that take time.
        unestimated: Number of those without an estimate by the compiler.
        compiler_us: Sum of the compiler's estimates.
        predicted_us: Sum of the predictions for the kernels with an estimate.
        left_us: Sum of the predictions for the kernels without one.
        step_us: Predicted time of the program, with overlap of its asynchronous copies.
        compiler_step_us: The same with the compiler's estimates, and rooflines where it has none.
        fused_step_us: The same with the lowering ``fused``, which runs no compiler; ``None`` if the
            program is already compiled.
        compile_s: Seconds of the compilation.
        predict_s: Seconds of the prediction.
    """

    program: str
    device: str
    kernels: int
    unestimated: int
    compiler_us: float
    predicted_us: float
    left_us: float
    step_us: float
    compiler_step_us: float
    fused_step_us: float | None
    compile_s: float
    predict_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted sum."""
        return self.predicted_us / self.compiler_us - 1.0


def agreement(program: Path, device: DeviceSpec, predictor: Predictor) -> Agreement:
    """Compile a program for a TPU and predict the same kernels.

    Raises:
        DeviceError: The device is not a TPU.
        OpcastError: The program cannot be read or compiled.
    """
    from ..features.ir.reader import read_program
    from ..features.lowering.lower import lower
    from ..predict.program.predictor import load

    if device.platform != "tpu":
        raise DeviceError(
            "is not a TPU: only the TPU compiler estimates times of kernels", where=device.name
        )
    source = read_program(program)
    lowered = lower(source, "xla", cache=predictor.cache, device=device)
    start = time.perf_counter()
    prediction = predictor.predict_lowered(lowered, device)
    seconds = time.perf_counter() - start
    rows = [
        # libtpu's ``estimated_cycles`` are in cycles of the device's clock.
        (k.cycles / device.clock_hz * 1e6 * k.multiplicity, e.latency_us * k.multiplicity)
        for k, e in zip(lowered.kernels, prediction.kernels, strict=True)
        if k.takes_time
    ]
    fused = None
    # Optimised HLO is already fused.
    if not source.program.is_scheduled:
        fused = predictor.predict(source, device=device, lowering="fused").latency_us
    return Agreement(
        program=program.stem,
        device=device.name,
        kernels=len(rows),
        unestimated=sum(not expected for expected, _ in rows),
        compiler_us=sum(expected for expected, _ in rows),
        predicted_us=sum(own for expected, own in rows if expected),
        left_us=sum(own for expected, own in rows if not expected),
        step_us=prediction.latency_us,
        compiler_step_us=load("compiler").predict_lowered(lowered, device).latency_us,
        fused_step_us=fused,
        compile_s=lowered.compile_seconds,
        predict_s=seconds,
    )


def print_agreement(console: Console, agreements: Sequence[Agreement]) -> None:
    """Print a table of programs, and the mean and largest errors."""
    from ..common.tables_text import print_frame

    rows: list[dict[str, object]] = []
    for own in agreements:
        fused = "–" if own.fused_step_us is None else own.fused_step_us
        rows.append({**asdict(own), "fused_step_us": fused, "error": f"{own.error:+.1%}"})
    print_frame(console, pd.DataFrame(rows), "the compiler's estimates (nothing is measured)")
    errors = [abs(own.error) for own in agreements]
    console.print(
        f"sums over programs: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    )
