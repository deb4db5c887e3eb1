"""Train a model of training steps on tables of measured steps, with cross-validated errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.tables_text import in_percent, percent, print_frame
from ..models.adapt.active import in_order
from ..models.effects import WHOLE, Linear, group_weights
from ..models.steps.effects import LEARNED, EffectTable, Slopes, fit_effects, slopes_at
from ..models.steps.memory import fit_laws
from ..models.steps.model import (
    ELSEWHERE,
    StepModel,
    calibrated_as,
    interval_ends,
)
from ..models.trust.calibrator import STANDARD, Calibrator, Ends
from ..predict.cluster.case_table import read_cases, read_rows
from ..predict.cluster.step_table import StepRuns, fullest, step_row
from ..predict.operator.step_operators import load_step_model
from .judging import (
    FIGURES,
    few_of_each,
    keep_learned,
    left_out_rows,
    named_folds,
    parts_of,
)
from .steps import possible_steps

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.operators import OpModel
    from .settings import TableSettings

#: Maximum training rows of a source on a device; more of the same source add little information.
MOST_ROWS = 200
#: Pipeline tasks that are simulated exactly during training; longer pipelines are extrapolated from
#: four rounds, which changes a step by less than 0.5 %.
PLACED = 256
#: Minimum runs of a cluster for interval bounds of its own.
LEAST_RUNS = 60
#: Number of sources, numbers of runs, and random draws of the calibration curves.
CURVES = 3
RUNS = (0, 5, 10, 20)
DRAWS = 5

Tell = Callable[[str], None]


def group_error(logs: np.ndarray, groups: np.ndarray) -> float:
    """Mean over groups of the mean absolute relative error.

    Args:
        logs: Logarithms of measured over predicted seconds.
        groups: Group of each row.
    """
    return float(pd.Series(np.abs(np.expm1(-logs))).groupby(groups).mean().mean())


def train_steps(
    table: pd.DataFrame, operators: OpModel | None, tell: Tell, seed: int = 0
) -> tuple[StepModel, StudyFigures]:
    """Train a step model, and compute its errors on held-out rows, clusters, sources and chips.

    Args:
        table: Measured steps, from :func:`~opcast.predict.cluster.case_table.read_cases`; rows of
            split ``test`` are not learned from.
        operators: Operator model; ``None`` for rooflines.
        tell: Called with progress messages.
        seed: Random seed.

    Returns:
        The model and the held-out errors.

    Raises:
        DatasetError: No row has a measured time and can be predicted.
    """
    read = [r if r and r.split != "test" else None for r in read_rows(table, step_row)[0]]
    rows = [r for r in possible_steps(read, tell) if r and np.isfinite(r.measured_s)]
    if not rows:
        raise DatasetError(
            "no row with a measured step can be predicted", hint="give step_s in seconds"
        )
    tell(f"{len(rows)} measured steps; predicting their operators")
    runs = StepRuns(rows, operators)
    measured = np.log([row.measured_s for row in rows])
    groups = np.array([context.cluster for context in runs.contexts])
    chosen = few_of_each(groups, [row.id for row in rows], MOST_ROWS, seed)
    runs.most_tasks = PLACED
    part = runs.part([rows[i] for i in chosen])
    effects = fit_effects(part.contexts, measured[chosen], groups[chosen], part.simulate, tell)
    tell("computing slopes of all rows")
    slopes = slopes_at(runs.simulate, effects, len(rows))
    study = _Study(runs, measured, groups, slopes, seed)
    model = StepModel(effects)
    left = study.left_out(tell)
    curve, gains = study.calibration(tell), study.gains(tell)
    model.ends = study.ends(left)
    model.memory = fit_laws(
        [r.framework for r in rows], [fullest(r) for r in rows], [r.memory_bytes for r in rows]
    )
    model.provenance = {
        "rows": len(rows),
        "sources": sorted({row.source for row in rows}),
        "devices": sorted({row.cluster.device for row in rows}),
    }
    known = {"id": [row.id for row in rows], "metric": "step", "group": pd.Categorical(groups)}
    errors = left_out_rows(pd.DataFrame(known | {"measured": np.exp(measured)}), study.judged(left))
    return model, StudyFigures(errors, curve, gains)


@dataclass(frozen=True)
class StudyFigures:
    """Errors on held-out rows.

    Attributes:
        left: Held-out rows, from :func:`left_out_rows`, with their ``group`` of source and device,
            on others of which their intervals are calibrated.
        curve: Error on held-out sources by number of their runs used for calibration.
        gains: Error without the effects of each class of cost.
    """

    left: pd.DataFrame
    curve: pd.DataFrame
    gains: pd.DataFrame


class _LeftOut(NamedTuple):
    """Rows predicted by effects fitted without them; arrays of shape ``(ways, n)``.

    Attributes:
        ways: What is held out.
        error: Logarithms of measured over predicted seconds; NaN if not predicted.
        spread: Standard deviations of the logarithms of the predictions due to the effects.
        known: Key of the interval, from :func:`~opcast.models.steps.model.calibrated_as`.
    """

    ways: tuple[str, ...]
    error: np.ndarray
    spread: np.ndarray
    known: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Standardised errors."""
        return np.asarray(self.error / self.spread)


