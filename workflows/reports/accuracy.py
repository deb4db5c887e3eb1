"""The report on accuracy: every model on every split of a dataset, and whole programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ...common.paths import PACKAGE
from ...common.tables_text import print_frame, print_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import AccuracyReportSettings


#: The dataset that comes with the repository.
COMMITTED = PACKAGE / "datagen" / "datasets" / "cpu"


def run_accuracy_report(console: Console, settings: AccuracyReportSettings) -> None:
    """Print every model on every split, and programs of held-out families."""
    from ...features.dataset import Dataset
    from ...models.training.train import compare_models, program_report
    from ...models.training_data.prepared import prepare

    dataset = Dataset.load(*(settings.data or [COMMITTED]))
    prepared = prepare(dataset)
    console.print(
        f"dataset {prepared.dataset_hash}: {len(dataset)} samples of {', '.join(dataset.devices)}"
    )
    kernels = compare_models(prepared, n_jobs=settings.threads)
    print_metrics(console, kernels, "kernels")
    if "program_n" in kernels:
        # Splits by kernel put parts of one program on both sides, so these have no whole programs.
        own = kernels[kernels["program_n"].notna()].filter(regex="^(split|model|program_.*)$")
        own = own.rename(columns=lambda name: name.removeprefix("program_"))
        print_metrics(console, own, "whole programs in the test part of a split")
    programs = program_report(prepared, n_jobs=settings.threads)
    print_metrics(console, programs.metrics, "whole programs, their families held out in turn")
    print_frame(console, programs.families, "by family")
    shown = programs.programs
    if len(shown):
        for name, part in shown.groupby("set"):
            # How far labels of single kernels explain wall time at all: a ratio away from 1 bounds
            # what any sum of kernels can reach.
            ratio = (part["labels_us"] / part["measured_us"]).dropna()
            console.print(
                f"measured kernels add up to {ratio.median():.2f} of the measured wall time "
                f"(median of {len(ratio)} {name} programs; 10 % below {ratio.quantile(0.1):.2f}, "
                f"10 % above {ratio.quantile(0.9):.2f})"
            )
        zoo = shown[shown["set"] == "zoo"].sort_values("measured_us")
        columns = ["family", "measured_us", "predicted_us", "sum_us", "kernels", "error"]
        print_frame(console, zoo[columns], "each program of the zoo")
    if settings.out is not None:
        from ...common.files import write_text
        from ...common.progress import wrote

        tables = {"kernels": kernels, "programs": programs.metrics, "each": programs.programs}
        data_out = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        write_text(settings.out, json.dumps(data_out, indent=1))
        wrote(settings.out, "figures")
