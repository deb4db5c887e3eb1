"""Predict tables of serving runs, and evaluate the predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.progress import counting, wrote
from ...models.operators import OpModel
from ...models.serving.model import ServingModel
from ...predict.cluster.case_table import read_cases
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_table import ServingRow, serving_rows
from ...predict.operator.serving_operators import load_serving_operators
from ..judging import (
    FIGURES,
    Judged,
    choice,
    choice_figures,
    log_judged,
    measured_rows,
    predicted_frame,
    print_judged,
    to_learn,
    write_predictions,
)
from .calibrate import calibrated
from .rows import Tell, ask_rows

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import TableSettings

#: Columns that are predicted and evaluated, with the simulator's metric.
COLUMNS = (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("itl_ms", "tpot"), ("out_tok_s", "per_token"))
#: Columns of energy: joules per output token, and watts of all devices.
ENERGY = ("j_per_tok", "power_w")
#: Columns in which compared configurations agree.
SAME = ("source", "model", "device", "isl", "osl", "load")
#: Largest share of waiting time of an unsaturated engine.
FREE = 0.3


def evaluate_serving(
    table: pd.DataFrame,
    model: ServingModel,
    operators: OpModel | None,
    *,
    folder: Path = Path(),
    calibrate: bool = False,
    show: Callable[[int, int], None] = lambda done, of: None,
    tell: Tell = lambda text: None,
) -> tuple[pd.DataFrame, Judged, ServingModel]:
    """Predict every row of a table of serving runs, and compute the errors of the measured ones.

    Args:
        table: Table from :func:`~opcast.predict.cluster.case_table.read_cases`.
        model: Serving model.
        operators: Operator model; ``None`` for rooflines.
        folder: Folder of the table's traces.
        calibrate: Whether to adapt to the measured rows of ``calib_*`` splits.
        show: Called with the progress.
        tell: Called with a message for each measurement that is not used.

    Returns:
        The predictions, their errors, and the serving model, adapted if ``calibrate`` is set.
    """
    rows, reasons = serving_rows(table, folder)
    learn = to_learn(table)
    if calibrate:
        own = [row for row, ours in zip(rows, learn, strict=True) if ours and row]
        model = calibrated(own, operators, model, tell)
    predictor = ServingPredictor(operators, model)
    asked = [row for row in rows if row is not None]
    answers = ask_rows(asked, lambda row: predicted_row(predictor, row), show)
    frame = predicted_frame(table["id"], reasons, answers, _columns())
    return frame, judge_serving(frame[~learn] if calibrate else frame, table), model


def _columns() -> list[str]:
    names = [*(name for name, _ in COLUMNS), *ENERGY]
    ends = [f"{name}{end}" for name in names for end in ("", "_lo", "_hi")]
    per = [f"out_tok_s_per_gpu{end}" for end in ("", "_lo", "_hi")]
    own = ["n_gpus", "queued_share", "known", "source", "device", "model_group", "framework"]
    return ["id", *ends, *per, *own, *(f"measured_{name}" for name in names), "reason"]


def predicted_row(predictor: ServingPredictor, row: ServingRow) -> dict[str, object]:
    """Predict a row: its columns of :func:`evaluate_serving`."""
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
                # TPOT is 0 for outputs of a single token.
                record[f"{name}{end}"] = value if rate else value * 1e3
    joules = found.joules().get("output_token")
    for name in ENERGY:
        record[f"measured_{name}"] = row.measured.get(name, float("nan"))
        # Power is energy per token times predicted throughput, without the throughput's
        # uncertainty, and at most the boards' limit.
        watts = name == "power_w"
        factor = found.tokens_per_s.value if watts else 1.0
        most = own.devices * (own.spec.power_w or inf) if watts else inf
        for end, value in zip(("", "_lo", "_hi"), joules or (), strict=bool(joules)):
            record[f"{name}{end}"] = min(value * factor, most)
    return record


def judged_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors of all measurements, a row each: ``metric``, ``error``, ``log``, ``inside``."""
    parts = []
    for name in (*(name for name, _ in COLUMNS), *ENERGY):
        own = measured_rows(frame, name, f"measured_{name}", (f"{name}_lo", f"{name}_hi"))
        parts.append(own.assign(metric=name))
        if name == "ttft_ms":
            free = own[own["queued_share"] <= FREE]
            parts.append(free.assign(metric="ttft_ms, unsaturated"))
    return pd.concat(parts, ignore_index=True)


