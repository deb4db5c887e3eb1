"""Predict tables of measured serving, judge the predictions, and adapt to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import write_table
from ...common.progress import counting, wrote
from ...common.tables_text import in_percent, print_frame
from ...models.core.registry import OPERATOR_MODEL
from ...models.operators import OpModel
from ...models.serving.effects import Context, ServingEffects
from ...models.serving.fit import Observe, Observed, adapt_serving
from ...models.serving.model import METRICS, REQUEST_TIME, ServingModel, find_serving_model
from ...models.tracking.mlflow_store import RunLog
from ...predict.cluster.serving_runs import RowRun, ServingRuns, row_context, row_floors
from ...predict.cluster.serving_table import ServingRow, read_serving, read_serving_rows
from ...predict.operator.serving_operators import load_serving_operators
from ..training import log_training

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import ServingSettings

#: What a row is predicted and judged by: column, metric of the simulator, and whether a larger
#: figure is better.
COLUMNS = (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("itl_ms", "tpot"), ("out_tok_s", "per_token"))
#: What configurations of one model have in common, and fewest that are compared.
SAME = ("source", "model", "device", "isl", "osl", "load")
LEAST_PLANS = 3


@dataclass(frozen=True)
class JudgedServing:
    """Figures on predicted serving.

    Attributes:
        by_group: Errors by metric, source, device and model group.
        overall: Figures over all groups, each counting the same.
        choice: Regret and rank correlation by model and load.
    """

    by_group: pd.DataFrame
    overall: dict[str, float]
    choice: pd.DataFrame


def serving_operators() -> OpModel | None:
    """The shipped model of operators, as far as serving asks it."""
    return load_serving_operators(OPERATOR_MODEL)


def measured_seconds(row: ServingRow, metric: str) -> float:
    """What a row measured, in seconds; NaN if it did not."""
    answers = row.measured
    if metric == "per_token":
        return 1.0 / answers["out_tok_s"] if "out_tok_s" in answers else float("nan")
    own = answers.get(f"{metric}_ms", float("nan"))
    if metric == "tpot" and own != own:
        # The mean gap between chunks is that of tokens where chunks are tokens.
        own = answers.get("itl_ms", float("nan"))
    return own * 1e-3


def observer(runs: ServingRuns, contexts: Sequence[Context]) -> Observe:
    """The simulator as learning asks it: measured latencies beside simulated ones."""

    def observe(effects: ServingEffects) -> Observed:
        said = runs.run([effects.weights(context) for context in contexts])
        found: list[tuple[int, str, float, float, np.ndarray, float]] = []
        for index, (row, run) in enumerate(zip(runs.rows, said, strict=True)):
            if not isinstance(run, RowRun):
                continue
            for metric in METRICS:
                measured = measured_seconds(row, metric)
                latency = run.latency(metric)
                if np.isfinite(measured) and latency.seconds > 0.0:
                    logs = (float(np.log(measured)), float(np.log(latency.seconds)))
                    found.append((index, metric, *logs, latency.shares, run.queued))
        if not found:
            raise DatasetError("no row with a measured latency can be expressed")
        rows, metrics, measured_logs, simulated, shares, queued = zip(*found, strict=True)
        return Observed(
            np.array(rows),
            np.array(metrics),
            np.array(measured_logs),
            np.array(simulated),
            np.stack(shares),
            np.array(queued),
        )

    return observe


def evaluate_serving(
    table: pd.DataFrame,
    model: ServingModel,
    operators: OpModel | None,
    *,
    folder: Path = Path(),
    calibrate: bool = False,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[pd.DataFrame, JudgedServing, ServingModel]:
    """Predict every row of a table of serving, and judge those whose answers are given.

    Args:
        table: As :func:`~opcast.predict.cluster.serving_table.read_serving` gives.
        model: Of serving.
        operators: Model of library operators; ``None`` for rooflines.
        folder: That the table's traces are in.
        calibrate: Whether to adapt to the rows of ``calib_*`` splits that have answers.
        show: Told of progress.
    """
    rows, reasons = read_serving_rows(table, folder)
    learn = _to_learn(table)
    if calibrate:
        model = _calibrated(
            [r for r, own in zip(rows, learn, strict=True) if own and r], operators, model
        )
    runs = ServingRuns([row for row in rows if row is not None], operators, show)
    contexts = [row_context(row) for row in runs.rows]
    said = iter(runs.run([model.effects.weights(context) for context in contexts]))
    own = iter(contexts)
    records = []
    for name, row, reason in zip(table["id"], rows, reasons, strict=True):
        record: dict[str, object] = {"id": str(name), "reason": reason}
        if row is not None:
            run, context = next(said), next(own)
            if isinstance(run, RowRun):
                record |= _record(row, run, context, model)
            else:
                record["reason"] = run
        records.append(record)
    frame = pd.DataFrame(records).reindex(columns=list(_columns()))
    return frame, judge_serving(frame[~learn.to_numpy()] if calibrate else frame, table), model


def _columns() -> list[str]:
    ends = [f"{name}{end}" for name, _ in COLUMNS for end in ("", "_lo", "_hi")]
    per = [f"out_tok_s_per_gpu{end}" for end in ("", "_lo", "_hi")]
    own = ["n_gpus", "queued_share", "known", "source", "device", "model_group", "framework"]
    return ["id", *ends, *per, *own, *(f"measured_{name}" for name, _ in COLUMNS), "reason"]


def _record(
    row: ServingRow, run: RowRun, context: Context, model: ServingModel
) -> dict[str, object]:
    tier = model.tier(context)
    record: dict[str, object] = {
        "n_gpus": row.devices,
        "queued_share": run.queued,
        "known": tier,
        "source": row.source,
        "device": row.cluster.device,
        "model_group": row.group,
        "framework": row.framework,
    }
    seconds_of, ends = _predicted(row, run, context, model, tier)
    for name, metric in COLUMNS:
        seconds, (low, high) = seconds_of[metric], ends[metric]
        record[f"measured_{name}"] = row.measured.get(name, float("nan"))
        if metric == "per_token":
            rate = 1.0 / seconds
            # The most tokens a second are the fewest seconds a token.
            values = (rate, rate / high, rate / low)
            for end, value in zip(("", "_lo", "_hi"), values, strict=True):
                record[f"out_tok_s_per_gpu{end}"] = value / row.devices
        elif metric == "tpot" and row.load.output < 2 and not row.load.trace:
            continue
        else:
            values = (seconds * 1e3, seconds * low * 1e3, seconds * high * 1e3)
        for end, value in zip(("", "_lo", "_hi"), values, strict=True):
            record[f"{name}{end}"] = value
    return record


def _predicted(
    row: ServingRow, run: RowRun, context: Context, model: ServingModel, tier: str
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Seconds of each metric, and their ends as factors; those of a load that is not open agree."""
    factor = model.effects.factor
    seconds = {m: run.latency(m).seconds * factor(context, m) for m in METRICS}
    ends = {m: model.interval(m, tier, run.queued, context) for m in METRICS}
    floor = _floor(row)
    if row.load.trace or row.load.kind.startswith("open"):
        return _at_least(seconds, ends, floor)
    steps = max(0.0, row.load.output - 1.0)
    parts = seconds["ttft"], seconds["tpot"] * steps
    closed = row.load.kind == "closed"
    tied = model.tied_intervals(
        tier, run.queued, context, parts, REQUEST_TIME if closed else "per_token"
    )
    ends |= {m: tied[m] for m in ("ttft", "tpot")}
    if closed:
        # Throughput is requests in flight over the time of one.
        before = run.ttft.seconds + run.tpot.seconds * steps
        whole = run.per_token.seconds / before
        seconds["per_token"] = whole * sum(parts)
        ends["per_token"] = tied[REQUEST_TIME]
        floor["per_token"] = whole * (floor["ttft"] + floor["tpot"] * steps)
    return _at_least(seconds, ends, floor)


