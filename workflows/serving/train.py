"""Learn a model of serving from a table of measured runs, and what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    METRICS,
    REQUEST_TIME,
    Known,
    ServingModel,
    group_key,
)
from ...predict.cluster.case_table import read_cases, read_rows
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_load import draw
from ...predict.cluster.serving_table import ServingRow, serving_row
from ...predict.operator.serving_operators import load_serving_operators
from ...simulate.serving.floor import EngineFloor
from ..judging import few_of_each, keep_learned, named_folds
from .evaluate import measured_seconds, observer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ..settings import ServingSettings

#: Words in ``flags`` of rows that are not learned from: their sources or physics contradict them.
FAULTY = "impossible|suspicious|beyond the context|prefix_reuse|parallelism_unreliable"
#: Columns whose absence leaves open how many workers share the requests, where ``prefill_tp`` says
#: that some run prompts alone.
COUNTS = ("prefill_workers", "decode_workers")
#: Largest share of the dense peak that a run of requests can multiply at. A power-capped product in
#: fp8 holds about two thirds of it; the busiest published runs are at 0.61 (whole batches on A100).
MOST_BUSY = 0.7
#: Share of a set's rows from which, if they are beyond that, none of the set is learned from.
WRONG = 0.05
#: Most rows of a source, model, framework and device that are learned from.
MOST_ROWS = 25

#: What is left out, and the level of a context that it is.
LEFT_OUT = (
    ("model_group", "group"),
    ("framework", "framework"),
    ("device", "device"),
    ("architecture", "architecture"),
    ("source", "source"),
)
#: What is left out together: rows of both are judged, rows of either are not learned from.
TOGETHER = (
    ("device", "framework"),
    ("device", "source"),
    ("device", "model_group"),
    ("architecture", "source"),
    ("source", "model_group"),
)

#: Begins columns that say whether a latency lies inside its interval.
INSIDE = "inside "

Tell = Callable[[str], None]


def train_serving(
    table: pd.DataFrame,
    operators: OpModel | None,
    tell: Tell,
    folder: Path,
    seed: int = 0,
    start: ServingModel | None = None,
) -> tuple[ServingModel, pd.DataFrame]:
    """Learn a model of serving, with errors of what was left out.

    Args:
        table: As :func:`~opcast.predict.cluster.case_table.read_cases` gives.
        operators: Model of library operators; ``None`` for rooflines.
        tell: Told of progress.
        folder: That the table's traces are in.
        seed: Of the folds.
        start: Model whose effects the fit starts from; ``None`` for no effects.

    Returns:
        The model, and for every measured latency its logarithmic errors when left out: ``id``,
        ``metric``, ``group``, ``queued``, a column for each way of leaving out, and by
        :data:`INSIDE` and that way whether it lies inside the interval made without its row.

    Raises:
        DatasetError: No row has an answer and can be expressed.
    """
    flags = table.get("flags", pd.Series("", index=table.index)).fillna("")
    good = table[~flags.str.contains(FAULTY) & counted(table)]
    read, _ = read_rows(good, partial(serving_row, folder=folder))
    rows = [row for row in read if row is not None and row.measured]
    if not rows:
        raise DatasetError(
            "no row with an answer can be expressed", hint="ttft_ms, tpot_ms or out_tok_s"
        )
    rows = possible_rows(rows, tell)
    # A group counts by the root of its rows, so that more of them take time and teach little.
    rows = [rows[at] for at in few_of_each(list(map(_set_of, rows)), MOST_ROWS, seed)]
    measured = _measured(rows)
    predictor = ServingPredictor(
        operators,
        ServingModel(start.effects if start else ServingEffects(), provenance=measured),
        tables=len(rows),
    )
    contexts = [predictor.context(row.deployment) for row in rows]
    owners = [f"{context['source']}|{context['architecture']}" for context in contexts]
    parts = [f"{context['source']}|{group_key(context)}" for context in contexts]
    groups = np.array([owners, parts]).T
    tell(f"{len(rows)} measured rows")
    began = predictor.model.effects
    effects, seen = fit_serving(observer(predictor, rows), contexts, groups, tell, began)
    linear = linear_serving(seen, contexts, effects)
    sure = solve_serving(linear, seen, groups, np.ones(len(seen.rows), bool)).deviations
    model = ServingModel(ServingEffects(effects.values, sure))
    left = {"fit": linear.errors(effects)}
    # Scores by what was left out: its name, and the latencies.
    scores: list[tuple[str, list[int], list[Score]]] = []
    outputs = [row.closed_output() for row in rows]
    requests: list[Score] = []
    for part in left_outs(contexts, seed):
        judge, learn = part.judge[seen.rows], part.learn[seen.rows]
        if not judge.any() or not learn.any():
            continue
        if part.name not in left:
            tell(f"leaving out each {part.name}")
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
    tell("intervals")
    left |= _inside(seen, scores)
    judged = (score for _, _, own in scores for score in own)
    model.ends = serving_ends([*judged, *requests])
    model.provenance = _learned(measured, seen, contexts, np.ones(len(seen.rows), bool))
    frame = pd.DataFrame(
        {
            "id": [rows[row].id for row in seen.rows],
            "metric": seen.metrics,
            "group": groups[seen.rows, 1],
            "queued": seen.queued,
            **left,
        }
    )
    return model, frame


def counted(table: pd.DataFrame) -> pd.Series:
    """Which rows leave nothing open of how many workers there were.

    Of workers that run prompts alone, as of those behind them, one takes the time of all requests
    and ten that of a tenth each: a number that is assumed says nothing of what anything costs.
    """
    known = table.reindex(columns=[*COUNTS, "prefill_tp"]).notna()
    return known[list(COUNTS)].all(axis=1) | ~known["prefill_tp"]


def _set_of(row: ServingRow) -> tuple[str, str, str, str]:
    """Whose runs of what on what a row is one of."""
    own = row.deployment
    return own.source, row.group, own.framework, own.device


def possible_rows(rows: Sequence[ServingRow], tell: Tell) -> list[ServingRow]:
    """Rows that devices can have run as fast as they say.

    Those of a set of runs were measured alike: where more than one in twenty had its prompts in a
    cache, or another load than it says, all of the set may have had.
    """
    wrong = [busy_share(row) > MOST_BUSY for row in rows]
    keys = list(map(_set_of, rows))
    all_rows, faulty = (
        Counter(keys),
        Counter(key for key, bad in zip(keys, wrong, strict=True) if bad),
    )
    sets = {key for key, count in faulty.items() if count > WRONG * all_rows[key]}
    if sets:
        names = "; ".join(sorted(", ".join(key) for key in sets))
        tell(f"not learned from, since no device runs prompts as fast as these say: {names}")
    kept = [not bad and key not in sets for key, bad in zip(keys, wrong, strict=True)]
    return [row for row, good in zip(rows, kept, strict=True) if good]


def busy_share(row: ServingRow) -> float:
    """Share of a row's time that its prompts and outputs take at the dense peak of its devices.

    By its own throughput, or by Little's law of its latencies; 0 where neither tells. Ranks that
    attend to requests of their own count as if they shared all work, so that it is a least one.
    """
    own, load = row.deployment, draw(row.spec)
    workers, outputs = own.prefill or own.engine, load.outputs.mean()
    first, later, each = (measured_seconds(row, metric) for metric in METRICS)
    seconds = first + later * (outputs - 1.0)
    closed = row.spec.concurrency > 0 and seconds > 0.0
    rate = row.spec.concurrency / seconds if closed else 1.0 / (each * outputs)
    floor = EngineFloor(own.model, workers.plan, own.spec)
    tokens = np.array([load.prompts.mean() + (0.0 if own.prefill else outputs)])
    least = float(floor.first_token(tokens, np.zeros(1))[0])
    if not np.isfinite(rate) or least <= floor.reading:
        return 0.0
    return float(rate * least / (workers.count * workers.plan.dp))


def _score(
    seen: Observed,
    contexts: Sequence[Context],
    groups: np.ndarray,
    known: ServingModel,
    at: int,
    error: float,
    metric: str = "",
) -> Score:
    """Error of a latency by a model that lacks it."""
    row = seen.rows[at]
    context, metric = contexts[row], metric or str(seen.metrics[at])
    key = kind_of(metric, float(seen.queued[at]), context)
    key = key._replace(elsewhere=not known.measured_on(context))
    spread = known.effects.spread(context, metric, seen.shares[at])
    return Score(key, known.tier(context), context, str(groups[row]), at, error, spread)


def _inside(
    seen: Observed, scores: Sequence[tuple[str, list[int], list[Score]]]
) -> dict[str, np.ndarray]:
    """Whether latencies lie inside intervals that were made without any error of their rows.

    Returns:
        By ``inside``, a space and what was left out: 1, 0, or NaN where it was not judged.
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
        column = found.setdefault(f"{INSIDE}{name}", np.full(len(seen.rows), np.nan))
        for place, score in zip(at, own, strict=True):
            metric, queued = str(seen.metrics[place]), float(seen.queued[place])
            here, known = not score.key.elsewhere, (score.tier, queued, score.context)
            low, high = ends.interval(metric, *known, score.spread, here)
            column[place] = low <= np.exp(score.error) <= high
    return found


