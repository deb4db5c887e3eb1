"""Train a serving model on tables of measured runs, with cross-validated errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.tables_text import in_percent, print_frame
from ...models.operators import OpModel
from ...models.serving.effects import (
    Context,
    Observed,
    ServingEffects,
    fit_serving,
    linear_serving,
    request_errors,
    solve_serving,
)
from ...models.serving.ends import LEAST, Score, kind_of, serving_ends
from ...models.serving.model import (
    REQUEST_TIME,
    Known,
    ServingModel,
    chip_key,
    group_key,
)
from ...predict.cluster.case_table import Cells, read_cases
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_table import ServingRow, serving_rows
from ...predict.operator.serving_operators import load_serving_operators
from ..judging import (
    WIDTHS,
    Part,
    few_of_each,
    keep_learned,
    left_out_rows,
    named_folds,
    parts_of,
)
from .rows import (
    FAULTY,
    FEWEST,
    MOST_ROWS,
    Tell,
    above_floor,
    observer,
    possible_rows,
    set_of,
    settled_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ..settings import TableSettings

#: What is held out, and the corresponding level of a context.
LEFT_OUT = (
    ("model_group", "group"),
    ("framework", "framework"),
    ("device", "device"),
    ("architecture", "architecture"),
    ("source", "source"),
)
#: Pairs held out together: rows with both values are tested, rows with either are not trained on.
TOGETHER = (
    ("device", "framework"),
    ("device", "source"),
    ("device", "model_group"),
    ("architecture", "source"),
    ("source", "model_group"),
)
#: Levels that define a set of runs.
SET = ("source", "device", "framework", "group")


def train_serving(
    tables: Mapping[Path, pd.DataFrame],
    operators: OpModel | None,
    tell: Tell,
    seed: int = 0,
    start: ServingModel | None = None,
) -> tuple[ServingModel, pd.DataFrame]:
    """Train a serving model, and compute its errors on held-out runs.

    Args:
        tables: Tables from :func:`~opcast.predict.cluster.case_table.read_cases` by file; traces
            are in the folder of the file.
        operators: Operator model; ``None`` for rooflines.
        tell: Called with progress messages.
        seed: Random seed of the folds.
        start: Model to start training from; ``None`` for no effects.

    Returns:
        The model, and the latencies as from :func:`~opcast.workflows.judging.left_out_rows`, with
        intervals that are calibrated without their rows; ``fit`` if not held out, without
        intervals.

    Raises:
        DatasetError: No measured row can be predicted.
    """
    rows = [row for file, table in tables.items() for row in _good_rows(table, file.parent)]
    if not rows:
        raise DatasetError(
            "no measured row can be predicted", hint="give ttft_ms, tpot_ms or out_tok_s"
        )
    rows = [row for row in above_floor(possible_rows(rows, tell), tell) if row.measured]
    names = [row.id for row in rows]
    few = few_of_each(map(set_of, rows), names, MOST_ROWS, seed)
    measured = _measured(rows)
    predictor = ServingPredictor(
        operators,
        ServingModel(start.effects if start else ServingEffects(), provenance=measured),
        tables=len(few),
    )
    rows = settled_rows(predictor, rows, tell)
    contexts = [predictor.context(row.deployment) for row in rows]
    owners = [f"{context['source']}|{context['architecture']}" for context in contexts]
    parts = [f"{context['source']}|{group_key(context)}" for context in contexts]
    groups = np.array([owners, parts]).T
    tell(f"{len(rows)} measured rows, of which {len(few)} are learned from")
    observe = observer(predictor, [rows[at] for at in few])
    drawn_of = [contexts[at] for at in few]
    effects, _ = fit_serving(observe, drawn_of, groups[few], tell, predictor.model.effects)
    tell("simulating all rows")
    seen = observer(predictor, rows)(effects)
    drawn = np.isin(seen.rows, few)
    linear = linear_serving(seen, contexts, effects)
    sure = solve_serving(linear, seen, groups, drawn).deviations
    model = ServingModel(ServingEffects(effects.values, sure))
    left = {"fit": np.full((len(seen.rows), 3), np.nan)}
    left["fit"][:, 0] = linear.errors(effects)
    # For each held-out part: its name, and the scores of the tested latencies.
    scores: list[tuple[str, list[Score]]] = []
    outputs = [row.closed_output() for row in rows]
    requests: list[Score] = []
    for part in left_outs(contexts, names, seed):
        judge, learn = part.judge[seen.rows], part.learn[seen.rows] & drawn
        if not judge.any() or not learn.any():
            continue
        if part.name not in left:
            tell(f"holding out each {part.name}")
            left[part.name] = np.full((len(seen.rows), 3), np.nan)
        without = solve_serving(linear, seen, groups, learn)
        errors = linear.errors(without)
        left[part.name][judge, 0] = errors[judge]
        known = ServingModel(without, provenance=_learned(measured, seen, contexts, learn))
        score = partial(_score, seen, contexts, groups[:, 1], known)
        own = [score(i, float(errors[i])) for i in np.flatnonzero(judge).tolist()]
        scores.append((part.name, own))
        whole = request_errors(seen, errors, outputs)
        requests += [score(i, e, REQUEST_TIME) for i, e in whole.items() if judge[i]]
    tell("calibrating intervals")
    _bound(left, seen, scores)
    judged = (score for _, own in scores for score in own)
    model.ends = serving_ends([*judged, *requests])
    model.provenance = _learned(measured, seen, contexts, drawn)
    frame = pd.DataFrame(
        {
            "id": [names[row] for row in seen.rows],
            "metric": seen.metrics,
            "group": groups[seen.rows, 1],
            "measured": np.exp(seen.measured),
        }
    )
    return model, left_out_rows(frame, left)


def _good_rows(table: pd.DataFrame, folder: Path) -> list[ServingRow]:
    """Measured rows of a table that are not flagged as faulty."""
    cells = (Cells({str(k): v for k, v in row.items()}) for row in table.to_dict("records"))
    flags = pd.Series([own.text("flags") for own in cells], table.index, dtype=str)
    read, _ = serving_rows(table[~flags.str.contains(FAULTY)], folder)
    return [row for row in read if row is not None and row.measured]


def _score(
    seen: Observed,
    contexts: Sequence[Context],
    groups: np.ndarray,
    known: ServingModel,
    at: int,
    error: float,
    metric: str = "",
) -> Score:
    """Score of a latency by a model that was trained without it."""
    row = seen.rows[at]
    context, metric = contexts[row], metric or str(seen.metrics[at])
    key = kind_of(metric, float(seen.queued[at]), context)
    tier = known.tier(context)
    key = key._replace(place=known.place(context, tier))
    spread = known.effects.spread(context, metric, seen.shares[at])
    return Score(key, tier, context, str(groups[row]), at, error, spread)


def _bound(
    left: Mapping[str, np.ndarray], seen: Observed, scores: Sequence[tuple[str, list[Score]]]
) -> None:
    """Set the bounds of intervals calibrated without the errors of each latency's row."""
    for name, own in scores:
        judged = set(seen.rows[[score.latency for score in own]].tolist())
        others = (s for _, part in scores for s in part if seen.rows[s.latency] not in judged)
        ends = ServingModel(ends=serving_ends(others))
        for score in own:
            metric, queued = str(seen.metrics[score.latency]), float(seen.queued[score.latency])
            known = score.tier, queued, score.context
            factors = ends.interval(metric, *known, score.spread, score.key.place)
            left[name][score.latency, 1:] = np.log(factors)


