"""Predict tables of whole PyTorch models, and evaluate the predictions.

A calibration scales the predictions by a few models measured on the same chip:

    log factor = device + device x framework + device x framework x mode x layout

Each level is the mean residual of the levels above, shrunken towards zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ... import __version__
from ...common.errors import DatasetError
from ...common.interval import LATENCY_KEYS
from ...common.progress import counting, wrote
from ...common.tables_text import in_percent, print_frame
from ...predict.cluster.case_table import read_cases, read_rows
from ...predict.locate import OPERATOR_MODEL, model_hash
from ..judging import (
    FIGURES,
    WIDTHS,
    Judged,
    choice,
    keep_judged,
    measured_rows,
    predicted_frame,
    print_judged,
    to_learn,
    write_predictions,
)
from ..measured.calibration_samples import check_unseen, mean_error
from ..training import digests
from .rows import Asking, ModelRow, model_row

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import TableSettings


#: Columns of the levels, coarse to fine, and their shrinkage in rows: the ratio of the variance
#: within a group (a mean error of some 15 %) to that of the level's effects (20, 10 and 10 %).
#: Engineering estimates.
_LEVELS = (
    (("device",), 0.6),
    (("device", "framework"), 2.0),
    (("device", "framework", "mode", "layout"), 2.0),
)
#: Columns of predictions: times in µs, sizes in bytes (peak memory by the table's definition, else
#: that of the device), and the measurements of the table.
COLUMNS = (
    *("id", "latency_us", "lo_us", "hi_us", "memory_bytes", "memory_lo_bytes", "memory_hi_bytes"),
    *("fits", "measured_us", "measured_memory_bytes", "ran", "reason"),
)
#: Columns to group errors of memory by.
_MEMORY_GROUPS = ("device", "framework", "mode")
#: Columns to group errors of time by.
GROUPS = ("device", "framework", "mode", "layout", "dtype")
#: Further columns whose values with the largest errors are printed, and their number.
MORE = ("family", "torch")
_WORST = 15
#: Columns that specify how a model is run.
_RUN = ("source", "device", "framework", "mode", "layout", "dtype", "torch")
#: What is compared by time per sample, with the columns in which compared rows agree: models run in
#: the same way, and batch sizes and layouts of a model.
CHOICES = {
    "models": _RUN,
    "batches": (*_RUN, "model", "img_size"),
    "layouts": tuple(name for name in (*_RUN, "model", "img_size", "batch") if name != "layout"),
}


def log_factors(table: pd.DataFrame, logs: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Compute the logarithms of calibration factors, shape ``(n,)``.

    Args:
        table: Table with the columns of the levels.
        logs: ``log(measured / predicted)``, shape ``(n,)``; only rows in ``learn`` are used.
        learn: Mask of the calibration rows, bool, shape ``(n,)``.
    """
    found = np.zeros(len(table))
    for columns, shrinkage in _LEVELS:
        keys = table.groupby(list(columns), dropna=False).ngroup().to_numpy()
        own = learn & (keys >= 0)
        sums = np.bincount(keys[own], (logs - found)[own], keys.max() + 1)
        counts = np.bincount(keys[own], minlength=keys.max() + 1)
        found = found + (sums / (counts + shrinkage))[keys]
    return found