def _floor(row: ServingRow) -> dict[str, float]:
    """Least seconds of both parts of a mean request; 0 where a trace has the lengths.

    A row does not say what a cache had of its prompts, which may be all but a token.
    """
    if row.load.trace:
        return dict.fromkeys(METRICS, 0.0)
    prompt = np.array([row.load.prompt])
    found = row_floors(row, prompt, np.array([row.load.output]), np.maximum(prompt - 1.0, 0.0))
    return {"ttft": float(found.ttft[0]), "tpot": float(found.tpot[0]), "per_token": 0.0}


def _at_least(
    seconds: dict[str, float], ends: dict[str, tuple[float, float]], floor: dict[str, float]
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Predictions of which neither estimates nor ends lie below what devices can do."""
    at = {m: max(own, floor[m]) for m, own in seconds.items()}
    for metric, own in seconds.items():
        if own > 0.0:
            low, high = (max(own * end, floor[metric]) / at[metric] for end in ends[metric])
            ends[metric] = low, high
    return at, ends


def judged_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Answers that are given, one each: ``metric``, ``error``, ``log`` of the ratio, ``inside``."""
    parts = []
    for name, _ in COLUMNS:
        own = frame[frame[f"measured_{name}"].notna() & frame[name].notna()].copy()
        ratio = own[name].astype(float) / own[f"measured_{name}"]
        measured = own[f"measured_{name}"]
        own["inside"] = (measured >= own[f"{name}_lo"]) & (measured <= own[f"{name}_hi"])
        own["metric"], own["error"], own["log"] = name, (ratio - 1.0).abs(), np.log(ratio)
        parts.append(own)
        if name == "ttft_ms":
            free = own[own["queued_share"] <= FREE].copy()
            free["metric"] = "ttft_ms, unsaturated"
            parts.append(free)
    return pd.concat(parts, ignore_index=True)


#: Share of waiting up to which an engine counts as not saturated.
FREE = 0.3
#: Figures on a group of :func:`judged_rows`.
FIGURES = {
    "rows": ("error", "size"),
    "median_ape": ("error", "median"),
    "mape": ("error", "mean"),
    "bias": ("log", lambda logs: float(np.expm1(logs.median()))),
    "coverage": ("inside", "mean"),
}


def judge_serving(frame: pd.DataFrame, table: pd.DataFrame) -> JudgedServing:
    """Errors of predictions whose answers are given.

    Args:
        frame: From :func:`evaluate_serving`.
        table: The table, for the loads that configurations are compared under.
    """
    own = judged_rows(frame)
    keys = ["metric", "source", "device", "model_group"]
    by_group = own.groupby(keys, dropna=False).agg(**FIGURES).reset_index()
    choice = configuration_choice(frame, table)
    expressed = frame[[name for name, _ in COLUMNS]].notna().any(axis=1)
    overall: dict[str, float] = {"rows": float(len(frame)), "expressed": float(expressed.mean())}
    for metric, rows in own.groupby("metric"):
        groups = by_group[by_group["metric"] == metric]
        overall[f"{metric}/rows"] = float(len(rows))
        overall[f"{metric}/median_ape"] = float(rows["error"].median())
        overall[f"{metric}/mape"] = float(rows["error"].mean())
        overall[f"{metric}/median_ape_groups"] = float(groups["median_ape"].mean())
        overall[f"{metric}/coverage"] = float(rows["inside"].mean())
        overall[f"{metric}/coverage_groups"] = float(groups["coverage"].mean())
    if len(choice):
        overall["regret_median"] = float(choice["regret"].median())
        overall["regret_mean"] = float(choice["regret"].mean())
        overall["kendall_tau"] = float(choice["tau"].mean())
    return JudgedServing(by_group, overall, choice)


def configuration_choice(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """How good the configuration predicted best really is, and how well the order agrees.

    Configurations of one model on one device under equal lengths are compared by tokens a second
    and GPU; where only latencies were measured, by what those make of the concurrency.

    Returns:
        For each model and load with at least three: ``plans``, ``regret`` (how much less the
        chosen one gives than the best) and Kendall's ``tau``.
    """
    from scipy.stats import kendalltau

    have = [name for name in SAME if name in table]
    columns = [*have, "plans", "regret", "tau"]
    if "model" not in have:
        return pd.DataFrame(columns=columns)
    known = table.set_index(table["id"].astype(str))
    asked = frame[frame["out_tok_s_per_gpu"].notna()]
    joined = known.loc[asked["id"], have].reset_index(drop=True)
    measured = _measured_rate(asked, known.loc[asked["id"]])
    joined["measured"] = measured / asked["n_gpus"].to_numpy(float)
    joined["predicted"] = asked["out_tok_s_per_gpu"].to_numpy(float)
    joined["id"] = asked["id"].to_numpy()
    found = []
    for key, plans in joined.dropna(subset=["measured"]).groupby(have, dropna=False):
        if len(plans) < LEAST_PLANS or plans["measured"].nunique() < 2:
            continue
        chosen = plans["measured"].to_numpy()[int(plans["predicted"].argmax())]
        tau = float(kendalltau(plans["predicted"], plans["measured"]).statistic)
        regret = float(plans["measured"].max() / chosen - 1.0)
        own_key = dict(zip(have, key, strict=True))
        found.append({**own_key, "plans": len(plans), "regret": regret, "tau": tau})
    return pd.DataFrame(found, columns=columns)


def _measured_rate(frame: pd.DataFrame, table: pd.DataFrame) -> np.ndarray:
    """Tokens a second as measured, or as the measured latencies of a closed loop make them."""
    rate = frame["measured_out_tok_s"].to_numpy(float)
    if not {"concurrency", "osl"} <= set(table):
        return rate
    output = table.get("osl_mean", table["osl"]).fillna(table["osl"]).to_numpy(float)
    closed = (table["load"] == "closed").to_numpy()
    seconds = frame["measured_ttft_ms"] + frame["measured_tpot_ms"] * (output - 1.0)
    made = table["concurrency"].to_numpy(float) * output / seconds.to_numpy(float) * 1e3
    return np.where(np.isnan(rate) & closed, made, rate)


def _to_learn(table: pd.DataFrame) -> pd.Series:
    if "split" not in table:
        return pd.Series(False, index=table.index)
    return table["split"].astype(str).str.startswith("calib")


def _calibrated(
    rows: Sequence[ServingRow], operators: OpModel | None, model: ServingModel
) -> ServingModel:
    own = [row for row in rows if row.measured]
    if not own:
        raise DatasetError(
            "no row to calibrate on",
            hint="give rows a split that begins with calib, and a latency or throughput",
        )
    contexts = [row_context(row) for row in own]
    seen = observer(ServingRuns(own, operators), contexts)(model.effects)
    return replace(model, effects=adapt_serving(seen, contexts, model.effects))


def run_evaluate_serving(console: Console, settings: ServingSettings) -> JudgedServing:
    """Predict every row of a table of serving; print the errors of those with answers."""
    table = read_serving(settings.table)
    model = find_serving_model(settings.model)
    with counting("runs") as show:
        frame, judged, model = evaluate_serving(
            table,
            model,
            serving_operators(),
            folder=settings.table.parent,
            calibrate=settings.calibrate,
            show=show,
        )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame, settings.out)
    missing = frame.loc[frame["reason"] != "", "reason"]
    for reason, count in missing.value_counts().head(20).items():
        console.print(f"{count} rows cannot be expressed: {reason}", highlight=False)
    if len(judged.by_group):
        print_frame(console, in_percent(judged.by_group), "measured serving, errors in %")
        for line in overall_lines(judged):
            console.print(line, highlight=False, soft_wrap=True)
    wrote(settings.out, f"{len(frame)} rows")
    if settings.track and len(judged.by_group):
        metrics = {k.replace(", ", "-"): v for k, v in judged.overall.items() if np.isfinite(v)}
        params = {"table": str(settings.table), "model": settings.model}
        tables = {"by_group": judged.by_group, "choice": judged.choice}
        log_training(console, RunLog("evaluate-serving", params, metrics, tables=tables), None)
    return judged


def overall_lines(judged: JudgedServing) -> list[str]:
    """Figures over all groups, in words."""
    o = judged.overall
    lines = []
    for metric in dict.fromkeys(judged.by_group["metric"]):
        lines.append(
            f"{metric}: {o[f'{metric}/rows']:.0f} rows, median error "
            f"{100 * o[f'{metric}/median_ape']:.1f} %, mean {100 * o[f'{metric}/mape']:.1f} %; "
            f"mean over groups of the median {100 * o[f'{metric}/median_ape_groups']:.1f} %; "
            f"{100 * o[f'{metric}/coverage']:.0f} % inside the 90 % interval"
        )
    lines.append(f"{100 * o['expressed']:.1f} % of {o['rows']:.0f} rows expressed")
    if len(judged.choice):
        lines.append(
            f"choice over {len(judged.choice)} models and loads: regret "
            f"{100 * o['regret_median']:.1f} % (median), {100 * o['regret_mean']:.1f} % (mean), "
            f"Kendall's tau {o['kendall_tau']:.2f}"
        )
    return lines