def _measured(rows: Sequence[ServingRow]) -> Known:
    """Sources and devices, and the most frequent model group for each shape of a model."""
    counts = Counter((row.deployment.model.shape(), row.group) for row in rows)
    return Known(
        rows=len(rows),
        shapes=dict(key for key, _ in sorted(counts.items(), key=lambda item: item[1])),
        sources=tuple(sorted({row.deployment.source for row in rows})),
        devices=tuple(sorted({row.deployment.device for row in rows})),
    )


def _learned(
    measured: Known, seen: Observed, contexts: Sequence[Context], learn: np.ndarray
) -> Known:
    """Record the model groups, clusters and chips with enough training runs."""
    own = [contexts[row] for row in np.unique(seen.rows[learn])]
    groups = Counter(map(group_key, own))
    clusters = Counter(context["cluster"] for context in own if context["cluster"])
    chips = Counter(map(chip_key, own))
    vendors = tuple(sorted({context["vendor"] for context in own}))
    return replace(
        measured,
        groups=_often(groups),
        clusters=_often(clusters),
        chips=_often(chips, FEWEST),
        vendors=vendors,
    )


def _often(counts: Counter[str], least: int = LEAST) -> tuple[str, ...]:
    return tuple(sorted(name for name, rows in counts.items() if rows >= least))


