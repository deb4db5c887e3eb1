"""Train a serving model on tables of measured runs, with cross-validated errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

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
from ..judging import few_of_each, keep_learned, keep_left_out, named_folds
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
#: Prefixes of columns with the coverage of intervals and their width, upper over lower bound.
INSIDE, WIDTH = "inside ", "width "


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
        The model, and a row for every measured latency: ``id``, ``metric``, ``group``, ``queued``,
        ``measured`` seconds, and for each way of holding out the logarithmic error, and in a column
        prefixed with :data:`INSIDE` whether an interval calibrated without the row covers it, and
        with :data:`WIDTH` its width.

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
    began, own = predictor.model.effects, [contexts[at] for at in few]
    effects, _ = fit_serving(observe, own, groups[few], tell, began)
    tell("simulating all rows")
    seen = observer(predictor, rows)(effects)
    drawn = np.isin(seen.rows, few)
    linear = linear_serving(seen, contexts, effects)
    sure = solve_serving(linear, seen, groups, drawn).deviations
    model = ServingModel(ServingEffects(effects.values, sure))
    left = {"fit": linear.errors(effects)}
    # For each held-out part: its name, the tested latencies, and their scores.
    scores: list[tuple[str, list[int], list[Score]]] = []
    outputs = [row.closed_output() for row in rows]
    requests: list[Score] = []
    for part in left_outs(contexts, names, seed):
        judge, learn = part.judge[seen.rows], part.learn[seen.rows] & drawn
        if not judge.any() or not learn.any():
            continue
        if part.name not in left:
            tell(f"holding out each {part.name}")
            left[part.name] = np.full(len(seen.rows), np.nan)
        without = solve_serving(linear, seen, groups, learn)
        errors = linear.errors(without)
        np.copyto(left[part.name], errors, where=judge)
        known = ServingModel(without, provenance=_learned(measured, seen, contexts, learn))
        at = np.flatnonzero(judge).tolist()
        score = partial(_score, seen, contexts, groups[:, 1], known)
        scores.append((part.name, at, [score(i, float(errors[i])) for i in at]))
        whole = request_errors(seen, errors, outputs)
        requests += [score(i, e, REQUEST_TIME) for i, e in whole.items() if judge[i]]
    tell("calibrating intervals")
    left |= _inside(seen, scores)
    judged = (score for _, _, own in scores for score in own)
    model.ends = serving_ends([*judged, *requests])
    model.provenance = _learned(measured, seen, contexts, drawn)
    frame = pd.DataFrame(
        {
            "id": [names[row] for row in seen.rows],
            "metric": seen.metrics,
            "group": groups[seen.rows, 1],
            "queued": seen.queued,
            "measured": np.exp(seen.measured),
            **left,
        }
    )
    return model, frame


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


def _inside(
    seen: Observed, scores: Sequence[tuple[str, list[int], list[Score]]]
) -> dict[str, np.ndarray]:
    """Whether intervals calibrated without the errors of a latency's row cover it, and widths.

    Returns:
        1, 0, or NaN if not tested, by :data:`INSIDE` followed by what was held out; widths by
        :data:`WIDTH`.
    """
    found: dict[str, np.ndarray] = {}
    for name, at, own in scores:
        judged = set(seen.rows[at].tolist())
        others = (
            score
            for _, places, part in scores
            for place, score in zip(places, part, strict=True)
            if seen.rows[place] not in judged
        )
        ends = ServingModel(ends=serving_ends(others))
        inside, width = (
            found.setdefault(f"{prefix}{name}", np.full(len(seen.rows), np.nan))
            for prefix in (INSIDE, WIDTH)
        )
        for place, score in zip(at, own, strict=True):
            metric, queued = str(seen.metrics[place]), float(seen.queued[place])
            known = score.tier, queued, score.context
            low, high = ends.interval(metric, *known, score.spread, score.key.place)
            inside[place], width[place] = low <= np.exp(score.error) <= high, high / low
    return found


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


class LeftOut(NamedTuple):
    """A held-out part of the rows.

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


def left_outs(
    contexts: Sequence[Context], names: Sequence[str], seed: int = 0
) -> Iterator[LeftOut]:
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
    for name, key in keys.items():
        for value in np.unique(key):
            yield LeftOut(name, str(value), key == value, key != value)
    for first, second in TOGETHER:
        one, two = keys[first], keys[second]
        for here, own in sorted(set(zip(one.tolist(), two.tolist(), strict=True))):
            a, b = one == here, two == own
            if (a & b).sum() < min(LEAST, len(contexts) // 100):
                # Too few to calibrate an interval.
                continue
            yield LeftOut(f"{first} and {second}", f"{here} {own}", a & b, ~a & ~b)


def _ways(left: pd.DataFrame) -> list[str]:
    """Columns of errors of :func:`train_serving`."""
    known = ("id", "metric", "group", "queued", "measured")
    other = (INSIDE, WIDTH)
    return [name for name in left.columns if name not in known and not name.startswith(other)]


def left_out_serving(left: pd.DataFrame) -> pd.DataFrame:
    """Held-out errors by metric and what was held out.

    Args:
        left: From :func:`train_serving`.

    Returns:
        ``left_out``, ``metric``, ``rows``, ``median_ape``, ``mape``, ``median_ape_groups`` (mean
        over groups of their medians), and ``coverage`` and median ``width`` (upper over lower
        bound) of the 90 % intervals.
    """
    records = []
    for name in _ways(left):
        for metric, part in left.groupby("metric"):
            error = np.abs(np.expm1(-part[name]))
            inside, width = (part.get(f"{prefix}{name}") for prefix in (INSIDE, WIDTH))
            records.append(
                {
                    "left_out": name,
                    "metric": metric,
                    "rows": int(error.notna().sum()),
                    "median_ape": float(error.median()),
                    "mape": float(error.mean()),
                    "median_ape_groups": float(error.groupby(part["group"]).median().mean()),
                    "coverage": float("nan") if inside is None else float(inside.mean()),
                    "width": float("nan") if width is None else float(width.median()),
                }
            )
    return pd.DataFrame(records)


def run_train_serving(console: Console, settings: TableSettings) -> ServingModel:
    """Train on tables of serving runs, print held-out errors, save and track."""
    tables = {file: read_cases(file, "serving") for file in settings.tables}
    tell = partial(console.print, highlight=False)
    start = ServingModel.find(settings.start) if settings.start else None
    model, left = train_serving(tables, load_serving_operators(), tell, settings.seed, start)
    figures = left_out_serving(left)
    print_frame(console, in_percent(figures), "held-out serving runs, errors in %")
    errors = figures[["left_out", "metric", "median_ape"]]
    keep_left_out(settings.left_out, left, [way for way in _ways(left) if way != "fit"])
    keep_learned(console, settings, model, len(model.effects.values), len(left), figures, errors)
    return model
