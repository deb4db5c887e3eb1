"""Predict tables of whole PyTorch models and judge the predictions.

A few that were measured on the same chip scale the others:

    log factor = device + device x framework + device x framework x mode x layout

Each level is the mean of what those above leave, shrunken towards zero.
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


#: What the levels are of, coarse to fine, and for how many rows their shrinkage counts: the ratio
#: of the variance of rows of one group (a mean error of some 15 %) to that of the level's effects
#: (20, 10 and 10 %). Engineering estimates.
_LEVELS = (
    (("device",), 0.6),
    (("device", "framework"), 2.0),
    (("device", "framework", "mode", "layout"), 2.0),
)


def log_factors(table: pd.DataFrame, logs: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Logarithms of factors on predictions, shape ``(n,)``.

    Args:
        table: With the columns of the levels.
        logs: ``log(measured / predicted)``, shape ``(n,)``; read where ``learn`` is.
        learn: Rows to learn from, bool, shape ``(n,)``.
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
    """Errors of each learned row by what rows of other models teach, ``log(measured/predicted)``.

    Args:
        table: As of :func:`log_factors`, with ``model``.
        logs: As there.
        learn: As there.
    """
    models = table["model"].astype(str).to_numpy()
    found: np.ndarray = np.full(len(table), np.nan)
    for model in np.unique(models[learn]):
        own = learn & (models == model)
        found[own] = (logs - log_factors(table, logs, learn & ~own))[own]
    return np.asarray(found[learn])


#: Columns of predictions: times in µs, peak memory in bytes as the table measured it (else what the
#: device sees), and what was measured where the table says.
COLUMNS = (
    *("id", "latency_us", "lo_us", "hi_us", "memory_bytes", "memory_lo_bytes", "memory_hi_bytes"),
    *("fits", "measured_us", "measured_memory_bytes", "ran", "reason"),
)
#: What errors of memory are grouped by.
_MEMORY_GROUPS = ("device", "framework", "mode")
#: What errors are grouped by.
GROUPS = ("device", "framework", "mode", "layout", "dtype")
#: Figures are printed of each value of these, too: of the worst ones where there are many.
MORE = ("family", "torch")
_WORST = 15
#: How a model is run, within which models of one device are compared.
_RUN = ("source", "device", "framework", "mode", "layout", "dtype", "torch")
#: What is compared, by what stays the same: models; and batches and layouts of a model by the time
#: of an image.
CHOICES = {
    "models": _RUN,
    "batches": (*_RUN, "model", "img_size"),
    "layouts": tuple(name for name in (*_RUN, "model", "img_size", "batch") if name != "layout"),
}


def evaluate_models(
    table: pd.DataFrame, asking: Asking, show: Callable[[int, int], None] = lambda done, of: None
) -> tuple[pd.DataFrame, list[ModelRow | None]]:
    """Predict every row of a table of whole models.

    Args:
        table: As :func:`~opcast.predict.cluster.case_table.read_cases` gives.
        asking: How.
        show: Told of progress.
    """
    rows, reasons = read_rows(table, model_row)
    answers = asking.predict([row for row in rows if row is not None], show)
    frame = predicted_frame(table["id"], reasons, answers, COLUMNS)
    frame["measured_us"] = [row.measured_s * 1e6 if row else np.nan for row in rows]
    frame["measured_memory_bytes"] = [row.memory_bytes if row else np.nan for row in rows]
    frame["ran"] = [row.ran if row else None for row in rows]
    return frame, rows


def as_run(table: pd.DataFrame, rows: Sequence[ModelRow | None]) -> pd.DataFrame:
    """The table with the columns of groups as its rows are read, whatever their source writes."""
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
    """Errors of peak memory by device, framework and mode, of rows that state it.

    Args:
        frame: From :func:`evaluate_models`.
        table: From :func:`as_run`.
    """
    ends = ("memory_lo_bytes", "memory_hi_bytes")
    own = measured_rows(frame, "memory_bytes", "measured_memory_bytes", ends)
    own = own.join(table[list(_MEMORY_GROUPS)])
    return own.groupby(list(_MEMORY_GROUPS), dropna=False).agg(**FIGURES).reset_index()


def fit_lines(frame: pd.DataFrame) -> list[str]:
    """How many rows that ran are said to fit, and of those that ran out of memory not to."""
    known = frame[frame["ran"].notna() & frame["fits"].notna()]
    lines = []
    for ran, words in ((True, "that ran are said to fit"), (False, "that did not fit are said to")):
        own = known[known["ran"].astype(bool) == ran]
        if len(own):
            lines.append(f"{int(own['fits'].astype(bool).sum())} of {len(own)} rows {words}")
    return lines


def judge_models(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Errors of predictions whose answer is given.

    Args:
        frame: From :func:`evaluate_models`.
        table: The table, with what rows are grouped by.
    """
    own = with_groups(frame, table)
    by_group = own.groupby([c for c in GROUPS if c in own], dropna=False).agg(**FIGURES)
    figures = {name: float(value) for name, value in _figures(own).items()}
    overall = {"expressed": float(frame["latency_us"].notna().mean()), **figures}
    plans = choices(frame, table)
    for name, found in plans.groupby("choice"):
        overall |= {f"{name}/tau": found["tau"].mean(), f"{name}/regret": found["regret"].mean()}
    return Judged(by_group.reset_index(), overall, plans)