class _Study:
    """Held-out errors of steps, by the model linearised around the fitted effects."""

    def __init__(
        self,
        runs: StepRuns,
        measured: np.ndarray,
        groups: np.ndarray,
        slopes: Slopes,
        seed: int,
    ) -> None:
        self.runs, self.measured, self.groups = runs, measured, groups
        self.slopes, self.folds = slopes, named_folds([row.id for row in runs.rows], seed)
        self.linear = slopes.linear(runs.contexts, measured)

    def _without(
        self, key: np.ndarray, without: str = ""
    ) -> Iterator[tuple[np.ndarray, np.ndarray, EffectTable]]:
        """Hold out the rows of each value of a key in turn.

        Args:
            key: Value of every row.
            without: Class of cost without effects; empty for none.

        Yields:
            Indices of the held-out rows, their logarithms of measured over predicted seconds, and
            the effects fitted to the other rows. Values that all rows share are skipped.
        """
        for part in parts_of({"": key}):
            learn, at = part.learn, np.flatnonzero(part.judge)
            table = self.linear.solve(learn, group_weights(self.groups[learn]), without)
            whole = [table.log_factors(self.runs.contexts[i])[WHOLE] for i in at]
            predicted = self.runs.simulate([int(i) for i in at], table, {}) + np.array(whole)
            yield at, self.measured[at] - predicted, table

    def left_out(self, tell: Tell) -> _LeftOut:
        """Errors by what is held out: rows, clusters, sources, chips, chip generations."""
        contexts = self.runs.contexts
        keys = {
            "row": self.folds,
            "cluster": self.groups,
            "source": np.array([row.source for row in self.runs.rows]),
            "chip": np.array([row.cluster.device for row in self.runs.rows]),
            "architecture": np.array([context.architecture for context in contexts]),
        }
        error, spread = np.full((2, len(keys), len(contexts)), np.nan)
        left = _LeftOut(tuple(keys), error, spread, np.full(error.shape, ELSEWHERE, object))
        for place, (name, key) in enumerate(keys.items()):
            tell(f"leaving out each {name}")
            for at, logs, table in self._without(key):
                error[place, at] = logs
                model = StepModel(table)
                for i in at:
                    slopes = {cost: float(of[i]) for cost, of in self.slopes.slope.items()}
                    spread[place, i] = table.spread(contexts[i], slopes)
                    left.known[place, i] = calibrated_as(model.tier(contexts[i]), slopes)
        return left

    def gains(self, tell: Tell) -> pd.DataFrame:
        """Ablation: the error without the effects of each class of cost.

        Returns:
            ``without``, and the mean error over groups with rows (``row``) and clusters
            (``cluster``) held out.
        """
        found = []
        for cost in ("", *LEARNED, WHOLE):
            tell(f"fitting without effects on {cost}" if cost else "fitting with all effects")
            record: dict[str, object] = {"without": cost or "–"}
            for name, key in (("row", self.folds), ("cluster", self.groups)):
                error = np.full(len(key), np.nan)
                for at, logs, _ in self._without(key, cost):
                    error[at] = logs
                record[name] = group_error(error, self.groups)
            found.append(record)
        return pd.DataFrame(found)

    def calibration(self, tell: Tell) -> pd.DataFrame:
        """Error on the largest sources, held out, by number of their runs used for calibration.

        Returns:
            ``source``, ``runs``, ``mape``, the mean over :data:`DRAWS` random draws of the runs of
            the error on the source's other runs (mean over clusters), and ``chosen``, the same for
            the most informative runs.
        """
        sources = np.array([row.source for row in self.runs.rows])
        names, counts = np.unique(sources, return_counts=True)
        largest = names[np.argsort(-counts)][:CURVES]
        found = []
        for name in largest if len(names) > 1 else ():
            tell(f"adapting to runs of {name}, held out")
            own, others = np.flatnonzero(sources == name), sources != name
            table = self.linear.solve(others, group_weights(self.groups[others]))
            level = self.runs.simulate([int(i) for i in own], table, {})
            slope = {cost: values[own] for cost, values in self.slopes.slope.items()}
            contexts = [self.runs.contexts[i] for i in own]
            linear = Slopes(table, level, slope).linear(contexts, self.measured[own])
            unsure, every = linear.unsure(np.zeros(len(own), bool)), np.ones(len(own))
            order, _ = in_order([unsure], every / len(own), max(RUNS), every)
            drawn = [np.random.default_rng(draw).permutation(len(own)) for draw in range(DRAWS)]
            for count in RUNS:
                chosen, *errors = (
                    _adapted_error(linear, self.groups[own], learn[:count])
                    for learn in (order, *drawn)
                )
                record = {"source": name, "runs": count, "mape": float(np.mean(errors))}
                found.append(record | {"chosen": chosen})
        return pd.DataFrame(found, columns=["source", "runs", "mape", "chosen"])

    def judged(self, left: _LeftOut) -> dict[str, np.ndarray]:
        """Errors, and intervals calibrated on other groups, as for :func:`left_out_rows`."""
        bounds = np.full((*left.error.shape, 2), np.nan)
        for group in np.unique(self.groups):
            ends = self._pooled(left, self.groups != group)
            own = (self.groups == group) & np.isfinite(left.error)
            each = [ends.of((key,), STANDARD) for key in left.known[own]]
            bounds[own] = np.reshape(each, (-1, 2))
        found = np.dstack([left.error, left.spread[..., None] * bounds])
        return dict(zip(left.ways, found, strict=True))

    def ends(self, left: _LeftOut) -> dict[str, Ends]:
        """Bounds of the intervals in standard deviations, from the standardised errors."""
        found = self._pooled(left, np.isfinite(self.measured))
        row = left.score[left.ways.index("row")]
        return found.pool(row, self.groups, least=LEAST_RUNS, group=np.arange(len(row))).ends

    def _pooled(self, left: _LeftOut, which: np.ndarray) -> Calibrator[str]:
        """Bounds from the rows in a mask, shape ``(n,)``."""
        own = which & np.isfinite(left.error)
        groups = np.broadcast_to(self.groups, own.shape)
        return interval_ends(left.known[own], left.score[own], groups[own])


