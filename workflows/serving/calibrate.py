"""Adapt the serving model to a serving stack: host time, efficiency, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.progress import wrote
from ...common.tables_text import in_percent, print_frame
from ...models.operators import OpModel
from ...models.serving.effects import (
    Context,
    Observed,
    linear_serving,
    request_errors,
)
from ...models.serving.ends import kind_of
from ...models.serving.model import (
    REQUEST_TIME,
    OwnStack,
    ServingModel,
    group_key,
    own_ends,
)
from ...predict.cluster.case_table import read_cases
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_engine import memory_share
from ...predict.cluster.serving_table import ServingRow, serving_rows
from ...predict.operator.serving_operators import load_serving_operators
from ..measured.calibration_samples import check_unseen, plausible
from .rows import FEWEST, Tell, above_floor, observer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ..settings import TableSettings

#: Source of rows that do not specify one.
OWN = "own"
#: Descriptions of metrics.
_FIGURE = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "per_token": "inverse throughput",
}
#: Column with the capacity of an engine's KV cache in tokens, which vLLM and SGLang log at start.
CACHE = "kv_cache_tokens"


def calibrate_serving(
    table: pd.DataFrame,
    operators: OpModel | None,
    model: ServingModel,
    folder: Path,
    tell: Tell = lambda text: None,
) -> tuple[ServingModel, pd.DataFrame]:
    """Adapt a serving model to measured runs of a stack.

    Args:
        table: Table from :func:`~opcast.predict.cluster.case_table.read_cases`; its optional
            column ``kv_cache_tokens`` determines the fraction of memory that the engines use.
        operators: Operator model; ``None`` for rooflines.
        model: The model to adapt.
        folder: Folder of the table's traces.
        tell: Called with a message for each row or measurement that is not used.

    Returns:
        The adapted model, and median absolute errors for each metric: ``before``, ``after``, and
        ``unseen``, with each run held out in turn.

    Raises:
        DatasetError: No measured row can be predicted, or the rows are of several stacks.
    """
    table = table.copy()
    source = table["source"] if "source" in table else pd.Series(OWN, index=table.index)
    table["source"] = source.fillna(OWN).replace("", OWN)
    rows, reasons = serving_rows(table, folder)
    for name, reason in zip(table["id"], reasons, strict=True):
        if reason:
            tell(f"{name}: not used: {reason}")
    own = above_floor([row for row in rows if row is not None], tell)
    own = [row for row in own if row.measured]
    if not own:
        why = next((reason for reason in reasons if reason), "none has ttft_ms, tpot_ms, out_tok_s")
        hint = "docs/serving.md describes the columns"
        raise DatasetError(f"no row to calibrate on: {why}", hint=hint)
    shapes = {row.deployment.model.shape(): row.group for row in own} | model.provenance.shapes
    known = replace(model.provenance, shapes=shapes)
    predictor = ServingPredictor(operators, replace(model, provenance=known))
    contexts = [predictor.context(row.deployment) for row in own]
    clusters = sorted({context["cluster"] for context in contexts})
    devices = [cluster.split("|")[1] for cluster in clusters]
    if len(set(devices)) < len(devices):
        raise DatasetError(
            f"runs of several sources: {', '.join(clusters)}",
            hint="give one file per stack, or the same source in all rows",
        )
    seen = observer(predictor, own)(model.effects)
    seen = _near(own, seen, tell)
    linear = linear_serving(seen, contexts, model.effects)
    effects = linear.adapted()
    before, after = linear.errors(model.effects), linear.errors(effects)
    left = linear.left_out(seen.rows)
    errors = pd.DataFrame({"metric": seen.metrics})
    for name, logs in (("before", before), ("after", after), ("unseen", left)):
        errors[name] = np.abs(np.expm1(-logs))
    figures = errors.groupby("metric").median().reset_index()
    figures.insert(1, "runs", errors.groupby("metric").size().to_numpy())
    # A single run cannot be held out; its error is that of the model before.
    left = np.where(np.isfinite(left), left, before)
    whole = request_errors(seen, left, [row.closed_output() for row in own])
    adapted = replace(model, effects=effects, provenance=known)
    stacks = {
        cluster: replace(_stack(cluster, adapted, seen, contexts, left, whole), memory=share)
        for cluster, share in zip(clusters, _memory(rows, table, predictor, clusters), strict=True)
    }
    return replace(adapted, provenance=replace(known, own=stacks)), figures


def calibrated(
    rows: Sequence[ServingRow], operators: OpModel | None, model: ServingModel, tell: Tell
) -> ServingModel:
    """Adapt a model to the plausible measurements of some rows.

    Args:
        rows: Rows of calibration splits.
        operators: Operator model; ``None`` for rooflines.
        model: The model to adapt.
        tell: Called with a message for each measurement that is not used.

    Raises:
        DatasetError: No row has a usable measurement.
    """
    own = [row for row in above_floor(rows, tell) if row.measured]
    if not own:
        raise DatasetError(
            "no row to calibrate on",
            hint="give rows with a latency or throughput a split that begins with calib",
        )
    predictor = ServingPredictor(operators, model)
    contexts = [predictor.context(row.deployment) for row in own]
    seen = _near(own, observer(predictor, own)(model.effects), tell)
    return replace(model, effects=linear_serving(seen, contexts, model.effects).adapted())


def _near(rows: Sequence[ServingRow], seen: Observed, tell: Tell) -> Observed:
    """Select plausible measurements; times to first token, which may include waiting, are all kept.

    Published times to first token are up to 400 times as long as predicted.

    Raises:
        DatasetError: No measurement is plausible.
    """
    names = [
        f"{rows[at].id}: {_FIGURE[metric]} of {np.exp(own):.3g} s"
        for at, metric, own in zip(seen.rows, seen.metrics, seen.measured, strict=True)
    ]
    logs = np.where(seen.metrics == "ttft", 0.0, seen.measured - seen.simulated)
    near = plausible(names, logs, tell)
    if not near.any():
        raise DatasetError(
            "no row to calibrate on: all differ implausibly from the predictions",
            hint="docs/serving.md describes columns and units",
        )
    return Observed(*(column[near] for column in seen))


def _stack(
    cluster: str,
    model: ServingModel,
    seen: Observed,
    contexts: Sequence[Context],
    left: np.ndarray,
    whole: Mapping[int, float],
) -> OwnStack:
    """Model groups of a cluster's runs, and the bounds of its intervals."""
    errors: dict[str, list[float]] = {}

    def add(metric: str, at: int, error: float) -> None:
        context = contexts[seen.rows[at]]
        kind = kind_of(metric, float(seen.queued[at]), context).shared
        spread = model.effects.spread(context, metric, seen.shares[at])
        errors.setdefault(str(kind), []).append(error / spread)

    mine = [at for at, row in enumerate(seen.rows) if contexts[row]["cluster"] == cluster]
    for at in mine:
        add(str(seen.metrics[at]), at, float(left[at]))
        if at in whole:
            add(REQUEST_TIME, at, whole[at])
    groups = tuple(sorted({group_key(contexts[row]) for row in seen.rows[mine]}))
    return OwnStack(groups=groups, ends=own_ends(model, errors))


