"""Train a model of training steps on tables of measured steps, with cross-validated errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    UNCALIBRATED,
    StepModel,
    calibrated_as,
    interval_ends,
)
from ..models.trust.calibrator import Calibrator
from ..predict.cluster.case_table import read_cases, read_rows
from ..predict.cluster.step_table import StepRuns, fullest, step_row
from ..predict.operator.step_operators import load_step_model
from .judging import few_of_each, keep_learned, keep_left_out, named_folds
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


def group_error(logs: np.ndarray, groups: np.ndarray, figure: str = "mean") -> float:
    """Mean over groups of the ``mean`` or ``median`` absolute relative error.

    Args:
        logs: Logarithms of measured over predicted seconds.
        groups: Group of each row.
        figure: Figure of a group.
    """
    return float(pd.Series(np.abs(np.expm1(-logs))).groupby(groups).agg(figure).mean())


def train_steps(
    table: pd.DataFrame, operators: OpModel | None, tell: Tell, seed: int = 0
) -> tuple[StepModel, StudyFigures]:
    """Train a step model, and compute its errors on held-out rows, clusters, sources and chips.

    Args:
        table: Measured steps, from :func:`~opcast.predict.cluster.case_table.read_cases`.
        operators: Operator model; ``None`` for rooflines.
        tell: Called with progress messages.
        seed: Random seed.

    Returns:
        The model and the held-out errors.

    Raises:
        DatasetError: No row has a measured time and can be predicted.
    """
    read = possible_steps(read_rows(table, step_row)[0], tell)
    rows = [row for row in read if row is not None and np.isfinite(row.measured_s)]
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
    inside = {f"{name}_inside": values for name, values in study.inside(left).items()}
    logs = {name: own.error for name, own in left.items()}
    known = {"id": [r.id for r in rows], "group": groups, "measured": np.exp(measured)}
    errors = pd.DataFrame({**known, **logs, **inside})
    return model, StudyFigures(errors, curve, gains)


@dataclass(frozen=True)
class StudyFigures:
    """Errors on held-out rows.

    Attributes:
        left: For every row ``id``, ``group``, ``measured`` seconds, the logarithmic error for each
            way of holding out, and in ``<way>_inside`` whether an interval calibrated on other
            sources and devices covers it.
        curve: Error on held-out sources by number of their runs used for calibration.
        gains: Error without the effects of each class of cost.
    """

    left: pd.DataFrame
    curve: pd.DataFrame
    gains: pd.DataFrame


class _LeftOut(NamedTuple):
    """Rows predicted by effects fitted without them; arrays of shape ``(n,)``.

    Attributes:
        error: Logarithms of measured over predicted seconds; NaN if not predicted.
        spread: Standard deviations of the logarithms of the predictions due to the effects.
        known: Key of the interval, from :func:`~opcast.models.steps.model.calibrated_as`.
    """

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
        for value in np.unique(key):
            judge = key == value
            if judge.all():
                continue
            table = self.linear.solve(~judge, group_weights(self.groups[~judge]), without)
            at = np.flatnonzero(judge)
            whole = [table.log_factors(self.runs.contexts[i])[WHOLE] for i in at]
            predicted = self.runs.simulate([int(i) for i in at], table, {}) + np.array(whole)
            yield at, self.measured[at] - predicted, table

    def left_out(self, tell: Tell) -> dict[str, _LeftOut]:
        """Errors by what is held out: rows, clusters, sources, chips, chip generations."""
        contexts = self.runs.contexts
        keys = {
            "row": self.folds,
            "cluster": self.groups,
            "source": np.array([row.source for row in self.runs.rows]),
            "chip": np.array([row.cluster.device for row in self.runs.rows]),
            "architecture": np.array([context.architecture for context in contexts]),
        }
        found: dict[str, _LeftOut] = {}
        for name, key in keys.items():
            tell(f"leaving out each {name}")
            own = _LeftOut(
                np.full(len(contexts), np.nan),
                np.full(len(contexts), np.nan),
                np.full(len(contexts), ELSEWHERE, object),
            )
            for at, error, table in self._without(key):
                own.error[at] = error
                model = StepModel(table)
                for i in at:
                    slopes = {cost: float(of[i]) for cost, of in self.slopes.slope.items()}
                    own.spread[i] = table.spread(contexts[i], slopes)
                    own.known[i] = calibrated_as(model.tier(contexts[i]), slopes)
            found[name] = own
        return found

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

    def inside(self, left: Mapping[str, _LeftOut]) -> dict[str, np.ndarray]:
        """Whether intervals calibrated on other groups cover each row, by what was held out.

        Returns:
            1 or 0 for every row; NaN if it was not predicted.
        """
        found = {name: np.full(len(self.groups), np.nan) for name in left}
        for group in np.unique(self.groups):
            ends = interval_ends(self._scores(left, self.groups != group))
            for name, own in left.items():
                score = own.score
                for i in np.flatnonzero((self.groups == group) & np.isfinite(score)):
                    low, high = ends.get(own.known[i], UNCALIBRATED)
                    found[name][i] = low <= score[i] <= high
        return found

    def ends(self, left: Mapping[str, _LeftOut]) -> dict[str, tuple[float, float]]:
        """Bounds of the intervals in standard deviations, from the standardised errors."""
        found = Calibrator(interval_ends(self._scores(left, np.ones(len(self.groups), bool))))
        for name, count in zip(*np.unique(self.groups, return_counts=True), strict=True):
            if count >= LEAST_RUNS:
                found.add(str(name), left["row"].score[self.groups == name])
        return found.ends

    def _scores(
        self, left: Mapping[str, _LeftOut], which: np.ndarray
    ) -> dict[str, list[tuple[str, float]]]:
        """Group and standardised error of the selected rows, for :func:`interval_ends`."""
        scores: dict[str, list[tuple[str, float]]] = {}
        for own in left.values():
            score = own.score
            for i in np.flatnonzero(which & np.isfinite(score)):
                scores.setdefault(own.known[i], []).append((str(self.groups[i]), float(score[i])))
        return scores


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
    keep_left_out(settings.left_out, left.assign(metric="step"), ways_of(left))
    keep_learned(console, settings, model, len(model.table.values), len(left), figures, errors)
    return model


def left_out_groups(left: pd.DataFrame) -> pd.DataFrame:
    """Held-out error and coverage by source and device.

    Args:
        left: From :func:`train_steps`.

    Returns:
        ``group``, ``rows``, and with the cluster and with the chip held out, the mean error and the
        coverage.
    """
    records = []
    for name, own in left.groupby("group"):
        record: dict[str, object] = {"group": str(name), "rows": len(own)}
        for way in ("cluster", "chip"):
            record[way] = float(np.abs(np.expm1(-own[way])).mean())
            record[f"{way}_inside"] = float(own[f"{way}_inside"].mean())
        records.append(record)
    return pd.DataFrame(records)


def ways_of(left: pd.DataFrame) -> list[str]:
    """Ways of holding out in :func:`train_steps`, which are its columns of errors."""
    return [name.removesuffix("_inside") for name in left.columns if name.endswith("_inside")]


def left_out_figures(left: pd.DataFrame) -> pd.DataFrame:
    """Mean over groups of the error and coverage, by what is held out.

    Args:
        left: From :func:`train_steps`.
    """
    records = []
    for name in ways_of(left):
        logs, groups = left[name].to_numpy(), left["group"].to_numpy()
        records.append(
            {
                "left_out": name,
                "rows": int(left[name].notna().sum()),
                "groups": int(left["group"].nunique()),
                "mape": group_error(logs, groups),
                "median_ape": group_error(logs, groups, "median"),
                "coverage": float(left[f"{name}_inside"].groupby(groups).mean().mean()),
            }
        )
    return pd.DataFrame(records)