def judge_serving(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Compute errors of the predictions of measured runs.

    Args:
        frame: From :func:`evaluate_serving`.
        table: The table, whose models and loads define the sets of configurations to compare.
    """
    own = judged_rows(frame)
    keys = ["metric", "source", "device", "model_group"]
    by_group = own.groupby(keys, dropna=False).agg(**FIGURES).reset_index()
    plans = configuration_choice(frame, table)
    expressed = frame[[name for name, _ in COLUMNS]].notna().any(axis=1)
    overall: dict[str, float] = {"rows": float(len(frame)), "expressed": float(expressed.mean())}
    groups = by_group.groupby("metric")[["median_ape", "coverage"]].mean().add_suffix("_groups")
    figures = own.groupby("metric").agg(**FIGURES).drop(columns="bias").join(groups)
    for metric, row in figures.iterrows():
        overall |= {f"{metric}/{name}": float(value) for name, value in row.items()}
    return Judged(by_group, overall | choice_figures(plans), plans)


def configuration_choice(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Compute the regret of the configuration predicted best, and the rank correlation.

    Configurations of a model on a device with equal lengths are compared by tokens per second and
    GPU, which are derived from latencies and concurrency if only those were measured.

    Returns:
        For each model and load with at least three configurations: ``plans``, ``regret`` (of the
        one predicted best relative to the best) and Kendall's ``tau``.
    """
    table = table.reset_index(drop=True)
    asked = frame[frame["out_tok_s_per_gpu"].notna()]
    measured = _measured_rate(asked, table.loc[asked.index])
    # Inverse rates, because ``choice`` compares times.
    return choice(table, SAME, 1.0 / asked["out_tok_s_per_gpu"], asked["n_gpus"] / measured)


def _measured_rate(frame: pd.DataFrame, table: pd.DataFrame) -> np.ndarray:
    """Measured tokens per second, or those derived from the latencies of a closed loop."""
    rate = frame["measured_out_tok_s"].to_numpy(float)
    if not {"concurrency", "osl"} <= set(table):
        return rate
    output = table.get("osl_mean", table["osl"]).fillna(table["osl"]).to_numpy(float)
    closed = (table["load"] == "closed").to_numpy()
    seconds = frame["measured_ttft_ms"] + frame["measured_tpot_ms"] * (output - 1.0)
    made = table["concurrency"].to_numpy(float) * output / seconds.to_numpy(float) * 1e3
    return np.where(np.isnan(rate) & closed, made, rate)


def run_evaluate_serving(console: Console, settings: TableSettings) -> Judged:
    """Predict every row of a table of serving runs, and print the errors of the measured ones."""
    table = read_cases(settings.table, "serving")
    model = ServingModel.find(settings.model)
    with counting("runs") as show:
        frame, judged, model = evaluate_serving(
            table,
            model,
            load_serving_operators(),
            folder=settings.table.parent,
            calibrate=settings.calibrate,
            show=show,
            tell=partial(console.print, highlight=False, soft_wrap=True),
        )
    write_predictions(console, frame, settings.out, "rows")
    if len(judged.by_group):
        print_judged(console, judged, "measured serving", overall_lines(judged))
    wrote(settings.out, f"{len(frame)} rows")
    if settings.track and len(judged.by_group):
        params = {"table": str(settings.table), "model": settings.model}
        log_judged(console, judged, "evaluate-serving", params)
    return judged


def overall_lines(judged: Judged) -> list[str]:
    """Summarise the figures over all groups."""
    o = judged.overall
    lines = []
    for metric in dict.fromkeys(judged.by_group["metric"]):
        lines.append(
            f"{metric}: {o[f'{metric}/rows']:.0f} rows, median error "
            f"{100 * o[f'{metric}/median_ape']:.1f} %, mean {100 * o[f'{metric}/mape']:.1f} %; "
            f"mean over groups of the median {100 * o[f'{metric}/median_ape_groups']:.1f} %; "
            f"{100 * o[f'{metric}/coverage']:.0f} % inside the 90 % interval"
        )
    lines.append(f"{100 * o['expressed']:.1f} % of {o['rows']:.0f} rows can be predicted")
    return lines + judged.choice_sentence(f"choice over {len(judged.choice)} models and loads")
