"""Learn a model of serving from a table of measured runs, and what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.tables_text import in_percent, print_frame
from ...models.operators import OpModel
from ...models.serving.fit import (
    Observed,
    fit_serving,
    linear_errors,
    linear_serving,
    solve_serving,
)
from ...models.serving.model import ServingModel, group_key, kind_of, serving_ends
from ...models.tracking.mlflow_store import RunLog
from ...predict.cluster.serving_runs import ServingRuns, row_context
from ...predict.cluster.serving_table import ServingRow, read_serving, read_serving_rows
from ..training import digests, log_training
from .evaluate import observer, serving_operators

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ..settings import ServingSettings

#: Words in ``flags`` of rows that are not learned from: their sources or physics contradict them.
FAULTY = "impossible|suspicious|beyond the context|prefix_reuse"
#: Folds of the rows for errors of known models.
FOLDS = 5

Tell = Callable[[str], None]


def train_serving(
    table: pd.DataFrame,
    operators: OpModel | None,
    tell: Tell,
    folder: Path,
    seed: int = 0,
) -> tuple[ServingModel, pd.DataFrame]:
    """Learn a model of serving, with errors of what was left out.

    Args:
        table: As :func:`~opcast.predict.cluster.serving_table.read_serving` gives.
        operators: Model of library operators; ``None`` for rooflines.
        tell: Told of progress.
        folder: That the table's traces are in.
        seed: Of the folds.

    Returns:
        The model, and for every measured latency its logarithmic errors when left out: ``id``,
        ``metric``, ``group``, ``queued``, and a column for each kind of leaving out.

    Raises:
        DatasetError: No row has an answer and can be expressed.
    """
    flags = table.get("flags", pd.Series("", index=table.index)).fillna("")
    good = table[~flags.str.contains(FAULTY)]
    rows = [r for r in read_serving_rows(good, folder)[0] if r is not None and r.measured]
    if not rows:
        raise DatasetError(
            "no row with an answer can be expressed", hint="ttft_ms, tpot_ms or out_tok_s"
        )
    contexts = [row_context(row) for row in rows]
    groups = np.array(
        [f"{row.source}|{group_key(c)}" for row, c in zip(rows, contexts, strict=True)]
    )
    tell(f"{len(rows)} measured rows")
    runs = ServingRuns(rows, operators)
    effects, seen = fit_serving(observer(runs, contexts), contexts, groups, tell)
    model = ServingModel(effects)
    scores: dict[tuple[str, str], list[tuple[str, float]]] = {}
    left: dict[str, object] = {
        "id": [rows[row].id for row in seen.rows],
        "metric": seen.metrics,
        "group": groups[seen.rows],
        "queued": seen.queued,
    }
    everything = np.zeros(len(seen.rows), bool)
    linear = linear_serving(seen, contexts, effects)
    left["fit"] = linear_errors(seen, contexts, effects, effects, linear)
    for name, key in left_out_keys(rows, seed).items():
        tell(f"leaving out each {name}")
        errors = np.full(len(seen.rows), np.nan)
        for value in np.unique(key):
            judge = (key == value)[seen.rows]
            if judge.all():
                continue
            without = solve_serving(seen, contexts, groups, effects, ~judge, linear)
            errors[judge] = linear_errors(seen, contexts, effects, without, linear)[judge]
            part = ServingModel(without, provenance={"groups": _known(seen, contexts, ~judge)})
            for at in np.flatnonzero(judge):
                tier = part.tier(contexts[seen.rows[at]])
                kind = kind_of(
                    str(seen.metrics[at]), float(seen.queued[at]), contexts[seen.rows[at]]
                )
                own = (str(groups[seen.rows[at]]), float(errors[at]))
                scores.setdefault((kind, tier), []).append(own)
        left[name] = errors
    model.ends = serving_ends(scores)
    model.provenance = {
        "rows": len(rows),
        "groups": _known(seen, contexts, ~everything),
        "shapes": _shapes(rows),
        "sources": sorted({row.source for row in rows}),
        "devices": sorted({row.cluster.device for row in rows}),
        "vendors": sorted({context["vendor"] for context in contexts}),
    }
    return model, pd.DataFrame(left)


def _shapes(rows: Sequence[ServingRow]) -> dict[str, str]:
    """Model groups by the sizes of their models; of groups of equal sizes that of most rows."""
    counts = Counter((row.model.shape(), row.group) for row in rows)
    return dict(key for key, _ in sorted(counts.items(), key=lambda item: item[1]))


def _known(seen: Observed, contexts: Sequence[dict[str, str]], learn: np.ndarray) -> list[str]:
    """Model groups, engines and chips of the latencies that are learned from."""
    return sorted({group_key(contexts[row]) for row in seen.rows[learn]})


def left_out_keys(rows: Sequence[ServingRow], seed: int = 0) -> dict[str, np.ndarray]:
    """What is left out in turn: a fifth of the rows, model groups, frameworks, devices, sources."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return {
        "row": (order % FOLDS).astype(str),
        "model_group": np.array([row.group for row in rows]),
        "framework": np.array([row.framework for row in rows]),
        "device": np.array([row.cluster.device for row in rows]),
        "architecture": np.array([row_context(row)["architecture"] for row in rows]),
        "source": np.array([row.source for row in rows]),
    }


def left_out_serving(left: pd.DataFrame) -> pd.DataFrame:
    """Errors by metric and what was left out.

    Args:
        left: From :func:`train_serving`.

    Returns:
        ``left_out``, ``metric``, ``rows``, ``median_ape``, ``mape``, and ``median_groups``: the
        mean over groups of their medians.
    """
    records = []
    known = ("id", "metric", "group", "queued")
    for name in (c for c in left.columns if c not in known):
        for metric, part in left.groupby("metric"):
            error = np.abs(np.expm1(-part[name]))
            records.append(
                {
                    "left_out": name,
                    "metric": metric,
                    "rows": int(error.notna().sum()),
                    "median_ape": float(error.median()),
                    "mape": float(error.mean()),
                    "median_groups": float(error.groupby(part["group"]).median().mean()),
                }
            )
    return pd.DataFrame(records)


def run_train_serving(console: Console, settings: ServingSettings) -> ServingModel:
    """Learn from a table of serving, print errors of what was left out, save and track."""
    table = read_serving(settings.table)

    def tell(what: str) -> None:
        console.print(what, highlight=False)

    model, left = train_serving(
        table, serving_operators(), tell, settings.table.parent, settings.seed
    )
    figures = left_out_serving(left)
    print_frame(console, in_percent(figures), "measured serving that was left out, errors in %")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    model.save(settings.out)
    console.print(f"{settings.out}: {len(model.effects.values)} effects", highlight=False)
    if settings.track:
        metrics = {
            f"{row.left_out}/{row.metric}": float(str(row.median_ape))
            for row in figures.itertuples()
        }
        params = {"table": str(settings.table), "rows": len(left), "seed": settings.seed}
        run = RunLog(
            "serving",
            params,
            metrics,
            tables={"left_out": figures},
            datasets=digests(settings.table),
        )
        log_training(console, run, None)
    return model
