"""Compare the TPU compiler's estimates of whole programs with a model's predictions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ...common.errors import DeviceError

if TYPE_CHECKING:
    from rich.console import Console

    from ...features.devices.device import DeviceSpec
    from ...predict.program.predictor import Predictor


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
    from ...features.ir.reader import read_program
    from ...features.lowering.lower import lower
    from ...predict.program.predictor import load

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
    from ...common.tables_text import print_frame

    rows: list[dict[str, object]] = []
    for own in agreements:
        fused = "–" if own.fused_step_us is None else own.fused_step_us
        rows.append({**asdict(own), "fused_step_us": fused, "error": f"{own.error:+.1%}"})
    print_frame(console, pd.DataFrame(rows), "the compiler's estimates (nothing is measured)")
    errors = [abs(own.error) for own in agreements]
    console.print(
        f"sum of a program: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    )
