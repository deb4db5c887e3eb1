"""Compare predicted and measured times of fifteen programs on this machine.

    python tests/bench/check_machine.py [--budget 3m] [--out FOLDER]

First with the shipped model and this machine's probe alone, then calibrated; all programs are run
twice, and the difference of the two is the noise of the label, of programs and of their kernels.
Prints one line a program and the means. It takes about the budget and three minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import numpy as np
from machine_programs import write_programs
from rich.console import Console

from opcast.common.options import seconds_of
from opcast.models.cost_model import CostModel
from opcast.predict.program.predictor import load
from opcast.workflows.calibrate_by_measuring import run_calibrate_budget
from opcast.workflows.check import CheckResult, check_programs
from opcast.workflows.profile import local_now
from opcast.workflows.settings import CalibrateSettings


def figures(name: str, results: list[CheckResult]) -> dict[str, float]:
    """Print and return mean, median and largest error, coverage and kernels' median error."""
    errors = np.abs([r.error for r in results])
    found = {
        "mean": float(errors.mean()),
        "median": float(np.median(errors)),
        "largest": float(errors.max()),
        "bias": float(np.mean([r.error for r in results])),
        "inside": float(np.mean([r.inside for r in results])),
        "kernels": float(np.median(np.concatenate([r.kernel_errors for r in results]))),
    }
    print(f"{name}: " + ", ".join(f"{key} {value:.0%}" for key, value in found.items()), flush=True)
    return found


def kernel_noise(one: list[CheckResult], two: list[CheckResult]) -> float:
    """Median difference of two measurements of a kernel, as a share."""
    again = [
        abs(b.measured_us / a.measured_us - 1)
        for before, after in zip(one, two, strict=True)
        for a, b in zip(before.kernels, after.kernels, strict=True)
    ]
    return float(np.nanmedian(again))


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--out", type=Path, default=Path("machine-check"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    paths = write_programs(arguments.out / "programs")
    prior = load()
    local_now(prior.devices, print)
    before = check_programs(paths, prior)
    found = {"probe only": figures("probe only", before)}
    folder = arguments.out / "model"
    settings = CalibrateSettings("local", budget_s=seconds_of(arguments.budget), out=folder)
    run_calibrate_budget(Console(), settings)
    assert CostModel.load(folder).corrections
    after = check_programs(paths, load(folder))
    found["calibrated"] = figures("calibrated", after)
    again = np.array(
        [b.measured_us / a.measured_us - 1 for a, b in zip(before, after, strict=True)]
    )
    found["noise"] = {"mean": float(np.abs(again).mean()), "largest": float(np.abs(again).max())}
    found["noise"]["kernels"] = kernel_noise(before, after)
    print(
        "label noise: mean {mean:.0%}, largest {largest:.0%}, kernels {kernels:.0%}".format(
            **found["noise"]
        )
    )
    for one, two in zip(before, after, strict=True):
        print(
            f"{one.name:20s} measured {one.measured_us / 1e3:8.2f} and "
            f"{two.measured_us / 1e3:8.2f} ms, probe only {one.error:+.0%}, "
            f"calibrated {two.error:+.0%}"
        )
    (arguments.out / "figures.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