def _adapted_error(linear: Linear[EffectTable], groups: np.ndarray, learn: np.ndarray) -> float:
    """Error on the runs of a source that are not used for calibration."""
    known = np.isin(np.arange(len(groups)), learn)
    return group_error(linear.errors(linear.adapted(known))[~known], groups[~known])


def run_train_steps(console: Console, settings: TableSettings) -> StepModel:
    """Train on tables of steps, print held-out errors, save and track."""
    table = read_cases(settings.tables, "steps")
    tell = partial(console.print, highlight=False)
    model, study = train_steps(table, load_step_model(), tell, settings.seed)
    left, curve = study.left, study.curve
    figures = left_out_figures(left)
    print_frame(console, in_percent(figures), "held-out steps, errors in %")
    groups = percent(left_out_groups(left), ["group", "rows"])
    print_frame(console, groups, "by source and device: error and coverage in %")
    title = "error in % without the effects of a class, rows and clusters held out"
    print_frame(console, percent(study.gains, ["without"]), title)
    if len(curve):
        each = curve.rename(columns={"mape": "random"}).melt(["source", "runs"], var_name="choice")
        wide = each.pivot(index=["source", "choice"], columns="runs", values="value").reset_index()
        wide.columns = wide.columns.astype(str)
        title = "error in % on held-out sources, by number of their runs used for calibration"
        print_frame(console, percent(wide, ["source", "choice"]), title)
    errors = figures.melt("left_out", ["mape", "median_ape"])
    keep_learned(console, settings, model, len(model.table.values), left, figures, errors)
    return model


def left_out_groups(left: pd.DataFrame) -> pd.DataFrame:
    """Held-out error and coverage by source and device.

    Args:
        left: From :func:`train_steps`.

    Returns:
        ``group``, ``rows``, and with the cluster and with the chip held out, the mean error and the
        coverage.
    """
    each = left.groupby(["group", "left_out"], observed=False).agg(**FIGURES).unstack()
    found = {"rows": each["rows", "row"]}
    for way in ("cluster", "chip"):
        found |= {way: each["mape", way], f"{way}_inside": each["coverage", way]}
    return pd.DataFrame(found).reset_index()


def left_out_figures(left: pd.DataFrame) -> pd.DataFrame:
    """Mean over groups of the error and coverage, by what is held out.

    Args:
        left: From :func:`train_steps`.
    """
    each = left.groupby(["left_out", "group"], observed=False).agg(**FIGURES).reset_index()
    means = {name: (name, "mean") for name in ("mape", "median_ape", "coverage")}
    by = each.groupby("left_out", observed=False)
    figures = by.agg(rows=("rows", "sum"), groups=("group", "nunique"), **means).reset_index()
    return figures.astype({"left_out": str})