def _memory(
    rows: Sequence[ServingRow | None],
    table: pd.DataFrame,
    predictor: ServingPredictor,
    clusters: Sequence[str],
) -> list[float]:
    """Fraction of the memory that the engines of each cluster use; 0 if unknown."""
    if CACHE not in table:
        return [0.0] * len(clusters)
    found: dict[str, list[float]] = {}
    for row, tokens in zip(rows, pd.to_numeric(table[CACHE], errors="coerce"), strict=True):
        if row is None or not tokens > 0:
            continue
        own = row.deployment
        share = float(np.clip(memory_share(own, own.engine, float(tokens)), 0.05, 1.0))
        found.setdefault(predictor.context(own)["cluster"], []).append(share)
    return [float(np.median(found[c])) if c in found else 0.0 for c in clusters]


def run_calibrate_serving(console: Console, settings: TableSettings) -> ServingModel:
    """Adapt a serving model to a table of runs, print errors before and after, and save it.

    Raises:
        DatasetError: No measured row can be predicted.
        WorseModelError: The adapted model is worse on held-out runs.
    """
    model, figures = calibrate_serving(
        read_cases(settings.table, "serving"),
        load_serving_operators(),
        ServingModel.find(settings.model),
        settings.table.parent,
        partial(console.print, highlight=False, soft_wrap=True),
    )
    print_frame(console, in_percent(figures), "calibration runs, median errors in %")
    few = int(figures["runs"].max())
    if few < FEWEST:
        console.print(
            f"{few} runs are few: at least {FEWEST} are needed to separate host time from "
            "efficiency, and for intervals that cover held-out runs",
            soft_wrap=True,
        )
    for name, stack in model.provenance.own.items():
        if stack.memory:
            console.print(f"{name}: {stack.memory:.1%} of the memory is used")
    judged = figures.dropna(subset=["unseen"])
    if len(judged):
        weights = judged["runs"]
        before, after = (
            float(np.average(judged[name], weights=weights)) for name in ("before", "unseen")
        )
        check_unseen(console, f"{few} runs", before, after)
    model.save(settings.out)
    wrote(settings.out, f"use it with --serving {settings.out}")
    return model
