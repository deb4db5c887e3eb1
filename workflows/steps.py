"""Predict tables of training steps, judge the predictions, and adapt to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.files import write_text
from ..common.parquet import write_table
from ..common.progress import counting, wrote
from ..common.tables_text import in_percent, print_frame
from ..models.effects.effects import CLUSTER
from ..models.steps.context import OWN
from ..models.steps.fit import slopes_at
from ..models.steps.model import StepModel, find_step_model
from ..models.tracking.mlflow_store import RunLog, tidy
from ..models.tracking.prediction_log import TrackedRun
from ..predict.cluster.next_run import next_run
from ..predict.cluster.step import StepPrediction
from ..predict.cluster.step_runs import StepRuns
from ..predict.cluster.step_table import StepRow, read_rows, read_steps
from ..predict.locate import OPERATOR_MODEL
from ..predict.operator.step_operators import load_step_model
from ..predict.page.accuracy import SCRIPTS, run_data
from ..predict.page.assemble import Page, assemble
from .training import log_training

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.operators import OpModel
    from .settings import StepSettings

#: Effects of a cluster below which nothing is said: repeated runs differ by as much.
_WORTH = 0.02
#: What an effect of a cluster means: with the inverse factor and the factor.
_WORDS = {
    "between": "the scale-out network gives {0:.0%} of what was expected of it",
    "launch": "launching a kernel takes {1:.2f} times as long as expected",
    "whole": "everything takes {1:.2f} times as long as expected",
}


@dataclass(frozen=True)
class Judged:
    """Figures on predicted steps.

    Attributes:
        by_group: Errors by source and device.
        overall: Figures over all groups, each counting the same.
        plans: Regret and rank correlation by model and cluster.
    """

    by_group: pd.DataFrame
    overall: dict[str, float]
    plans: pd.DataFrame


def adapt_steps(model: StepModel, runs: StepRuns, measured: np.ndarray) -> StepModel:
    """Adapt a model to clusters of one's own from a few of their steps."""
    slopes = slopes_at(runs.simulate, model.table, len(runs.rows))
    return replace(model, table=slopes.linear(runs.contexts, measured).adapted())


def predicted_frame(
    table: pd.DataFrame,
    rows: Sequence[StepRow | None],
    reasons: Sequence[str],
    predicted: Sequence[StepPrediction | str],
) -> pd.DataFrame:
    """Predictions of a table: a row for each of its rows, empty with a reason where there is none.

    Returns:
        ``id``, ``latency_us``, ``lo_us``, ``hi_us``, ``memory_bytes``, the parts in µs, ``known``
        and ``reason``; ``measured_us`` and ``measured_memory_bytes`` where the table says.
    """
    said = iter(predicted)
    records = []
    for name, row, reason in zip(table["id"], rows, reasons, strict=True):
        record: dict[str, object] = {"id": str(name), "reason": reason}
        answer = next(said) if row is not None else reason
        if row is not None and isinstance(answer, StepPrediction):
            record |= _record(row, answer)
        else:
            record["reason"] = answer
        records.append(record)
    times = ("latency_us", "lo_us", "hi_us", "memory_bytes", *PARTS)
    given = ("known", "source", "device", "measured_us", "measured_memory_bytes", "reason")
    columns = ("id", *times, *given)
    return pd.DataFrame(records).reindex(columns=list(columns))


#: Parts of a step, µs; they add up to ``latency_us``.
PARTS = ("compute_us", "exposed_communication_us", "bubble_us", "host_us", "update_us")


def _record(row: StepRow, said: StepPrediction) -> dict[str, object]:
    step, scale = said.step, row.share * 1e6
    update = step.stages[step.worst].update.compute
    parts = (step.compute - update, step.exposed, step.bubble, step.host, update)
    # Rounding of the bubble aside, the parts add up to the step.
    rest = step.total - sum(parts)
    return {
        "latency_us": step.total * scale,
        "lo_us": said.interval.lo * scale,
        "hi_us": said.interval.hi * scale,
        "memory_bytes": said.fit.worst.total,
        **dict(zip(PARTS, (value * scale for value in (parts[0] + rest, *parts[1:])), strict=True)),
        "known": said.known,
        "source": row.source,
        "device": row.cluster.device,
        "measured_us": row.measured_s * 1e6,
        "measured_memory_bytes": row.memory_bytes,
    }


#: Figures on a group of :func:`measured_rows`, for ``DataFrameGroupBy.agg``.
FIGURES = {
    "rows": ("error", "size"),
    "mape": ("error", "mean"),
    "median_ape": ("error", "median"),
    "bias": ("log", lambda logs: float(np.expm1(logs.median()))),
    "coverage": ("inside", "mean"),
}


