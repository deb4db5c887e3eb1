"""Printed tables of the report on operators, and metric names for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ...common.tables_text import percent
from ...common.types import JsonMapping

if TYPE_CHECKING:
    from rich.console import Console

#: Figures of the printed tables: title, and the column of label noise to print with it.
FIGURES = {
    "mape": ("mean APE", "noise_mape"),
    "median_ape": ("median APE", "noise_median_ape"),
    "coverage": ("inside the 90 % interval", None),
}


def print_studies(console: Console, judged: pd.DataFrame, noise: pd.DataFrame) -> None:
    """Print the tables of every study, with errors in percent and the label noise."""
    from ...models.operators.studies import STUDIES

    for name, own in judged.groupby("study", sort=False):
        study = STUDIES[str(name)]
        # Calibrations of held-out chips, which have samples, are in separate tables.
        plain = own[own["samples"] == 0]
        column = "left_out" if study.leaves_out else "split"
        # Tensor-core tables have many dtypes and few devices, the others the reverse.
        finer = "device" if name == "estimators" else "dtype"
        for value, part in plain.groupby(column, sort=True):
            title = f"{study.title}: {value}"
            for figure in FIGURES:
                _print(console, title, part, ("key",), figure, noise)
            _print(console, title, part, ("key", finer), "mape", noise)
        if study.leaves_out:
            _print_samples(console, study.title, own)


def _print(
    console: Console,
    title: str,
    judged: pd.DataFrame,
    by: tuple[str, ...],
    figure: str,
    noise: pd.DataFrame,
) -> None:
    from ...models.operators.report import side_by_side
    from ...models.operators.studies import noise_table

    what, floor = FIGURES[figure]
    wide = side_by_side(judged, by, figure)
    if floor is not None:
        columns = [c for c in by if c in noise]
        floors = noise_table(noise, columns)[[*columns, floor]]
        # Left join, to keep families without repeated measurements.
        wide = wide.merge(floors.rename(columns={floor: "noise"}), how="left", on=columns)
    _show(console, percent(wide, (*by, "n")), f"{title}, {what} in %")


def _print_samples(console: Console, title: str, judged: pd.DataFrame) -> None:
    from ...models.operators.report import side_by_side

    by = ("left_out", "key", "estimator")
    wide = side_by_side(judged, by, "mape", "samples")
    _show(console, percent(wide, (*by, "n")), f"{title}, mean APE in % by samples")


def _show(console: Console, frame: pd.DataFrame, title: str) -> None:
    """Print a table below its title, which may be wider than the table."""
    from rich.text import Text

    from ...common.tables_text import print_frame

    console.print(Text.assemble("\n", (title, "italic")))
    print_frame(console, frame, "")


def metric_names(figures: pd.DataFrame) -> dict[str, float]:
    """Name figures for MLflow: ``study/left_out/split/family/samples/figure``."""
    metrics: dict[str, float] = {}
    for row in figures.to_dict("records"):
        words = [row["study"], row["left_out"], row["split"], row["key"]]
        words += [f"{row['samples']} samples"] if row["samples"] else []
        # Slashes separate the parts; MLflow does not allow plus signs.
        prefix = "/".join(str(w).replace("/", ".").replace("+", " ") for w in words if w)
        metrics |= {f"{prefix}/{name}": float(row[name]) for name in FIGURES}
    return metrics


def print_shipped(console: Console, methods: Sequence[str]) -> None:
    """Print the errors in the shipped model's manifest.

    These are the errors of the same settings fitted to split ``train``, and of each held-out chip.

    Args:
        console: Console to print to.
        methods: Measurement methods of the families to print.
    """
    from ...models.core.store import read_manifest
    from ...models.operators.report import metrics_of
    from ...predict.locate import OPERATOR_MODEL, find_model

    manifest = read_manifest(find_model(OPERATOR_MODEL))
    metrics = pd.DataFrame(metrics_of(manifest))
    if len(metrics):
        own = metrics[metrics["key"].str.split("/").str[0].isin(methods)]
        for split, part in own.groupby("split", sort=True):
            title = f"shipped model's settings, fitted to all rows of split train: {split}, in %"
            _show(console, percent(_by_dtype(part), ("key", "dtype", "n")), title)
    keys = [key for key in manifest["families"] if key.split("/")[0] in methods]
    title = "shipped model, each chip held out, mean APE in %"
    for method in methods:
        own_keys = [key for key in keys if key.startswith(f"{method}/")]
        errors = left_out_errors({key: manifest["families"][key] for key in own_keys})
        if len(errors):
            _show(console, percent(errors, ("key",)), f"{title}: {method}")


def left_out_errors(families: Mapping[str, JsonMapping]) -> pd.DataFrame:
    """Tabulate a manifest's mean errors on held-out chips, with a row per family."""
    rows = {
        key: {chip: errors["mape"] for chip, errors in data.get("left_out", {}).items()}
        for key, data in families.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table.rename_axis("key").reset_index() if table.size else pd.DataFrame()


def _by_dtype(figures: pd.DataFrame) -> pd.DataFrame:
    """Pool figures by family, and by dtype for families with several dtypes."""
    fine = pooled(figures, ("key", "dtype"))
    several = fine[fine["key"].duplicated(keep=False)]
    both = pd.concat([pooled(figures, ("key",)).assign(dtype="all"), several])
    return both[["key", "dtype", "n", "mape", "coverage"]].sort_values(["key", "dtype"])


def pooled(figures: pd.DataFrame, by: tuple[str, ...]) -> pd.DataFrame:
    """Pool mean APE and coverage over groups, weighted by ``n``."""
    sums = figures.assign(
        mape=figures["mape"] * figures["n"], coverage=figures["coverage"] * figures["n"]
    )
    totals = sums.groupby(list(by), sort=True)[["n", "mape", "coverage"]].sum().reset_index()
    return totals.assign(
        mape=totals["mape"] / totals["n"], coverage=totals["coverage"] / totals["n"]
    )