def with_groups(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Predicted rows with an answer, their errors, ``width`` and the table's columns of groups."""
    own = measured_rows(frame)
    own["width"] = own["hi_us"] / own["lo_us"]
    names = [name for name in (*GROUPS, *MORE, "model") if name in table]
    return own.join(table.reset_index(drop=True)[names])


def _figures(own: pd.DataFrame) -> dict[str, float]:
    return {
        "rows": len(own),
        "mape": own["error"].mean(),
        "median_ape": own["error"].median(),
        "bias": np.expm1(own["log"].median()),
        "coverage": own["inside"].mean(),
        "width": own["width"].median(),
    }


def choices(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """How well models, batches and layouts are chosen by predicted time of a sample.

    Returns:
        As :func:`~opcast.workflows.judging.choice` gives, with what is compared as ``choice``.
    """
    table = table.reset_index(drop=True)
    samples = table["batch"].astype(float) if "batch" in table else pd.Series(1.0, table.index)
    own = frame[frame["latency_us"].notna()]
    per = samples.loc[own.index]
    found = []
    for name, same in CHOICES.items():
        # Whatever is not the same is compared: the key of the models is how they are run.
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
    """Scale predictions by the rows of ``calib_*`` splits that were measured.

    Args:
        console: Where to print.
        frame: From :func:`evaluate_models`.
        table: From :func:`as_run`.

    Returns:
        The predictions, and which rows they learned from.

    Raises:
        DatasetError: There is no such row.
        WorseModelError: Predictions of models that were left out are worse for it.
    """
    own = np.log((frame["measured_us"].astype(float) / frame["latency_us"]).to_numpy(float))
    learn = to_learn(table) & np.isfinite(own)
    if not learn.any():
        raise DatasetError(
            "no row to calibrate on",
            hint="give rows a split that begins with calib, and latency_ms",
        )
    after = errors_left_out(table, own, learn)
    what = f"{int(learn.sum())} rows by models"
    check_unseen(console, what, mean_error(own[learn]), mean_error(after))
    factors = np.exp(log_factors(table, own, learn))
    times = {name: frame[name].astype(float) * factors for name in LATENCY_KEYS}
    return frame.assign(**times), learn


def run_evaluate_models(console: Console, settings: TableSettings) -> Judged:
    """Predict every row of a table of whole models; print the errors of those with a time."""
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
        console.print(f"{kept}: an evaluation that did not end goes on", highlight=False)
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
            print_frame(console, in_percent(worst.head(_WORST).reset_index()), f"by {name}, worst")
        if settings.page or settings.track:
            keep_judged(console, settings, judged, known, "models", "framework")
    return judged


def _lines(judged: Judged) -> list[str]:
    o = judged.overall
    lines = [
        f"{o['rows']:.0f} rows: mean error {100 * o['mape']:.1f} %, median "
        f"{100 * o['median_ape']:.1f} %, {100 * o['coverage']:.0f} % inside the 90 % interval, "
        f"whose ends are a factor of {o['width']:.2f} apart (median)"
    ]
    for name in CHOICES:
        count = int((judged.choice["choice"] == name).sum())
        if count:
            lines.append(
                f"choice of {name}, {count} sets: Kendall's tau {o[f'{name}/tau']:.2f}, the one "
                f"predicted fastest takes {100 * o[f'{name}/regret']:.1f} % more than the fastest"
            )
    return lines
