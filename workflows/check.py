"""Compare predicted times with those of a run on this machine, and with the TPU compiler's."""

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

#: Seconds of whole executions of each program, so many that the two speeds of a shared processor,
#: which alternate within seconds, average out. Engineering estimate.
_WALL_SECONDS = 2.0
#: Factor between a run and the sum of its kernels from which the gap is reported: what the CPU
#: adds between kernels, and kernels without an event of their own, are below half of a program.
_BUSY = 1.5


@dataclass(frozen=True)
class CheckedKernel:
    """A kernel's prediction beside its measurement; microseconds of one execution.

    Attributes:
        name: Instruction name.
        kind: Kind of kernel.
        runs: Executions per program run.
        predicted_us: Prediction.
        lo_us: Lower end of its interval.
        hi_us: Upper end of its interval.
        measured_us: Median of the executions; nan if the trace had no event for it.
        origin: StableHLO op and source line that it mainly came from.
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
    """A program's prediction beside its measurement.

    Attributes:
        name: Name of the program.
        prediction: Prediction of the program.
        measured_us: Median wall time of one run.
        p10_us: 10th percentile of the wall time.
        p90_us: 90th percentile of the wall time.
        kernels: Kernels in schedule order.
        speed: Present speed of the machine relative to its measurement, by class of work; empty
            where it runs as it did.
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
        """``(predicted - measured) / measured`` of the whole program."""
        return self.prediction.latency_us / self.measured_us - 1.0

    @property
    def kernel_errors(self) -> np.ndarray:
        """Absolute relative errors of the kernels that have a label."""
        # The reshape keeps two columns where there are no kernels.
        pairs = np.array([(k.predicted_us, k.measured_us) for k in self.kernels]).reshape(-1, 2)
        known = pairs[np.isfinite(pairs[:, 1])]
        return np.asarray(np.abs(known[:, 0] / known[:, 1] - 1.0))

    def to_dict(self) -> JsonObject:
        """Plain data, as ``opcast check --json`` prints it; a missing label is null."""
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
    """Predict programs, run them on the local device as the profiler does, and compare.

    Anchors are measured beside the programs. If the machine runs at another speed than when it was
    described, predictions are scaled by class of work, intervals hold both speeds, and a note says
    so (``features/devices/identity.py``).

    Args:
        programs: Paths of StableHLO programs.
        predictor: Loaded model; it must have the local device.
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
    # Lowered natively: these are the kernels that the run below executes, so they pair one to one.
    lowered = [lower(read_program(Path(p)), cache=predictor.cache) for p in programs]
    # As beside the probe: half of the readings before and half after, with nothing left out. Only a
    # machine that was measured together with its anchors can be compared with itself.
    then = anchors_of(device)
    anchors = [present_anchors(READINGS // 2)] if then else []
    # A separate dataset: only the comparison needs the profiler's rows.
    with tempfile.TemporaryDirectory(prefix="opcast-check-") as scratch:
        profile(
            scratch,
            # The machine is measured as it is: the anchors show how fast that was.
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
    """Raise the first failure that a profile run has recorded."""
    failures = folder / "failures.jsonl"
    if failures.is_file():
        # The profiler skips a program that fails; here it is the only one that matters.
        first = json.loads(failures.read_text().splitlines()[0])
        raise ProfileError(str(first["reason"]), where=str(first["program"]))


def _compare(
    path: Path, lowered: LoweredProgram, prediction: Prediction, frame: pd.DataFrame
) -> CheckResult:
    # The profiler names programs given by path like this.
    own = frame[frame["program"] == f"given-{path.stem}"]
    wall = own[own["level"] == "program"].iloc[0]
    kernels = own[own["level"] != "program"]
    # By content, not by name: equal kernels of a program share one row and its label.
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
    """Print the kernels that took most time, and the total, predicted beside measured."""
    from rich.text import Text

    from ..common.units import duration
    from ..predict.render.parts import Compared, compared_table, compared_total, print_notes

    timed = [k for k in result.kernels if np.isfinite(k.measured_us)]
    # By measured time: a kernel that the model underestimates badly must not drop off the list.
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
    """Warn if a run took much longer than the kernels that were measured one by one."""
    inside = sum(k.measured_us * k.runs for k in result.kernels if np.isfinite(k.measured_us))
    if not result.kernels or result.measured_us < _BUSY * inside:
        return []
    factor = result.measured_us / inside if inside else math.inf
    return [
        f"a run took {factor:.1f} times the sum of its kernels, each measured alone: other work on "
        "the machine, or a slower spell of it, unless the program waits for its host; check again"
    ]


@dataclass(frozen=True)
class Agreement:
    """A program on a device; sums run over executions, with loops multiplied out.

    Attributes:
        program: Name of the program's file.
        device: Name of the device.
        kernels: Number of kernels that take time.
        unestimated: Of those, how many have no estimate from the compiler.
        compiler_us: Sum of the compiler's estimates over the kernels that have one.
        predicted_us: Sum of the predictions for the same kernels.
        left_us: Sum of the predictions for the others, which are never free.
        step_us: Predicted time of the whole program, its asynchronous copies beside the rest.
        compiler_step_us: The same of the compiler's estimates, rooflines where it has none.
        fused_step_us: The same of kernels by the lowering ``fused``, for which nothing is compiled;
            none if the program is compiled already.
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
            "is not a TPU: only a TPU's compiler estimates how long kernels take", where=device.name
        )
    source = read_program(program)
    lowered = lower(source, "xla", cache=predictor.cache, device=device)
    # The prediction alone: the compilation has its own figure, from when it was made.
    start = time.perf_counter()
    prediction = predictor.predict_lowered(lowered, device)
    seconds = time.perf_counter() - start
    rows = [
        # libtpu's ``estimated_cycles`` count the device's clock.
        (k.cycles / device.clock_hz * 1e6 * k.multiplicity, e.latency_us * k.multiplicity)
        for k, e in zip(lowered.kernels, prediction.kernels, strict=True)
        if k.takes_time
    ]
    fused = None
    # Optimised HLO has been fused already, so there is no StableHLO left to fuse again.
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
    """Print programs as a table, then the errors of all."""
    from ..common.tables_text import print_frame

    rows: list[dict[str, object]] = []
    for own in agreements:
        fused = "–" if own.fused_step_us is None else own.fused_step_us
        rows.append({**asdict(own), "fused_step_us": fused, "error": f"{own.error:+.1%}"})
    print_frame(console, pd.DataFrame(rows), "the compiler's estimates (nothing is measured)")
    errors = [abs(own.error) for own in agreements]
    console.print(
        f"sum of a program: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    )
