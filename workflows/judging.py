"""Evaluate predictions of measured cases: errors by group, coverage, and choice of plans."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.files import write_text
from ..common.parquet import write_table
from ..common.progress import wrote
from ..common.tables_text import in_percent, print_frame
from ..models.tracking.mlflow_store import RunLog, tidy
from ..models.tracking.tracked_runs import TrackedRun
from ..predict.page.accuracy import SCRIPTS, run_data
from ..predict.page.assemble import Page, assemble
from .training import digests, log_training

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.core.store import JsonModel
    from .settings import TableSettings

#: Figures of a group of :func:`measured_rows`, for ``DataFrameGroupBy.agg``.
FIGURES = {
    "rows": ("error", "size"),
    "mape": ("error", "mean"),
    "median_ape": ("error", "median"),
    "bias": ("log", lambda logs: float(np.expm1(logs.median()))),
    "coverage": ("inside", "mean"),
}
#: The same with the width of the intervals.
WIDTHS = {**FIGURES, "width": ("width", "median")}
#: Folds of cross-validation over rows.
FOLDS = 5
#: Minimum number of plans to compare.
LEAST_PLANS = 3


@dataclass(frozen=True)
class Judged:
    """Figures on predicted cases.

    Attributes:
        by_group: Errors by group.
        overall: Means over groups, unweighted.
        choice: Regret and rank correlation of each set of plans, from :func:`choice`.
    """

    by_group: pd.DataFrame
    overall: dict[str, float]
    choice: pd.DataFrame

    def choice_sentence(self, what: str) -> list[str]:
        """Describe how well plans are chosen; empty if none were compared."""
        o = self.overall
        if not len(self.choice):
            return []
        return [
            f"{what}: regret {100 * o['regret_median']:.1f} % (median), "
            f"{100 * o['regret_mean']:.1f} % (mean), Kendall's tau {o['kendall_tau']:.2f}"
        ]


def measured_rows(
    frame: pd.DataFrame,
    predicted: str = "latency_us",
    measured: str = "measured_us",
    ends: tuple[str, str] = ("lo_us", "hi_us"),
) -> pd.DataFrame:
    """Select rows with a prediction and a measurement, and compute their errors.

    Args:
        frame: Predictions and measurements.
        predicted: Column of the predictions.
        measured: Column of the measurements.
        ends: Columns of the bounds of the intervals.

    Returns:
        The rows with columns ``error`` (absolute relative error), ``log`` (of predicted over
        measured), ``inside`` (whether the interval covers the measurement) and ``width`` (upper
        over lower bound).
    """
    own = frame[frame[measured].notna() & frame[predicted].notna()].copy()
    ratio = own[predicted].astype(float) / own[measured]
    own["error"], own["log"] = (ratio - 1.0).abs(), np.log(ratio)
    low, high = (own[end] for end in ends)
    own["inside"], own["width"] = own[measured].between(low, high), high / low
    return own


def choice(
    table: pd.DataFrame,
    same: Sequence[str],
    predicted: pd.Series,
    measured: pd.Series,
    least: int = LEAST_PLANS,
) -> pd.DataFrame:
    """Compute the regret of the plan predicted fastest, and the rank correlation of all plans.

    Args:
        table: Table of the plans.
        same: Columns whose values compared plans share; missing columns are ignored.
        predicted: Predicted times, indexed by row number of the table.
        measured: Measured times with the same index; NaN if not measured.
        least: Minimum number of plans to compare.

    Returns:
        For each set with enough plans: ``plans``, ``regret`` (measured time of the plan predicted
        fastest relative to the fastest, minus 1) and Kendall's ``tau``.
    """
    from scipy.stats import kendalltau

    have = [name for name in same if name in table]
    columns = [*have, "plans", "regret", "tau"]
    if "model" not in have:
        return pd.DataFrame(columns=columns)
    asked = table[have].reset_index(drop=True).loc[predicted.index]
    asked = asked.assign(predicted=predicted, seconds=measured).dropna(subset=["seconds"])
    found = []
    for key, plans in asked.groupby(have, dropna=False):
        if len(plans) < least or plans["seconds"].nunique() < 2:
            continue
        chosen = plans["seconds"].to_numpy()[int(plans["predicted"].argmin())]
        regret = float(chosen / plans["seconds"].min() - 1.0)
        tau = float(kendalltau(plans["predicted"], plans["seconds"]).statistic)
        found.append([*key, len(plans), regret, tau])
    return pd.DataFrame(found, columns=columns)


def choice_figures(plans: pd.DataFrame) -> dict[str, float]:
    """Summarise the result of :func:`choice`; NaN if no plans were compared."""
    return {
        "regret_median": float(plans["regret"].median()),
        "regret_mean": float(plans["regret"].mean()),
        "kendall_tau": float(plans["tau"].mean()),
    }


def to_learn(table: pd.DataFrame) -> np.ndarray:
    """Mask of the rows whose split begins with calib, bool, shape ``(n,)``."""
    if "split" not in table:
        return np.zeros(len(table), bool)
    return table["split"].astype(str).str.startswith("calib").to_numpy()


def few_of_each(
    keys: Iterable[Hashable], names: Iterable[str], most: int, seed: int = 0
) -> list[int]:
    """Draw at most ``most`` rows of each key at random; return their sorted indices.

    A row's draw depends on its name alone, so that few of the drawn rows change if a table grows.

    Args:
        keys: Key of each row.
        names: Name of each row.
        most: Maximum number of rows per key.
        seed: Random seed.
    """
    codes, _ = pd.factorize(pd.Series(list(keys), dtype=object))
    rank = pd.Series(_draws(names, f"draw {seed}")).groupby(codes).rank(method="first")
    return np.flatnonzero(rank <= most).tolist()


def named_folds(names: Iterable[str], seed: int = 0) -> np.ndarray:
    """Assign each row to a cross-validation fold by its name: strings, shape ``(n,)``."""
    return np.asarray((_draws(names, f"fold {seed}") * FOLDS).astype(int).astype(str))


def _draws(names: Iterable[str], salt: str) -> np.ndarray:
    """Pseudo-random numbers in [0, 1) from names and, of equal names, their order."""
    own = pd.Series(list(names), dtype=object)
    texts = own + " " + own.groupby(own).cumcount().astype(str)
    digests = [hashlib.blake2b(f"{salt} {text}".encode(), digest_size=6) for text in texts]
    return np.array([int(digest.hexdigest(), 16) for digest in digests]) / 2.0**48


class Part(NamedTuple):
    """Rows that are held out together.

    Attributes:
        name: What is held out, such as ``device``.
        value: Its value, such as ``h100-sxm``.
        judge: Mask of the test rows.
        learn: Mask of the training rows.
    """

    name: str
    value: str
    judge: np.ndarray
    learn: np.ndarray


def parts_of(keys: Mapping[str, np.ndarray]) -> Iterator[Part]:
    """Hold out the rows of each value of each key in turn, except values that all rows share."""
    for name, key in keys.items():
        for value in np.unique(key):
            judge = key == value
            if not judge.all():
                yield Part(name, str(value), judge, ~judge)


def left_out_rows(known: pd.DataFrame, found: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Compute the errors of measurements that were held out.

    Args:
        known: Row of each measurement: ``id``, ``metric``, ``measured``, and columns to group by.
        found: For each way of holding out, the logarithm of measured over predicted, and of the
            bounds of the interval over predicted, shape ``(n, 3)``; NaN if there is none.

    Returns:
        As from :func:`measured_rows`, with what was ``left_out``.
    """
    every = []
    for name, own in found.items():
        log, low, high = own.T
        figures = {
            "predicted": known["measured"] * np.exp(-log),
            "error": np.abs(np.expm1(-log)),
            "log": -log,
            # In logarithms, since a bound may be one of the errors.
            "inside": np.where(np.isnan(low), np.nan, (low <= log) & (log <= high)),
            "width": np.exp(high - low),
        }
        every.append(known.assign(left_out=name, **figures))
    rows = pd.concat(every).dropna(subset=["log"])
    rows["left_out"] = pd.Categorical(rows["left_out"], list(found))
    return rows


