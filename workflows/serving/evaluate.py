"""Predict tables of measured serving, judge the predictions, and adapt to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, OpcastError
from ...common.parquet import write_table
from ...common.progress import counting, wrote
from ...common.tables_text import in_percent, print_frame
from ...models.core.registry import OPERATOR_MODEL
from ...models.operators import OpModel
from ...models.serving.effects import Observe, Observed, ServingEffects, adapt_serving
from ...models.serving.model import METRICS, ServingModel, find_serving_model
from ...models.tracking.mlflow_store import RunLog
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_table import ServingRow, read_serving, read_serving_rows
from ...predict.cluster.step_table import FAULTS, reason_of
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


Asked = TypeVar("Asked")


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


def ask_rows(
    rows: Sequence[ServingRow],
    ask: Callable[[ServingRow], Asked],
    show: Callable[[int, int], None] = lambda done, of: None,
) -> list[Asked | str]:
    """Ask something of every row; where that fails, the reason why.

    Rows of one configuration follow each other, since only so many tables of costs are kept.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        own = row.deployment
        key = (own.device, own.framework, own.model, own.engine, own.prefill)
        groups.setdefault(key, []).append(index)
    found: dict[int, Asked | str] = {}
    for index in (index for group in groups.values() for index in group):
        try:
            found[index] = ask(rows[index])
        except (OpcastError, *FAULTS) as error:
            found[index] = reason_of(error)
        show(len(found), len(rows))
    return [found[index] for index in range(len(rows))]


def observer(predictor: ServingPredictor, rows: Sequence[ServingRow]) -> Observe:
    """The simulator as learning asks it: measured latencies beside simulated ones."""

    def observe(effects: ServingEffects) -> Observed:
        predictor.model = replace(predictor.model, effects=effects)
        said = ask_rows(rows, lambda row: predictor.simulate(row.deployment, row.spec))
        found: list[tuple[int, str, float, float, np.ndarray, float]] = []
        for index, (row, run) in enumerate(zip(rows, said, strict=True)):
            if isinstance(run, str):
                continue
            for metric in METRICS:
                measured, simulated = measured_seconds(row, metric), run.seconds(metric)
                if np.isfinite(measured) and simulated > 0.0:
                    logs = (float(np.log(measured)), float(np.log(simulated)))
                    found.append((index, metric, *logs, run.shares(metric), run.queued))
        if not found:
            raise DatasetError("no row with a measured latency can be expressed")
        columns = [np.array(column) for column in zip(*found, strict=True)]
        return Observed(*columns)

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
    predictor = ServingPredictor(operators, model)
    asked = [row for row in rows if row is not None]
    said = iter(ask_rows(asked, lambda row: predicted_row(predictor, row), show))
    records = []
    for name, row, reason in zip(table["id"], rows, reasons, strict=True):
        answer = reason if row is None else next(said)
        own = {"reason": answer} if isinstance(answer, str) else {"reason": "", **answer}
        records.append({"id": str(name), **own})
    frame = pd.DataFrame(records).reindex(columns=list(_columns()))
    return frame, judge_serving(frame[~learn.to_numpy()] if calibrate else frame, table), model


def _columns() -> list[str]:
    ends = [f"{name}{end}" for name, _ in COLUMNS for end in ("", "_lo", "_hi")]
    per = [f"out_tok_s_per_gpu{end}" for end in ("", "_lo", "_hi")]
    own = ["n_gpus", "queued_share", "known", "source", "device", "model_group", "framework"]
    return ["id", *ends, *per, *own, *(f"measured_{name}" for name, _ in COLUMNS), "reason"]


def predicted_row(predictor: ServingPredictor, row: ServingRow) -> dict[str, object]:
    """A row's columns of :func:`evaluate_serving`, as a user who types it gets them."""
    own = row.deployment
    found = predictor.predict(own, row.spec, record=False)
    record: dict[str, object] = {
        "n_gpus": own.devices,
        "queued_share": found.queued,
        "known": found.known,
        "source": own.source,
        "device": own.device,
        "model_group": row.group,
        "framework": own.framework,
    }
    for name, metric in COLUMNS:
        record[f"measured_{name}"] = row.measured.get(name, float("nan"))
        rate = metric == "per_token"
        interval = found.tokens_per_s if rate else found.figures[f"{metric}/mean"]
        for end, value in zip(("", "_lo", "_hi"), interval, strict=True):
            if rate:
                record[f"out_tok_s_per_gpu{end}"] = value / own.devices
            if value:
                # A single token has no time of a further one.
                record[f"{name}{end}"] = value if rate else value * 1e3
    return record


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
    predictor = ServingPredictor(operators, model)
    contexts = [predictor.context(row.deployment) for row in own]
    seen = observer(predictor, own)(model.effects)
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
        console.print(f"{count} rows cannot be expressed: {reason}")
    if len(judged.by_group):
        print_frame(console, in_percent(judged.by_group), "measured serving, errors in %")
        for line in overall_lines(judged):
            console.print(line, soft_wrap=True)
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