def measured_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Predicted rows with a measured time, with ``error``, ``log`` of the ratio, and ``inside``."""
    own = frame[frame["measured_us"].notna() & frame["latency_us"].notna()].copy()
    ratio = own["latency_us"].astype(float) / own["measured_us"]
    own["error"], own["log"] = (ratio - 1.0).abs(), np.log(ratio)
    own["inside"] = own["measured_us"].between(own["lo_us"], own["hi_us"])
    return own


def judge(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Errors of predictions whose answer is given.

    Args:
        frame: From :func:`predicted_frame`.
        table: The table, for the models and clusters that plans are compared within.
    """
    own = measured_rows(frame)
    own["memory_error"] = (own["memory_bytes"] / own["measured_memory_bytes"] - 1.0).abs()
    groups = own.groupby(["source", "device"], dropna=False)
    by_group = groups.agg(**FIGURES, memory_mape=("memory_error", "mean")).reset_index()
    plans = plan_choice(own, table)
    overall = {
        "rows": float(len(frame)),
        "expressed": float(frame["latency_us"].notna().mean()),
        "mape": float(by_group["mape"].mean()),
        "median_ape": float(by_group["median_ape"].mean()),
        "coverage": float(by_group["coverage"].mean()),
        "memory_mape": float(by_group["memory_mape"].mean()),
        "regret_median": float(plans["regret"].median()) if len(plans) else float("nan"),
        "regret_mean": float(plans["regret"].mean()) if len(plans) else float("nan"),
        "kendall_tau": float(plans["tau"].mean()) if len(plans) else float("nan"),
    }
    return Judged(by_group, overall, plans)


#: What plans of one model on one cluster have in common.
SAME = ("source", "model", "device", "n_devices", "seq", "global_batch", "dtype")
#: Fewest plans that are compared.
LEAST_PLANS = 3


