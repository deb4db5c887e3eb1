"""Learn from tables of measured training steps, predict them, and judge the predictions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.files import write_text
from ..common.tables_text import in_percent, percent, print_frame
from ..features.dataset import write_table
from ..models.steps.context import StepContext
from ..models.steps.effects import CLUSTER, PRIOR, WHOLE, EffectTable
from ..models.steps.fit import Slopes, adapt, fit_effects, slopes_at, solve
from ..models.steps.memory import fit_laws
from ..models.steps.model import StepModel, cluster_ends, interval_ends, shipped_steps
from ..models.steps.residual import (
    LEAST_RUNS,
    earns_its_place,
    fit_residual,
    stacked,
    unseen_corrections,
)
from ..models.tracking.mlflow_store import RunLog, tidy
from ..models.tracking.prediction_log import TrackedRun
from ..predict.cluster.step_runs import RowPrediction, StepRuns, fullest
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

#: Rows of a source on a device that effects are learned from; more of one source tell little new.
MOST_ROWS = 200
#: Tasks of a pipeline that are placed one by one while learning: long ones are extrapolated from
#: four rounds, which changes a step by less than 0.5 %.
PLACED = 256
#: Sources, numbers of runs and draws of the figures on adapting to a cluster.
CURVES = 3
RUNS = (0, 5, 10, 20)
DRAWS = 5
#: Folds of the rows for errors within known clusters.
FOLDS = 5

#: Source of runs that name none.
OWN = "own"
#: Effects of a cluster below which nothing is said: repeated runs differ by as much.
_WORTH = 0.02
#: What an effect of a cluster means: with the inverse factor and the factor.
_WORDS = {
    "between": "the network between boxes gives {0:.0%} of what was expected of it",
    "launch": "launching a kernel takes {1:.2f} times as long as expected",
    "whole": "everything takes {1:.2f} times as long as expected",
}

Tell = Callable[[str], None]


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


def train_steps(
    table: pd.DataFrame, operators: OpModel | None, tell: Tell, seed: int = 0
) -> tuple[StepModel, StudyFigures]:
    """Learn a model of steps, with errors on rows, clusters, sources and chips left out.

    Args:
        table: Measured steps, as :func:`~opcast.predict.cluster.step_table.read_steps` gives.
        operators: Model of library operators; ``None`` for rooflines.
        tell: Told of progress.
        seed: Of draws.

    Returns:
        The model, and the figures of what was left out.

    Raises:
        DatasetError: No row has a measured time and can be expressed.
    """
    rows = [r for r in read_rows(table)[0] if r is not None and np.isfinite(r.measured_s)]
    if not rows:
        raise DatasetError(
            "no row with a measured step can be expressed", hint="step_s holds seconds"
        )
    tell(f"{len(rows)} measured steps; asking for their operators")
    runs = StepRuns(rows, operators)
    measured = np.log([row.measured_s for row in rows])
    groups = np.array([context.cluster for context in runs.contexts])
    chosen = _thinned(groups, seed)
    runs.most_tasks = PLACED
    part = runs.part([rows[i] for i in chosen])
    effects, _ = fit_effects(part.contexts, measured[chosen], groups[chosen], part.simulate, tell)
    tell("slopes of all rows")
    slopes = slopes_at(runs.simulate, effects, len(rows))
    study = _Study(runs, measured, groups, slopes, seed)
    model = StepModel(effects)
    left = study.left_out(tell)
    curve, gains = study.calibration(tell), study.gains(tell)
    corrected = study.residuals(model, tell)
    left["row"] = left["row"] + corrected
    model.ends = study.ends(left)
    laws = fit_laws(
        [r.framework for r in rows], [fullest(r) for r in rows], [r.memory_bytes for r in rows]
    )
    model.memory = laws
    sources = sorted({row.source for row in rows})
    figures = StudyFigures(frame_of(rows, groups, left), curve, gains)
    model.provenance = {"rows": len(rows), "sources": sources, "devices": _devices(rows)}
    return model, figures


def frame_of(
    rows: Sequence[StepRow], groups: np.ndarray, left: dict[str, np.ndarray]
) -> pd.DataFrame:
    """Errors of left-out rows with their names."""
    return pd.DataFrame({"id": [r.id for r in rows], "group": groups, **left})


@dataclass(frozen=True)
class StudyFigures:
    """What was found with rows left out.

    Attributes:
        left: For every measured row its logarithmic error when left out in each way.
        curve: Error of left-out sources against the number of their runs adapted to.
        gains: Error without the effects of each class of cost.
    """

    left: pd.DataFrame
    curve: pd.DataFrame
    gains: pd.DataFrame


class _Study:
    """Errors of steps that were left out, by the linear model around the fitted effects."""

    def __init__(
        self,
        runs: StepRuns,
        measured: np.ndarray,
        groups: np.ndarray,
        slopes: Slopes,
        seed: int,
    ) -> None:
        self.runs, self.measured, self.groups = runs, measured, groups
        self.slopes, self.seed = slopes, seed

    def _error(
        self, learn: np.ndarray, judge: np.ndarray, without: str = ""
    ) -> tuple[np.ndarray, EffectTable]:
        """Logarithm of measured over predicted of rows that effects were not learned from."""
        table = solve(self.slopes, self.runs.contexts, self.measured, self.groups, learn, without)
        at = np.flatnonzero(judge)
        whole = [table.log_factors(self.runs.contexts[i])[WHOLE] for i in at]
        said = self.runs.simulate([int(i) for i in at], table, {}) + np.array(whole)
        return self.measured[at] - said, table

    def left_out(self, tell: Tell) -> dict[str, np.ndarray]:
        """Errors with rows, clusters, sources and generations of chips left out."""
        contexts = self.runs.contexts
        fold = np.random.default_rng(self.seed).permutation(len(contexts)) % FOLDS
        keys = {
            "row": fold.astype(str),
            "cluster": self.groups,
            "source": np.array([row.source for row in self.runs.rows]),
            "chip": np.array([row.cluster.device for row in self.runs.rows]),
            "architecture": np.array([context.architecture for context in contexts]),
        }
        errors: dict[str, np.ndarray] = {}
        self.tiers: dict[str, list[str]] = {}
        for name, key in keys.items():
            tell(f"leaving out each {name}")
            errors[name] = np.full(len(contexts), np.nan)
            tiers = [""] * len(contexts)
            for value in np.unique(key):
                judge = key == value
                if judge.all():
                    continue  # Nothing is left to learn from.
                errors[name][judge], table = self._error(~judge, judge)
                model = StepModel(table)
                for i in np.flatnonzero(judge):
                    tiers[i] = model.tier(contexts[i])
            self.tiers[name] = tiers
        return errors

    def gains(self, tell: Tell) -> pd.DataFrame:
        """What the effects of each class of cost gain: the error without them.

        Returns:
            ``without``, and the mean error over groups with rows (``row``) and with clusters
            (``cluster``) left out, residuals aside.
        """
        fold = np.random.default_rng(self.seed).permutation(len(self.groups)) % FOLDS
        found = []
        for cost in ("", *PRIOR, WHOLE):
            tell(f"leaving out the effects on {cost or 'nothing'}")
            record: dict[str, object] = {"without": cost or "–"}
            for name, key in (("row", fold.astype(str)), ("cluster", self.groups)):
                error = np.full(len(key), np.nan)
                for value in np.unique(key):
                    judge = key == value
                    if not judge.all():
                        error[judge] = np.abs(np.expm1(-self._error(~judge, judge, cost)[0]))
                record[name] = float(pd.Series(error).groupby(self.groups).mean().mean())
            found.append(record)
        return pd.DataFrame(found)

    def calibration(self, tell: Tell) -> pd.DataFrame:
        """Error of the sources with most runs, left out, against the number of runs adapted to.

        Returns:
            ``source``, ``runs`` and ``mape``: mean over :data:`DRAWS` draws of the runs, of the
            error of the source's other runs, each cluster counting the same.
        """
        sources = np.array([row.source for row in self.runs.rows])
        names, counts = np.unique(sources, return_counts=True)
        largest = names[np.argsort(-counts)][:CURVES]
        found = []
        for name in largest if len(names) > 1 else ():
            tell(f"adapting to runs of {name}, left out")
            own = np.flatnonzero(sources == name)
            table = solve(
                self.slopes, self.runs.contexts, self.measured, self.groups, sources != name
            )
            level = self.runs.simulate([int(i) for i in own], table, {})
            slope = {cost: values[own] for cost, values in self.slopes.slope.items()}
            contexts = [self.runs.contexts[i] for i in own]
            for count in RUNS:
                errors = [
                    self._adapted_error(own, Slopes(table, level, slope), contexts, count, draw)
                    for draw in range(DRAWS)
                ]
                found.append({"source": name, "runs": count, "mape": float(np.mean(errors))})
        return pd.DataFrame(found, columns=["source", "runs", "mape"])

    def _adapted_error(
        self,
        own: np.ndarray,
        slopes: Slopes,
        contexts: Sequence[StepContext],
        count: int,
        draw: int,
    ) -> float:
        """Error of the runs of a source that were not drawn to adapt to."""
        order = np.random.default_rng(draw).permutation(len(own))
        learn, rest = order[:count], order[count:]
        table = slopes.table
        if count:
            part = {cost: values[learn] for cost, values in slopes.slope.items()}
            known = Slopes(table, slopes.level[learn], part)
            table = adapt(known, [contexts[i] for i in learn], self.measured[own[learn]], table)
        said = []
        for i in rest:
            before, after = (t.log_factors(contexts[i]) for t in (slopes.table, table))
            change = sum((after[c] - before[c]) * slopes.slope[c][i] for c in PRIOR)
            said.append(slopes.level[i] + change + after[WHOLE])
        error = np.abs(np.expm1(np.array(said) - self.measured[own[rest]]))
        return float(pd.Series(error).groupby(self.groups[own[rest]]).mean().mean())

    def residuals(self, model: StepModel, tell: Tell) -> np.ndarray:
        """Add residuals of clusters that earn them; gives what they add to unseen rows' errors."""
        added = np.zeros(len(self.measured))
        for cluster, count in zip(*np.unique(self.groups, return_counts=True), strict=True):
            if count < LEAST_RUNS:
                continue
            at = [int(i) for i in np.flatnonzero(self.groups == cluster)]
            contexts = [self.runs.contexts[i] for i in at]
            steps = [
                self.runs.step(self.runs.rows[i], model.table.effects(c))
                for i, c in zip(at, contexts, strict=True)
            ]
            features = stacked([self.runs.features(i, s) for i, s in zip(at, steps, strict=True)])
            whole = np.array([model.table.log_factors(c)[WHOLE] for c in contexts])
            share = np.array([self.runs.rows[i].share for i in at])
            said = np.log([s.total for s in steps]) + np.log(share) + whole
            left = self.measured[at] - said
            unseen = unseen_corrections(features, left, self.seed)
            if earns_its_place(left, unseen):
                model.residuals[str(cluster)] = fit_residual(features, left, self.seed)
                added[at] = -unseen
                tell(
                    f"residual of {cluster}: mean error of unseen rows "
                    f"{np.abs(left).mean():.3f} -> {np.abs(left - unseen).mean():.3f}"
                )
        return added

    def ends(self, errors: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
        """Ends of the intervals, each tier's from the rows that were predicted so."""
        scores: dict[str, list[tuple[str, float]]] = {}
        for name, values in errors.items():
            for group, value, tier in zip(self.groups, values, self.tiers[name], strict=True):
                if np.isfinite(value):
                    scores.setdefault(tier, []).append((str(group), float(value)))
        found = interval_ends(scores)
        for name, count in zip(*np.unique(self.groups, return_counts=True), strict=True):
            if count >= LEAST_RUNS:
                found[str(name)] = cluster_ends(errors["row"][self.groups == name])
        return found


def _thinned(groups: np.ndarray, seed: int) -> list[int]:
    """At most :data:`MOST_ROWS` rows of each group, in order."""
    order = np.random.default_rng(seed).permutation(len(groups))
    kept: dict[str, int] = {}
    chosen = []
    for index in order:
        kept[groups[index]] = kept.get(groups[index], 0) + 1
        if kept[groups[index]] <= MOST_ROWS:
            chosen.append(int(index))
    return sorted(chosen)


def _devices(rows: Sequence[StepRow]) -> list[str]:
    return sorted({row.cluster.device for row in rows})


def adapt_steps(model: StepModel, runs: StepRuns, measured: np.ndarray) -> StepModel:
    """Adapt a model to clusters of one's own from a few of their steps."""
    slopes = slopes_at(runs.simulate, model.table, len(runs.rows))
    table = adapt(slopes, runs.contexts, measured, model.table)
    return replace(model, table=table)


def predicted_frame(
    table: pd.DataFrame,
    rows: Sequence[StepRow | None],
    reasons: Sequence[str],
    predicted: Sequence[RowPrediction | str],
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
        if row is not None and isinstance(answer, RowPrediction):
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


def _record(row: StepRow, said: RowPrediction) -> dict[str, object]:
    step, scale = said.step, said.factor * 1e6
    update = step.stages[step.worst].update.compute
    parts = (step.compute - update, step.exposed, step.bubble, step.host, update)
    # Rounding of the bubble aside, the parts add up to the step.
    rest = step.total - sum(parts)
    return {
        "latency_us": said.seconds * 1e6,
        "lo_us": said.lo * 1e6,
        "hi_us": said.hi * 1e6,
        "memory_bytes": said.memory_bytes,
        **dict(zip(PARTS, (value * scale for value in (parts[0] + rest, *parts[1:])), strict=True)),
        "known": said.known,
        "source": row.source,
        "device": row.cluster.device,
        "measured_us": row.measured_s * 1e6,
        "measured_memory_bytes": row.memory_bytes,
    }


def judge(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Errors of predictions whose answer is given.

    Args:
        frame: From :func:`predicted_frame`.
        table: The table, for the models and clusters that plans are compared within.
    """
    known = frame["measured_us"].notna() & frame["latency_us"].notna()
    own = frame[known].copy()
    ratio = own["latency_us"] / own["measured_us"]
    own["error"] = (ratio - 1.0).abs()
    own["log"] = np.log(ratio)
    own["inside"] = own["measured_us"].between(own["lo_us"], own["hi_us"])
    own["memory_error"] = (own["memory_bytes"] / own["measured_memory_bytes"] - 1.0).abs()
    groups = own.groupby(["source", "device"], dropna=False)
    by_group = groups.agg(
        rows=("error", "size"),
        mape=("error", "mean"),
        median_ape=("error", "median"),
        bias=("log", lambda x: float(np.expm1(x.median()))),
        coverage=("inside", "mean"),
        memory_mape=("memory_error", "mean"),
    ).reset_index()
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
    part = runs.part(list(learn))
    return adapt_steps(model, part, np.log([row.measured_s for row in learn]))


def find_step_model(name: str) -> StepModel:
    """The model of steps that ships, or one from a file.

    Raises:
        ModelError: The file is missing or damaged.
    """
    return shipped_steps() if name == "default" else StepModel.load(Path(name))


def run_train_steps(console: Console, settings: StepSettings) -> StepModel:
    """Learn from a table of steps, print errors of what was left out, save and track."""
    table = read_steps(settings.table)

    def tell(what: str) -> None:
        console.print(what, highlight=False)

    model, study = train_steps(table, _operators(), tell, settings.seed)
    left, curve = study.left, study.curve
    figures = left_out_figures(left)
    print_frame(console, in_percent(figures), "measured steps that were left out, errors in %")
    title = "error in % without the effects of a class, rows and clusters left out, no residuals"
    print_frame(console, percent(study.gains, ["without"]), title)
    if len(curve):
        wide = curve.pivot(index="source", columns="runs", values="mape").reset_index()
        title = "error in % of sources left out, by number of their runs adapted to"
        print_frame(console, percent(wide, ["source"]), title)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    model.save(settings.out)
    console.print(f"{settings.out}: {len(model.table.values)} effects", highlight=False)
    if settings.track:
        metrics = {
            f"{row.left_out}/{name}": float(getattr(row, name))
            for row in figures.itertuples()
            for name in ("mape", "median_ape")
        }
        params = {"table": str(settings.table), "rows": len(left), "seed": settings.seed}
        tables = {"left_out": figures}
        log_training(console, RunLog("steps", params, metrics, tables=tables), None)
    return model


def left_out_figures(left: pd.DataFrame) -> pd.DataFrame:
    """Mean over groups of the error with rows, clusters, sources, chips … left out.

    Args:
        left: From :func:`train_steps`.
    """
    records = []
    for name in (c for c in left.columns if c not in ("id", "group")):
        error = np.abs(np.expm1(-left[name]))
        groups = error.groupby(left["group"])
        records.append(
            {
                "left_out": name,
                "rows": int(error.notna().sum()),
                "groups": int(left["group"].nunique()),
                "mape": float(groups.mean().mean()),
                "median_ape": float(groups.median().mean()),
            }
        )
    return pd.DataFrame(records)


def run_evaluate_steps(console: Console, settings: StepSettings) -> Judged:
    """Predict every row of a table of steps; print the errors of those with a measured time."""
    table = read_steps(settings.table)
    model = find_step_model(settings.model)
    with row_progress(len(table)) as show:
        frame, judged, model = evaluate_steps(
            table, model, _operators(), calibrate=settings.calibrate, show=show
        )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame, settings.out)
    missing = frame.loc[frame["latency_us"].isna(), "reason"]
    for reason, count in missing.value_counts().head(20).items():
        console.print(f"{count} rows cannot be expressed: {reason}", highlight=False)
    if settings.calibrate:
        for line in learned_lines(model, table):
            console.print(line, highlight=False)
    if judged.overall["rows"] and len(judged.by_group):
        print_frame(console, in_percent(judged.by_group), "measured steps, errors in %")
        console.print(_sentence(judged), highlight=False, soft_wrap=True)
    console.print(f"{settings.out}: {len(frame)} rows", highlight=False)
    known = frame[frame["measured_us"].notna() & frame["latency_us"].notna()]
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
        console.print(f"{settings.page}: page", highlight=False)
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
        table["source"] = table.get("source", pd.Series(dtype=object)).fillna(OWN)
    rows, reasons = read_rows(table)
    for name, reason in zip(table["id"], reasons, strict=True):
        if reason:
            console.print(f"{name}: not used: {reason}", highlight=False)
    own = [row for row in rows if row is not None and np.isfinite(row.measured_s)]
    if not own:
        raise DatasetError(
            "no step to calibrate on", where=str(settings.table), hint="step_s holds seconds"
        )
    runs = StepRuns(own, _operators())
    base = find_step_model(settings.model)
    measured = np.log([row.measured_s for row in own])
    model = adapt_steps(base, runs, measured)
    for name, which in (("before", base), ("after", model)):
        answers = runs.predict(which)
        ratios = [
            answer.seconds / row.measured_s
            for answer, row in zip(answers, own, strict=True)
            if isinstance(answer, RowPrediction)
        ]
        error = 100 * np.abs(np.array(ratios) - 1.0).mean()
        console.print(f"error of these {len(own)} steps {name}: {error:.1f} %", highlight=False)
    for line in learned_lines(model, table):
        console.print(line, highlight=False)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    model.save(settings.out)
    console.print(
        f"{settings.out}: use it with --model in opcast evaluate --steps", highlight=False
    )
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


@contextmanager
def row_progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar over rows, where the terminal shows one."""
    from rich.progress import Progress

    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("steps", total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _operators() -> OpModel | None:
    return load_step_model(OPERATOR_MODEL)