def predicted_frame(
    ids: Iterable[object],
    reasons: Iterable[str],
    answers: Iterable[Mapping[str, object] | str],
    columns: Sequence[str],
) -> pd.DataFrame:
    """Collect predictions into a frame with one row per row of a table.

    Args:
        ids: Ids of the rows.
        reasons: Reasons why rows cannot be predicted; empty for the others.
        answers: For each of the others, values by column, or the reason of a failure.
        columns: Columns of the frame, including ``id`` and ``reason``.
    """
    remaining, records = iter(answers), []
    for name, reason in zip(ids, reasons, strict=True):
        answer = reason or next(remaining)
        own = {"reason": answer} if isinstance(answer, str) else {"reason": "", **answer}
        records.append({"id": str(name), **own})
    return pd.DataFrame(records).reindex(columns=list(columns))


def write_predictions(console: Console, frame: pd.DataFrame, out: Path, what: str) -> None:
    """Write predictions, and print the reasons of failures.

    Raises:
        DatasetError: All predictions failed.
    """
    write_table(frame, out)
    print_reasons(console, frame.loc[frame["reason"] != "", "reason"], f"{what} not predicted")
    if len(frame) and (frame["reason"] != "").all():
        raise DatasetError(
            f"none of the {what} could be predicted",
            where=str(out),
            hint="its column 'reason' has the reasons",
        )


