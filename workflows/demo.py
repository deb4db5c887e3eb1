"""The demo: predict for absent chips, then calibrate to this machine, test and track."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..common.types import JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from ..predict.program.predictor import Predictor
    from .check import CheckResult

#: The training step that is predicted for absent chips.
STEP: tuple[str, JsonObject] = (
    "llama",
    {"layers": 4, "dim": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 16000,
     "seq": 256, "batch": 8, "dtype": "bf16", "mode": "train"},
)  # fmt: skip
#: Seconds for all compilers of the first section, seconds to reserve for each further chip, and
#: the minimum time limit of each compiler, after which the lowering ``fused`` is used.
COMPILE_S, RESERVE_S, LEAST_S = 60.0, 5.0, 15.0
#: Programs that are predicted and then run here; the calibration does not measure them.
PROGRAMS: tuple[tuple[str, JsonObject], ...] = (
    ("resnet", {"depth": 18, "width": 32, "image": 64, "batch": 8, "mode": "train"}),
    (
        "llama",
        {"layers": 3, "dim": 256, "heads": 8, "kv_heads": 4, "hidden": 704, "seq": 128, "batch": 2},
    ),
    ("lstm", {"batch": 16, "mode": "forward"}),
    (
        "unet",
        {"image": 32, "channels": 48, "levels": 3, "blocks": 1, "attention_levels": 1, "batch": 2},
    ),
    ("vit", {"layers": 6, "dim": 256, "heads": 4, "hidden": 1024, "image": 96, "batch": 4}),
)
#: Name under which the calibrated model is registered in MLflow.
REGISTERED = "opcast-demo"


def run_demo(console: Console, out: Path, budget_s: float) -> list[CheckResult]:
    """Run the demo in ``out``; an earlier calibration in the same folder is reused.

    Args:
        console: Console to print to.
        out: Folder for the page, the calibrated model and the programs.
        budget_s: Seconds to spend on the calibration.

    Returns:
        Predicted and measured times, one result per program.
    """
    from ..datagen.zoo import export
    from ..predict.devices import shown_devices
    from ..predict.program.predictor import load
    from .check import check_programs

    out.mkdir(parents=True, exist_ok=True)
    console.rule("1. a training step on absent chips")
    print_absent(console, load(), out)
    console.rule("2. calibrate the shipped model to this machine")
    predictor = load(calibrated(console, out / "model", budget_s))
    console.rule("3. predict unseen programs, then run them")
    # As files, so that readers can predict them again.
    paths = [out / f"{family}.mlir" for family, _ in PROGRAMS]
    for path, (family, sizes) in zip(paths, PROGRAMS, strict=True):
        export(family, sizes, path)
    results = check_programs(paths, predictor, progress=True)
    print_results(console, results)
    console.rule("4. in MLflow")
    run = track_checks(results, out / "model")
    console.print(f"run {run}, model {REGISTERED}; see them with: opcast ui")
    console.rule("5. next")
    # Not wrapped, so that they can be copied.
    for line in (
        f"your own step:  opcast predict your_module.py:step --device {shown_devices('demo')[0]}",
        f"on this machine: opcast check your_module.py:step --model {out / 'model'}",
    ):
        console.print(line, soft_wrap=True)
    return results


def print_absent(console: Console, predictor: Predictor, out: Path) -> None:
    """Predict :data:`STEP` for absent chips, and write the page of the first.

    Each chip's compiler makes the kernels if it is installed and fast enough; otherwise the
    lowering is ``fused``.
    """
    from ..common.files import write_text
    from ..common.progress import wrote
    from ..common.units import duration
    from ..datagen.zoo import export
    from ..features.devices.catalogue import find_device
    from ..features.ir.platforms import platform_of
    from ..features.lowering.options import LoweringOptions
    from ..features.lowering.target_compiler.process import CompileSettings
    from ..predict.devices import shown_devices
    from ..predict.page.report import ReportOptions, report_page

    family, sizes = STEP
    until = time.monotonic() + COMPILE_S
    absent = shown_devices("demo")
    for place, device in enumerate(absent):
        # JAX lowers a function differently for each platform.
        path = out / f"step-{device}.mlir"
        export(family, sizes, path, platform=platform_of(find_device(device)).name)
        # Later chips may use the time that earlier ones have left.
        others = RESERVE_S * (len(absent) - place)
        allowed = max(LEAST_S, until - time.monotonic() - others)
        limits = CompileSettings(timeout_s=allowed)
        p = predictor.predict(path, device=device, fallback="fused", settings=limits)
        console.print(
            f"{family} {sizes['mode']} step on {device}: {duration(p.latency_us)} "
            f"({duration(p.lo_us)}–{duration(p.hi_us)}), {len(p.kernels)} kernels, {p.lowering}"
        )
        if p.lowering == "fused":
            why = next((n for n in p.notes if n.startswith("lowering fused instead")), "")
            console.print(f"  {why or 'lowered by fused, not by the compiler'}")
        if device == absent[0]:
            lowering = LoweringOptions(p.lowering, device)
            options = ReportOptions(lowering, compare=(), title=f"{family} {sizes['mode']} step")
            page = out / "step.html"
            write_text(page, report_page(predictor, path, options))
            wrote(page, "page; open it in a browser")


def calibrated(console: Console, folder: Path, budget_s: float) -> Path:
    """Calibrate the shipped model into a folder unless it already holds one; return the folder."""
    import jax

    from ..common.errors import WorseModelError
    from ..models.cost_model import CostModel
    from ..predict.locate import find_model
    from .calibrate_by_measuring import run_calibrate_budget
    from .settings import CalibrateSettings

    if (folder / "manifest.json").is_file():
        console.print(f"using {folder}: delete it to calibrate again")
        return folder
    console.print("probing the machine (15 s), then measuring the most informative kernels")
    settings = CalibrateSettings("local", budget_s=budget_s, out=folder)
    try:
        rounds = run_calibrate_budget(console, settings, table=False)
    except WorseModelError as error:
        console.print(f"{error.what}: using the shipped model")
        CostModel.load(find_model(settings.model, jax.default_backend())).save(folder)
        return folder
    # In the first round nothing has been learned, so both errors are equal.
    later = rounds[1:]
    if later:
        before, after = (np.mean([getattr(r, name) for r in later]) for name in ("before", "error"))
        console.print(
            f"median error on kernels before learning them: {before:.0%} as shipped, "
            f"{after:.0%} calibrated"
        )
    return folder


def print_results(console: Console, results: list[CheckResult]) -> None:
    """Print a table of predicted and measured times of programs, and the mean error."""
    import pandas as pd

    from ..common.tables_text import print_frame
    from ..common.units import duration

    frame = pd.DataFrame(
        {
            "program": [r.name for r in results],
            "predicted": [duration(r.prediction.latency_us) for r in results],
            "90 % interval": [
                f"{duration(r.prediction.lo_us)}–{duration(r.prediction.hi_us)}" for r in results
            ],
            "measured": [duration(r.measured_us) for r in results],
            "error": [f"{r.error:+.0%}" for r in results],
            "inside": ["yes" if r.inside else "no" for r in results],
        }
    )
    print_frame(console, frame, "")
    errors = np.abs([r.error for r in results])
    console.print(
        f"mean absolute error {errors.mean():.0%}, largest {errors.max():.0%}, "
        f"{sum(r.inside for r in results)} of {len(results)} inside their interval"
    )
    # Notes repeat from program to program.
    for note in dict.fromkeys(n for r in results for n in r.prediction.notes):
        console.print(f"note: {note}", style="yellow")


def track_checks(results: list[CheckResult], model: Path) -> str:
    """Log predicted and measured times of programs, and register the model.

    Args:
        results: One result per program.
        model: Folder of the model that predicted them.

    Returns:
        The id of the MLflow run.
    """
    import pandas as pd

    from ..models.tracking.mlflow_store import RunLog, log_run

    table = pd.DataFrame(
        [
            {
                "program": r.name,
                "predicted_us": r.prediction.latency_us,
                "lo_us": r.prediction.lo_us,
                "hi_us": r.prediction.hi_us,
                "measured_us": r.measured_us,
                "error": r.error,
            }
            for r in results
        ]
    )
    kernels = pd.concat(
        [pd.DataFrame(r.to_dict()["kernels"]).assign(program=r.name) for r in results]
    )
    errors = np.abs(table["error"])
    run = RunLog(
        name="programs-unseen",
        params={"model": results[0].prediction.model, "device": results[0].prediction.device},
        metrics={
            "mape": float(errors.mean()),
            "median_ape": float(errors.median()),
            "coverage": float(np.mean([r.inside for r in results])),
        },
        tables={"programs": table, "kernels": kernels},
        model_dir=model,
    )
    return log_run(run, register=REGISTERED)
