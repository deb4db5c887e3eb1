"""Adapt the model of serving to one's own stack: host time, efficiency, memory."""

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
from ..measured.calibration_samples import check_unseen, far_off
from .rows import FEWEST, Tell, above_floor, observer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ..settings import TableSettings

#: Name of the machines of rows that do not say whose they are.
OWN = "own"
#: Figures that are compared with predictions, in words.
_FIGURE = {"tpot": "time of a further token", "per_token": "time of an output token in all"}
#: Column with the tokens that the cache of an engine holds, as vLLM and SGLang log at start.
CACHE = "kv_cache_tokens"


def calibrate_serving(
    table: pd.DataFrame,
    operators: OpModel | None,
    model: ServingModel,
    folder: Path,
    tell: Tell = lambda text: None,
) -> tuple[ServingModel, pd.DataFrame]:
    """Learn of one's own runs, with errors before and after.

    Args:
        table: As :func:`~opcast.predict.cluster.case_table.read_cases` gives; its
            ``kv_cache_tokens``, where given, say how much of the memory the engines use.
        operators: Model of library operators; ``None`` for rooflines.
        model: That is adapted.
        folder: That the table's traces are in.
        tell: Told of rows and answers that are not learned from, and why.

    Returns:
        The adapted model, and for each metric median absolute errors: ``before``, ``after``, and
        ``unseen``, of each run when it was not learned from.

    Raises:
        DatasetError: No row has an answer and can be expressed, or rows are of several machines.
    """
    table = table.copy()
    said = table["source"] if "source" in table else pd.Series(OWN, index=table.index)
    table["source"] = said.fillna(OWN).replace("", OWN)
    rows, reasons = serving_rows(table, folder)
    for name, reason in zip(table["id"], reasons, strict=True):
        if reason:
            tell(f"{name}: not used: {reason}")
    own = above_floor([row for row in rows if row is not None], tell)
    own = [row for row in own if row.measured]
    if not own:
        why = next((reason for reason in reasons if reason), "none has ttft_ms, tpot_ms, out_tok_s")
        raise DatasetError(f"no row to calibrate on: {why}", hint="docs/serving.md lists columns")
    shapes = {row.deployment.model.shape(): row.group for row in own} | model.provenance.shapes
    known = replace(model.provenance, shapes=shapes)
    predictor = ServingPredictor(operators, replace(model, provenance=known))
    contexts = [predictor.context(row.deployment) for row in own]
    clusters = sorted({context["cluster"] for context in contexts})
    devices = [cluster.split("|")[1] for cluster in clusters]
    if len(set(devices)) < len(devices):
        raise DatasetError(
            f"runs of several sources: {', '.join(clusters)}",
            hint="one file for each stack, or the same source in all rows",
        )
    seen = observer(predictor, own)(model.effects)
    seen = _near(own, seen, tell)
    linear = linear_serving(seen, contexts, model.effects)
    effects = linear.adapted()
    before, after = linear.errors(model.effects), linear.errors(effects)
    left = np.full(len(before), np.nan)
    for row in np.unique(seen.rows) if len(own) > 1 else []:
        judged = seen.rows == row
        others = Observed(*(column[~judged] for column in seen))
        if len(others.rows):
            without = linear_serving(others, contexts, model.effects).adapted()
            left[judged] = linear.errors(without)[judged]
    errors = pd.DataFrame({"metric": seen.metrics})
    for name, logs in (("before", before), ("after", after), ("unseen", left)):
        errors[name] = np.abs(np.expm1(-logs))
    figures = errors.groupby("metric").median().reset_index()
    figures.insert(1, "runs", errors.groupby("metric").size().to_numpy())
    # A run that is the only one was judged by the model as it was.
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
    """A model with the effects of its rows' clusters, of rows that nothing speaks against.

    Args:
        rows: Of a table's own splits.
        operators: Model of library operators; ``None`` for rooflines.
        model: That is adapted.
        tell: Told of answers that are not learned from, and why.

    Raises:
        DatasetError: No row has an answer that can be learned from.
    """
    own = [row for row in above_floor(rows, tell) if row.measured]
    if not own:
        raise DatasetError(
            "no row to calibrate on",
            hint="give rows a split that begins with calib, and a latency or throughput",
        )
    predictor = ServingPredictor(operators, model)
    contexts = [predictor.context(row.deployment) for row in own]
    seen = _near(own, observer(predictor, own)(model.effects), tell)
    return replace(model, effects=linear_serving(seen, contexts, model.effects).adapted())


def _near(rows: Sequence[ServingRow], seen: Observed, tell: Tell) -> Observed:
    """Answers near what is predicted; first tokens, which may wait for others, are all kept.

    Published ones are up to 400 times off.

    Raises:
        DatasetError: None is near.
    """
    why = [
        ""
        if metric == "ttft"
        else far_off(f"{rows[at].id}: {_FIGURE[metric]} of {np.exp(own):.3g} s", own - said)
        for at, metric, own, said in zip(
            seen.rows, seen.metrics, seen.measured, seen.simulated, strict=True
        )
    ]
    for reason in filter(None, why):
        tell(reason)
    near = np.array([not reason for reason in why])
    if not near.any():
        raise DatasetError(
            "no row to calibrate on: all are far from what is predicted",
            hint="docs/serving.md lists columns and units",
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
    """Model groups of a cluster's runs, and ends of their intervals."""
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
    """Share of the memory that the engines of each cluster use; 0 where no row says it."""
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
    """Adapt to a table of one's own runs, print errors before and after, and save the model.

    Raises:
        DatasetError: No row has an answer and can be expressed.
        WorseModelError: The adapted model is worse on runs that it did not learn from.
    """
    model, figures = calibrate_serving(
        read_cases(settings.table, "serving"),
        load_serving_operators(),
        ServingModel.find(settings.model),
        settings.table.parent,
        partial(console.print, highlight=False, soft_wrap=True),
    )
    print_frame(console, in_percent(figures), "own runs, median errors in %")
    few = int(figures["runs"].max())
    if few < FEWEST:
        console.print(
            f"{few} runs are few: from {FEWEST} on, host time and efficiency can be told apart, "
            "and intervals of runs that were left out hold",
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