def _measured(rows: Sequence[ServingRow]) -> Known:
    """Sources and devices, and model groups by the sizes of their models: those of most rows."""
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
    """What was learned from: model groups with engines and chips, and machines.

    A handful of runs does not tell how others of its model or on its machines lie, so that they do
    not count.
    """
    own = [contexts[row] for row in np.unique(seen.rows[learn])]
    groups = Counter(map(group_key, own))
    clusters = Counter(context["cluster"] for context in own if context["cluster"])
    vendors = tuple(sorted({context["vendor"] for context in own}))
    return replace(measured, groups=_often(groups), clusters=_often(clusters), vendors=vendors)


def _often(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name, rows in counts.items() if rows >= LEAST))


class LeftOut(NamedTuple):
    """What is left out once.

    Attributes:
        name: The way, such as ``device``.
        value: What, such as ``h100-sxm``.
        judge: Rows that are judged.
        learn: Rows that are learned from.
    """

    name: str
    value: str
    judge: np.ndarray
    learn: np.ndarray


def left_outs(contexts: Sequence[Context], seed: int = 0) -> Iterator[LeftOut]:
    """What is left out in turn.

    A fifth of the rows, model groups, frameworks, devices, generations, sources; devices together
    with all of a framework, a source or a model group.

    Args:
        contexts: Of the rows.
        seed: Of the fifths.
    """
    keys = {"row": named_folds(len(contexts), seed)} | {
        name: np.array([context[level] for context in contexts]) for name, level in LEFT_OUT
    }
    for name, key in keys.items():
        for value in np.unique(key):
            yield LeftOut(name, str(value), key == value, key != value)
    for first, second in TOGETHER:
        one, two = keys[first], keys[second]
        for here, own in sorted(set(zip(one.tolist(), two.tolist(), strict=True))):
            a, b = one == here, two == own
            if (a & b).sum() < min(LEAST, len(contexts) // 100):
                # Too few to tell an interval by; a large table has hundreds of them.
                continue
            yield LeftOut(f"{first} and {second}", f"{here} {own}", a & b, ~a & ~b)


def left_out_serving(left: pd.DataFrame) -> pd.DataFrame:
    """Errors by metric and what was left out.

    Args:
        left: From :func:`train_serving`.

    Returns:
        ``left_out``, ``metric``, ``rows``, ``median_ape``, ``mape``, ``median_ape_groups`` (the
        mean over groups of their medians), and ``coverage`` of the 90 % intervals.
    """
    records = []
    known = ("id", "metric", "group", "queued")
    for name in (c for c in left.columns if c not in known and not c.startswith(INSIDE)):
        for metric, part in left.groupby("metric"):
            error = np.abs(np.expm1(-part[name]))
            inside = part.get(f"{INSIDE}{name}")
            records.append(
                {
                    "left_out": name,
                    "metric": metric,
                    "rows": int(error.notna().sum()),
                    "median_ape": float(error.median()),
                    "mape": float(error.mean()),
                    "median_ape_groups": float(error.groupby(part["group"]).median().mean()),
                    "coverage": float("nan") if inside is None else float(inside.mean()),
                }
            )
    return pd.DataFrame(records)


def run_train_serving(console: Console, settings: ServingSettings) -> ServingModel:
    """Learn from a table of serving, print errors of what was left out, save and track."""
    table = read_cases(settings.table, "serving")
    tell = partial(console.print, highlight=False)
    start = ServingModel.find(settings.start) if settings.start else None
    model, left = train_serving(
        table, load_serving_operators(), tell, settings.table.parent, settings.seed, start
    )
    figures = left_out_serving(left)
    print_frame(console, in_percent(figures), "measured serving that was left out, errors in %")
    errors = figures[["left_out", "metric", "median_ape"]]
    keep_learned(console, settings, model, len(model.effects.values), len(left), figures, errors)
    return model
