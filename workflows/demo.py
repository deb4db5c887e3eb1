"""The demonstration: profile this machine, train, predict unseen programs, run them, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console

    from .check import CheckResult

#: Programs that the demo predicts and then runs; the demo measures no program of their families.
PROGRAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet", {"depth": 18, "width": 32, "image": 64, "batch": 8, "mode": "train"}),
    (
        "llama",
        {"layers": 3, "dim": 256, "heads": 8, "kv_heads": 4, "hidden": 704, "seq": 128, "batch": 2},
    ),
    ("lstm", {"batch": 16, "mode": "forward"}),
)
#: Devices that are not attached, for which the first program is predicted as well.
ABSENT = ("a100-sxm-80gb", "h100-sxm", "tpu-v5e")
#: Single ops and random programs only: every family of the zoo stays unseen.
MIX = {"op": 0.5, "random": 0.5}


def run_demo(console: Console, out: Path, budget_s: float) -> list[CheckResult]:
    """Run the whole demonstration in ``out``; a second call resumes measuring.

    Args:
        console: Console to print to.
        out: Folder for the dataset, the model and the programs.
        budget_s: Seconds to measure.

    Returns:
        Predicted and measured times, one result per program.
    """
    from ..datagen.profile.profile import profile
    from ..datagen.zoo import export
    from ..features.dataset import Dataset
    from ..models.tracking.mlflow_store import runs, store_uri
    from ..predict.program.predictor import load
    from .check import check_programs, print_check
    from .settings import TrainSettings
    from .train_kernels import run_train

    data, model = out / "dataset", out / "model"
    console.rule("1. measure this machine")
    profile(data, budget_s=budget_s, mix=MIX)
    console.rule("2. train")
    # The split only serves the printed figures; the model saved is fitted to all rows.
    settings = TrainSettings([data], "xgboost", "random", out=model, threads=2, final=True)
    run_train(console, Dataset.load(data), settings)
    console.rule("3. predict programs that the model has never seen, then run them")
    predictor = load(model)
    # Kept as files, so that the reader can predict them again by hand.
    paths = [out / f"{family}.mlir" for family, _ in PROGRAMS]
    for path, (family, sizes) in zip(paths, PROGRAMS, strict=True):
        export(family, sizes, path)
    results = check_programs(paths, predictor, progress=True)
    for result in results:
        print_check(console, result, top=6)
        console.print()
    errors = np.abs([r.error for r in results])
    console.rule("4. in MLflow")
    track_checks(results)
    console.print(f"{len(runs())} runs in {store_uri()}; see them with: opcast ui", highlight=False)
    console.print(
        f"programs: mean absolute error {errors.mean():.0%}, largest {errors.max():.0%}",
        highlight=False,
    )
    console.rule("5. the first program on chips that are not here")
    print_absent(console, paths[0])
    return results


def print_absent(console: Console, program: Path) -> None:
    """Print a program's predicted time on :data:`ABSENT`, by the models that come with opcast.

    The chip's own compiler makes the kernels where it is installed, else opcast's own rules.
    """
    from ..common.units import duration
    from ..predict.program.predictor import load

    predictor = load()
    for device in ABSENT:
        p = predictor.predict(program, device=device)
        span = f"{duration(p.lo_us)} to {duration(p.hi_us)}"
        console.print(
            f"{program.stem} on {device}: {duration(p.latency_us)} ({span}), "
            f"{len(p.kernels)} kernels, lowering {p.lowering}, model {p.model}",
            highlight=False,
        )


def track_checks(results: list[CheckResult]) -> str:
    """Log predicted and measured times of programs to MLflow; returns the run's id."""
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
        metrics={"mape": float(errors.mean()), "median_ape": float(errors.median())},
        tables={"programs": table, "kernels": kernels},
    )
    return log_run(run)
