"""Reports on accuracy: models on splits of a dataset, and errors by device.

The support report lists the measurements that exist for each device, and the errors of the shipped
models on them. It reads only the files of the models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ...common.files import own_data, read_json, write_text
from ...common.paths import PACKAGE
from ...common.progress import wrote
from ...common.tables_text import markdown_table, print_frame, print_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import AccuracyReportSettings, SupportReportSettings

#: The dataset of the repository.
COMMITTED = PACKAGE / "datagen" / "datasets" / "cpu"
#: Columns of the support table, and the text above it.
_SUPPORT = own_data("workflows/reports/reports.yaml")["support"]
#: Marks a kind of prediction with training data from the device.
LEARNED = "yes"


def run_accuracy_report(console: Console, settings: AccuracyReportSettings) -> None:
    """Print the errors of every model on every split, and of programs of held-out families."""
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
        # Splits by kernel divide programs, so they have no whole programs to test on.
        own = kernels[kernels["program_n"].notna()].filter(regex="^(split|model|program_.*)$")
        own = own.rename(columns=lambda name: name.removeprefix("program_"))
        print_metrics(console, own, "whole programs in the test part of a split")
    programs = program_report(prepared, n_jobs=settings.threads)
    print_metrics(console, programs.metrics, "whole programs, their families held out in turn")
    print_frame(console, programs.families, "by family")
    shown = programs.programs
    if len(shown):
        for name, part in shown.groupby("set"):
            # A ratio that differs from 1 limits the accuracy of any sum of kernels.
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
        tables = {"kernels": kernels, "programs": programs.metrics, "each": programs.programs}
        data_out = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        write_text(settings.out, json.dumps(data_out, indent=1))
        wrote(settings.out, "figures")


def support_table() -> pd.DataFrame:
    """Tabulate devices of the catalogue by kind of prediction.

    Cells of operators are the mean error in percent on unseen shapes of the device (split ``val``,
    with the same settings fitted without it), followed in brackets by that with the chip held out.
    Other cells are :data:`LEARNED` if there are training data from the device, else empty.
    """
    from ...features.devices.catalogue import device_names
    from ...models.core.registry import OPERATOR_MODEL, PRETRAINED
    from ...models.core.store import read_manifest
    from ...models.operators.report import metrics_of

    manifest = read_manifest(PRETRAINED / OPERATOR_MODEL)
    seen = pd.DataFrame(metrics_of(manifest)).query("split == 'val' and scope == 'known'")
    unseen = pd.DataFrame(
        {"key": key, "device": device, "n": errors["rows"], "mape": errors["mape"]}
        for key, family in manifest["families"].items()
        for chip, errors in family.get("left_out", {}).items()
        for device in chip.split("+")
    )
    learned = {
        kind: set(_devices(PRETRAINED / f for f in files))
        for kind, files in _SUPPORT["others"].items()
    }
    rows = []
    for device in device_names():
        cells = {
            kind: _errors(seen, unseen, device, tuple(ends))
            for kind, ends in _SUPPORT["operators"].items()
        }
        cells |= {kind: LEARNED * (device in devices) for kind, devices in learned.items()}
        rows.append({"device": device, **cells})
    return pd.DataFrame(rows)


def _devices(files: Iterable[Path]) -> Iterable[str]:
    for file in files:
        data = read_json(file)
        yield from data.get("provenance", data)["devices"]


def _errors(seen: pd.DataFrame, unseen: pd.DataFrame, device: str, ends: tuple[str, ...]) -> str:
    def mean(table: pd.DataFrame) -> float:
        own = table[(table["device"] == device) & table["key"].str.endswith(ends)]
        return float(100 * (own["mape"] * own["n"]).sum() / own["n"].sum()) if len(own) else 0.0

    known, left_out = mean(seen), mean(unseen)
    return (f"{known:.1f}" * (known > 0) + f" ({left_out:.0f})" * (left_out > 0)).strip()


def markdown(table: pd.DataFrame) -> str:
    """Format the page: a row for each measured device, and the others in one line."""
    measured = _measured(table)
    device, *others = table.columns
    lines = [
        _SUPPORT["head"],
        *markdown_table([device, *others], measured.itertuples(index=False), others),
    ]
    rest = table["device"][~table.index.isin(measured.index)]
    return "\n".join([*lines, "", f"Known only from data sheets: {', '.join(rest)}.", ""])


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table.drop(columns="device") != "").any(axis=1)]


def run_support_report(console: Console, settings: SupportReportSettings) -> None:
    """Print the support table, and write the page."""
    table = support_table()
    print_frame(console, _measured(table), "mean error in %, in brackets with the chip held out")
    if settings.out is not None:
        write_text(settings.out, markdown(table))
        wrote(settings.out, f"{len(table)} devices")