def left_outs(contexts: Sequence[Context], names: Sequence[str], seed: int = 0) -> Iterator[Part]:
    """Yield the parts to hold out.

    These are folds of rows and of sets of runs (:data:`SET`), each value of :data:`LEFT_OUT`, and
    each pair of values of :data:`TOGETHER`.

    Args:
        contexts: Contexts of the rows.
        names: Names of the rows.
        seed: Random seed of the folds.
    """
    sets = ["|".join(context[level] for level in SET) for context in contexts]
    every, of_set = np.unique(sets, return_inverse=True)
    keys = {"row": named_folds(names, seed), "set": named_folds(every, seed)[of_set]}
    keys |= {name: np.array([context[level] for context in contexts]) for name, level in LEFT_OUT}
    yield from parts_of(keys)
    for first, second in TOGETHER:
        one, two = keys[first], keys[second]
        for here, own in sorted(set(zip(one.tolist(), two.tolist(), strict=True))):
            a, b = one == here, two == own
            if (a & b).sum() < min(LEAST, len(contexts) // 100):
                # Too few to calibrate an interval.
                continue
            yield Part(f"{first} and {second}", f"{here} {own}", a & b, ~a & ~b)


def left_out_serving(left: pd.DataFrame) -> pd.DataFrame:
    """Held-out errors by metric and what was held out.

    Args:
        left: From :func:`train_serving`.

    Returns:
        ``left_out``, ``metric``, ``rows``, ``median_ape``, ``mape``, ``median_ape_groups`` (mean
        over groups of their medians), and ``coverage`` and median ``width`` (upper over lower
        bound) of the 90 % intervals.
    """
    by = ["left_out", "metric"]
    groups = left.groupby([*by, "group"], observed=False)["error"].median()
    found = left.groupby(by, observed=False).agg(**WIDTHS)
    found["median_ape_groups"] = groups.groupby(by, observed=False).mean()
    names = ["rows", "median_ape", "mape", "median_ape_groups", "coverage", "width"]
    return found[names].reset_index().astype({"left_out": str})


def run_train_serving(console: Console, settings: TableSettings) -> ServingModel:
    """Train on tables of serving runs, print held-out errors, save and track."""
    tables = {file: read_cases(file, "serving") for file in settings.tables}
    tell = partial(console.print, highlight=False)
    start = ServingModel.find(settings.start) if settings.start else None
    model, left = train_serving(tables, load_serving_operators(), tell, settings.seed, start)
    figures = left_out_serving(left)
    print_frame(console, in_percent(figures), "held-out serving runs, errors in %")
    errors = figures[["left_out", "metric", "median_ape"]]
    left = left[left["left_out"] != "fit"]
    keep_learned(console, settings, model, len(model.effects.values), left, figures, errors)
    return model