def errors_left_out(table: pd.DataFrame, logs: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Compute errors ``log(measured / predicted)`` of calibration rows with their model held out.

    Args:
        table: As for :func:`log_factors`, with ``model``.
        logs: As for :func:`log_factors`.
        learn: As for :func:`log_factors`.
    """
    models = table["model"].astype(str).to_numpy()
    found: np.ndarray = np.full(len(table), np.nan)
    for model in np.unique(models[learn]):
        own = learn & (models == model)
        found[own] = (logs - log_factors(table, logs, learn & ~own))[own]
    return np.asarray(found[learn])


def evaluate_models(
    table: pd.DataFrame, asking: Asking, show: Callable[[int, int], None] = lambda done, of: None
) -> tuple[pd.DataFrame, list[ModelRow | None]]:
    """Predict every row of a table of whole models.

    Args:
        table: Table from :func:`~opcast.predict.cluster.case_table.read_cases`.
        asking: Settings of the predictions.
        show: Called with the progress.

    Returns:
        The predictions, and the rows that could be read.
    """
    rows, reasons = read_rows(table, model_row)
    answers = asking.predict([row for row in rows if row is not None], show)
    frame = predicted_frame(table["id"], reasons, answers, COLUMNS)
    frame["measured_us"] = [row.measured_s * 1e6 if row else np.nan for row in rows]
    frame["measured_memory_bytes"] = [row.memory_bytes if row else np.nan for row in rows]
    frame["ran"] = [row.ran if row else None for row in rows]
    return frame, rows


def as_run(table: pd.DataFrame, rows: Sequence[ModelRow | None]) -> pd.DataFrame:
    """Replace the columns of groups by the normalised values of the rows that were read."""
    found = table.reset_index(drop=True).copy()
    read = [
        {**asdict(row.case), "device": row.device, "framework": row.framework.partition("@")[0]}
        if row
        else {}
        for row in rows
    ]
    for name in (*GROUPS, "model", "batch", "torch", "img_size"):
        own = table[name] if name in table else pd.Series(np.nan, table.index)
        pairs = zip(read, own.astype(object), strict=True)
        found[name] = [cells.get(name, value) for cells, value in pairs]
    return found


def judge_memory(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Compute errors of measured peak memory by device, framework and mode.

    Args:
        frame: From :func:`evaluate_models`.
        table: From :func:`as_run`.
    """
    ends = ("memory_lo_bytes", "memory_hi_bytes")
    own = measured_rows(frame, "memory_bytes", "measured_memory_bytes", ends)
    own = own.join(table[list(_MEMORY_GROUPS)])
    return own.groupby(list(_MEMORY_GROUPS), dropna=False).agg(**FIGURES).reset_index()


def fit_lines(frame: pd.DataFrame) -> list[str]:
    """Count the rows predicted to fit, among those that ran and those that ran out of memory."""
    known = frame[frame["ran"].notna() & frame["fits"].notna()]
    lines = []
    for ran, words in ((True, "that ran"), (False, "that ran out of memory")):
        own = known[known["ran"].astype(bool) == ran]
        if len(own):
            fits = int(own["fits"].astype(bool).sum())
            lines.append(f"{fits} of {len(own)} rows {words} are predicted to fit")
    return lines


def judge_models(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Compute errors of the predictions of measured models.

    Args:
        frame: From :func:`evaluate_models`.
        table: The table, with the columns to group by.
    """
    own = with_groups(frame, table)
    by_group = own.groupby([c for c in GROUPS if c in own], dropna=False).agg(**FIGURES)
    overall = {"expressed": float(frame["latency_us"].notna().mean())}
    whole = own.groupby(np.zeros(len(own))).agg(**WIDTHS)
    overall |= {str(name): float(value) for name, column in whole.items() for value in column}
    plans = choices(frame, table)
    for name, found in plans.groupby("choice"):
        overall |= {f"{name}/tau": found["tau"].mean(), f"{name}/regret": found["regret"].mean()}
    return Judged(by_group.reset_index(), overall, plans)


def with_groups(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Select measured rows, with their errors and columns to group by."""
    own = measured_rows(frame)
    names = [name for name in (*GROUPS, *MORE, "model") if name in table]
    return own.join(table.reset_index(drop=True)[names])


def choices(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Evaluate the choice of models, batch sizes and layouts by predicted time per sample.

    Returns:
        The results of :func:`~opcast.workflows.judging.choice`, with the key of :data:`CHOICES` in
        the column ``choice``.
    """
    table = table.reset_index(drop=True)
    samples = table["batch"].astype(float) if "batch" in table else pd.Series(1.0, table.index)
    own = frame[frame["latency_us"].notna()]
    per = samples.loc[own.index]
    found = []
    for name, same in CHOICES.items():
        # When models are compared, they must share the key of a set.
        keyed = table.assign(model=table["model"] if name != "models" else "all")
        least = 2 if name == "layouts" else 3
        own_choice = choice(
            keyed,
            ("model", *(n for n in same if n != "model")),
            own["latency_us"] / per,
            own["measured_us"] / per,
            least=least,
        )
        found.append(own_choice.assign(choice=name))
    return pd.concat(found, ignore_index=True)


def calibrated(
    console: Console, frame: pd.DataFrame, table: pd.DataFrame
) -> tuple[pd.DataFrame, np.ndarray]:
    """Calibrate predictions on the measured rows of ``calib_*`` splits.

    Args:
        console: Console to print to.
        frame: From :func:`evaluate_models`.
        table: From :func:`as_run`.

    Returns:
        The calibrated predictions, and the mask of the calibration rows.

    Raises:
        DatasetError: There are no such rows.
        WorseModelError: Errors on held-out models increase.
    """
    own = np.log((frame["measured_us"].astype(float) / frame["latency_us"]).to_numpy(float))
    learn = to_learn(table) & np.isfinite(own)
    if not learn.any():
        raise DatasetError(
            "no row to calibrate on",
            hint="give rows that have latency_ms a split that begins with calib",
        )
    after = errors_left_out(table, own, learn)
    what = f"{int(learn.sum())} rows by models"
    check_unseen(console, what, mean_error(own[learn]), mean_error(after))
    factors = np.exp(log_factors(table, own, learn))
    times = {name: frame[name].astype(float) * factors for name in LATENCY_KEYS}
    return frame.assign(**times), learn


def run_evaluate_models(console: Console, settings: TableSettings) -> Judged:
    """Predict every row of a table of whole models, and print the errors of the measured ones."""
    table = read_cases(settings.table, "models")
    model = OPERATOR_MODEL if settings.model == "default" else settings.model
    digest = digests(settings.table)
    kept = settings.parts(".jsonl")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    asking = Asking(
        settings.model,
        settings.ray,
        kept,
        f"{__version__} {model_hash(model)} {sorted(map(str, digest.items()))}",
    )
    if kept.is_file():
        console.print(f"{kept}: resuming an earlier evaluation", highlight=False)
    with counting("rows") as show:
        frame, rows = evaluate_models(table, asking, show)
    table = as_run(table, rows)
    learn = np.zeros(len(table), bool)
    if settings.calibrate:
        frame, learn = calibrated(console, frame, table)
    write_predictions(console, frame, settings.out, "rows")
    kept.unlink(missing_ok=True)
    wrote(settings.out, f"{len(frame)} rows")
    memory = judge_memory(frame, table)
    if len(memory):
        print_frame(console, in_percent(memory), "peak memory, errors in %")
    for line in fit_lines(frame):
        console.print(line, highlight=False)
    judged = judge_models(frame[~learn], table)
    known = with_groups(frame[~learn], table)
    if len(known):
        print_judged(console, judged, "whole models", _lines(judged))
        for name in (n for n in MORE if n in known):
            worst = known.groupby(name).agg(**FIGURES).sort_values("mape", ascending=False)
            title = f"by {name}, largest errors"
            print_frame(console, in_percent(worst.head(_WORST).reset_index()), title)
        if settings.page or settings.track:
            keep_judged(console, settings, judged, known, "models", "framework")
    return judged


def _lines(judged: Judged) -> list[str]:
    o = judged.overall
    lines = [
        f"{o['rows']:.0f} rows: mean error {100 * o['mape']:.1f} %, median "
        f"{100 * o['median_ape']:.1f} %, {100 * o['coverage']:.0f} % inside the 90 % interval, "
        f"whose bounds are a factor of {o['width']:.2f} apart (median)"
    ]
    for name in CHOICES:
        count = int((judged.choice["choice"] == name).sum())
        if count:
            lines.append(
                f"choice of {name}, {count} sets: Kendall's tau {o[f'{name}/tau']:.2f}, the one "
                f"predicted fastest takes {100 * o[f'{name}/regret']:.1f} % more than the fastest"
            )
    return lines