def print_reasons(console: Console, reasons: Iterable[str], what: str) -> None:
    """Print the most common reasons with the number of rows that each applies to."""
    for reason, count in Counter(reasons).most_common(20):
        console.print(f"{count} {what}: {reason}", highlight=False)


def print_judged(console: Console, judged: Judged, what: str, lines: Sequence[str]) -> None:
    """Print errors by group, followed by summary lines."""
    print_frame(console, in_percent(judged.by_group), f"{what}, errors in %")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def log_judged(
    console: Console,
    judged: Judged,
    name: str,
    params: Mapping[str, object],
    predictions: pd.DataFrame | None = None,
) -> None:
    """Log figures on predictions as an MLflow run."""
    metrics = {k.replace(", ", "-"): v for k, v in judged.overall.items() if np.isfinite(v)}
    tables = {"by_group": judged.by_group, "choice": judged.choice}
    run = RunLog(name, dict(params), metrics, tables=tables, predictions=predictions)
    log_training(console, run, None)


def keep_judged(
    console: Console,
    settings: TableSettings,
    judged: Judged,
    known: pd.DataFrame,
    what: str,
    kind: str,
) -> None:
    """Write an accuracy page and log an MLflow run, if the settings request them.

    Args:
        console: Console to print to.
        settings: The table, the model, the page, and whether to log.
        judged: Figures of the predictions.
        known: Predictions of measured rows.
        what: Name of the rows, such as ``steps``.
        kind: Column of ``known`` to group the page by.
    """
    kinds = known[kind].astype(str)
    predictions = tidy(known.assign(kind=kinds, predicted_us=known["latency_us"]), level="program")
    params = {"table": str(settings.table), "model": settings.model}
    if settings.page:
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        name = f"{what} of {settings.table.name}"
        run = TrackedRun(settings.model, name, when, params, predictions, len(predictions), {})
        data = {"title": run.name, "runs": [run_data(run)]}
        write_text(settings.page, assemble(Page(f"Accuracy: {run.name}", data, SCRIPTS)))
        wrote(settings.page, "page")
    if settings.track:
        log_judged(console, judged, f"evaluate-{what}", params, predictions)


def keep_learned(
    console: Console,
    settings: TableSettings,
    model: JsonModel,
    effects: int,
    left: pd.DataFrame,
    figures: pd.DataFrame,
    errors: pd.DataFrame,
) -> None:
    """Save a model trained on tables and its held-out predictions, and log an MLflow run.

    Args:
        console: Console to print to.
        settings: The tables, the output files, and whether to log.
        model: The model.
        effects: Number of its effects.
        left: Held-out measurements, from :func:`left_out_rows`.
        figures: Their errors, logged as a table.
        errors: Metrics to log: what was held out, name of the figure, value.
    """
    if settings.left_out:
        columns = ["id", "metric", "measured", "left_out", "predicted"]
        write_table(left[columns].astype({"left_out": str}), settings.left_out)
        wrote(settings.left_out, f"{len(left)} predictions of held-out rows")
    model.save(settings.out)
    wrote(settings.out, f"{effects} effects")
    if settings.track:
        metrics = {f"{way}/{name}": float(e) for way, name, e in errors.itertuples(index=False)}
        params = {
            "table": ", ".join(map(str, settings.tables)),
            "rows": left.index.nunique(),
            "seed": settings.seed,
        }
        tables, data = {"left_out": figures}, digests(*settings.tables)
        run = RunLog(model.what, params, metrics, tables=tables, datasets=data)
        log_training(console, run, None)