def plan_choice(own: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """How good the plan predicted fastest really is, and how well the order agrees.

    Returns:
        For each model on a cluster with at least three plans: ``plans``, ``regret`` (how much
        slower the plan predicted fastest is than the fastest) and Kendall's ``tau``.
    """
    from scipy.stats import kendalltau

    have = [name for name in SAME if name in table]
    if "model" not in have:
        return pd.DataFrame(columns=[*have, "plans", "regret", "tau"])
    keys = table.set_index(table["id"].astype(str))[have]
    joined = own[["id", "latency_us", "measured_us"]].join(keys, on="id")
    found = []
    for key, plans in joined.groupby(have, dropna=False):
        if len(plans) < LEAST_PLANS or plans["measured_us"].nunique() < 2:
            continue
        chosen = plans["measured_us"].to_numpy()[int(plans["latency_us"].argmin())]
        tau = kendalltau(plans["latency_us"], plans["measured_us"]).statistic
        regret = float(chosen / plans["measured_us"].min() - 1.0)
        own_key = dict(zip(have, key, strict=True))
        found.append({**own_key, "plans": len(plans), "regret": regret, "tau": float(tau)})
    return pd.DataFrame(found, columns=[*have, "plans", "regret", "tau"])


def evaluate_steps(
    table: pd.DataFrame,
    model: StepModel,
    operators: OpModel | None,
    *,
    calibrate: bool = False,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[pd.DataFrame, Judged, StepModel]:
    """Predict every row of a table of steps, and judge those whose answer is given.

    Args:
        table: As :func:`~opcast.predict.cluster.step_table.read_steps` gives.
        model: Of steps.
        operators: Model of library operators; ``None`` for rooflines.
        calibrate: Whether to adapt to the rows of ``calib_*`` splits that have a time.
        show: Told of progress.
    """
    rows, reasons = read_rows(table)
    runs = StepRuns([row for row in rows if row is not None], operators, show)
    if calibrate:
        model = _calibrated(table, rows, runs, model)
    frame = predicted_frame(table, rows, reasons, runs.predict(model))
    judged = frame
    if calibrate:
        judged = frame[~_to_learn(table).to_numpy()]
    return frame, judge(judged, table), model


def _to_learn(table: pd.DataFrame) -> pd.Series:
    if "split" not in table:
        return pd.Series(False, index=table.index)
    return table["split"].astype(str).str.startswith("calib") & table["step_s"].notna()


def _calibrated(
    table: pd.DataFrame, rows: Sequence[StepRow | None], runs: StepRuns, model: StepModel
) -> StepModel:
    learn = [row for row, own in zip(rows, _to_learn(table), strict=True) if own and row]
    if not learn:
        raise DatasetError(
            "no row to calibrate on", hint="give rows a split that begins with calib, and step_s"
        )
    part = runs.part(learn)
    return adapt_steps(model, part, np.log([row.measured_s for row in learn]))


def run_evaluate_steps(console: Console, settings: StepSettings) -> Judged:
    """Predict every row of a table of steps; print the errors of those with a measured time."""
    table = read_steps(settings.table)
    model = find_step_model(settings.model)
    with counting("steps") as show:
        frame, judged, model = evaluate_steps(
            table, model, step_operators(), calibrate=settings.calibrate, show=show
        )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame, settings.out)
    missing = frame.loc[frame["latency_us"].isna(), "reason"]
    for reason, count in missing.value_counts().head(20).items():
        console.print(f"{count} rows are not predicted: {reason}", highlight=False)
    if settings.calibrate:
        for line in learned_lines(model, table):
            console.print(line, highlight=False)
    if judged.overall["rows"] and len(judged.by_group):
        print_frame(console, in_percent(judged.by_group), "measured steps, errors in %")
        console.print(_sentence(judged), highlight=False, soft_wrap=True)
    wrote(settings.out, f"{len(frame)} rows")
    known = measured_rows(frame)
    if len(known) and (settings.page or settings.track):
        _keep(console, settings, judged, known)
    return judged


def _keep(console: Console, settings: StepSettings, judged: Judged, known: pd.DataFrame) -> None:
    """Write the page and log the run, with the predictions of measured rows."""
    predictions = tidy(
        known.assign(kind=known["source"], predicted_us=known["latency_us"]), level="program"
    )
    params = {"table": str(settings.table), "model": settings.model}
    if settings.page:
        run = TrackedRun(
            settings.model,
            f"steps of {settings.table.name}",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            params,
            predictions,
            len(predictions),
            {},
        )
        data = {"title": run.name, "runs": [run_data(run)]}
        write_text(settings.page, assemble(Page(f"Accuracy: {run.name}", data, SCRIPTS)))
        wrote(settings.page, "page")
    if settings.track:
        metrics = {k: v for k, v in judged.overall.items() if np.isfinite(v)}
        tables = {"by_group": judged.by_group, "plans": judged.plans}
        log = RunLog("evaluate-steps", params, metrics, tables=tables, predictions=predictions)
        log_training(console, log, None)


def run_calibrate_steps(console: Console, settings: StepSettings) -> StepModel:
    """Adapt a model to the clusters of a table of one's own steps; print what was learned."""
    table = read_steps(settings.table)
    if "source" not in table or table["source"].isna().any():
        # Runs of one's own need no name: they are of one place.
        table["source"] = table["source"].fillna(OWN) if "source" in table else OWN
    rows, reasons = read_rows(table)
    for name, reason in zip(table["id"], reasons, strict=True):
        if reason:
            console.print(f"{name}: not used: {reason}", highlight=False)
    own = [row for row in rows if row is not None and np.isfinite(row.measured_s)]
    if not own:
        raise DatasetError(
            "no step to calibrate on", where=str(settings.table), hint="step_s holds seconds"
        )
    runs = StepRuns(own, step_operators())
    base = find_step_model(settings.model)
    measured = np.log([row.measured_s for row in own])
    model = adapt_steps(base, runs, measured)
    for name, which in (("before", base), ("after", model)):
        answers = runs.predict(which)
        ratios = [
            answer.step.total * row.share / row.measured_s
            for answer, row in zip(answers, own, strict=True)
            if isinstance(answer, StepPrediction)
        ]
        error = 100 * np.abs(np.array(ratios) - 1.0).mean()
        console.print(f"error of these {len(own)} steps {name}: {error:.1f} %", highlight=False)
    for line in learned_lines(model, table):
        console.print(line, highlight=False)
    following = next_run(base, runs, measured)
    if following is not None:
        console.print(following.text(), highlight=False, soft_wrap=True)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    model.save(settings.out)
    wrote(settings.out, "use it with --steps of simulate, --model of evaluate --steps")
    return model


def learned_lines(model: StepModel, table: pd.DataFrame) -> list[str]:
    """What a calibration learned of each cluster, in words."""
    lines = []
    for source in sorted({str(s).split("@")[0] for s in table.get("source", ())}):
        for key, value in sorted(model.table.values.items()):
            cost, level, cluster = key.split("/", 2)
            if level == CLUSTER and cluster.startswith(f"{source}|") and abs(value) > _WORTH:
                lines.append(f"{cluster}: {_WORDS[cost].format(np.exp(-value), np.exp(value))}")
    return lines


def _sentence(judged: Judged) -> str:
    o = judged.overall
    parts = [
        f"{len(judged.by_group)} groups of source and device: mean error {100 * o['mape']:.1f} %, "
        f"{100 * o['coverage']:.0f} % inside the 90 % interval",
    ]
    if np.isfinite(o["memory_mape"]):
        parts.append(f"memory {100 * o['memory_mape']:.1f} %")
    if len(judged.plans):
        parts.append(
            f"plan choice over {len(judged.plans)} models on clusters: regret "
            f"{100 * o['regret_median']:.1f} % (median), {100 * o['regret_mean']:.1f} % (mean), "
            f"Kendall's tau {o['kendall_tau']:.2f}"
        )
    return "; ".join(parts)


def step_operators() -> OpModel | None:
    """The shipped model of operators, as far as steps ask it."""
    return load_step_model(OPERATOR_MODEL)
