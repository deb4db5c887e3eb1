"""Predicts collectives from the operation, its bytes, the number of devices and their links.

The physics is ring volume over link bandwidth plus start-ups (:mod:`.curve`), with a few fitted
parameters per fabric, operation, library and machine (:mod:`.fit`). A machine without measurements
takes the parameters of its fabric, operation and library, scaled by its bandwidth and clock. Fitted
parameters ship with the package; :mod:`.on_cluster` applies the model to the ranks of a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import check_measured
from ...common.types import JsonMapping, listed, typed
from ..core.store import JsonModel
from ..trust.calibrator import Ends
from .curve import PARAMETERS
from .fit import CurveTree, fit_tree, groups, refine_tree
from .intervals import Intervals
from .links import Links
from .table import CollectiveTable, collective_table

#: Folds of the calibration scores; each costs a fit of the whole tree, which takes about a minute.
FOLDS = 5

#: Slashes in a key of interval bounds down to a library: ``scope/fabric/library``.
LIBRARY_DEPTH = 2

FindLinks = Callable[[str], Links]
Fit = Callable[[CollectiveTable, np.ndarray], CurveTree]
#: Least share of the time that links take for a ring's bytes at their full rate which a measurement
#: may be. Switches that add up halve the bytes of an all-reduce; none of 31,000 published rows is
#: below 0.34 (transfers timed where they were issued). What is a unit off is a thousand times off.
_LEAST_SHARE = 0.25


@dataclass
class CollectiveModel(JsonModel):
    """Fitted collectives.

    Attributes:
        tree: Parameters by group.
        intervals: Bounds of the 90 % intervals.
        calibrated_machines: Machines that were calibrated with their owner's rows.
        provenance: Sources of the parameters.
    """

    form, what = 1, "collectives"
    command = "calibrate-collectives TABLE --fresh --out FILE"

    tree: CurveTree
    intervals: Intervals = field(default_factory=Intervals)
    calibrated_machines: tuple[str, ...] = ()
    provenance: dict[str, object] = field(default_factory=dict)

    def predict(self, frame: pd.DataFrame, find: FindLinks, own: bool = True) -> pd.DataFrame:
        """Latencies of collectives.

        Args:
            frame: Rows as for :func:`~opcast.models.collectives.table.collective_table`.
            find: Links by device string.
            own: Whether these are the links that the machines were measured with; with others, a
                measured machine counts as new.

        Returns:
            ``latency_s``, ``lo_s``, ``hi_s`` (90 %) in seconds and ``scope`` (``known``,
            ``calibrated`` or ``new`` machine, the last also if it was only measured with fewer
            devices; ``foreign`` if the library's operation was never measured on that fabric), with
            the index of ``frame``.
        """
        return pd.DataFrame(self.answer(collective_table(frame, find), own), index=frame.index)

    def answer(self, table: CollectiveTable, own: bool = True) -> dict[str, np.ndarray]:
        """Columns of :meth:`predict`, each of shape ``(n,)``, for rows that are arrays already."""
        latency = self.tree.predict_us(table) / 1e6
        # Depth 3 is the library's operation on the fabric; without it, the closest fitted group is
        # the operation on the fabric.
        scope = np.where(self.tree.knows(table, depth=3), "new", "foreign").astype(object)
        scope[self.tree.knows(table) & self.tree.reaches(table) & own] = "known"
        calibrated = np.isin(table.machine, self.calibrated_machines) & (scope == "known")
        scope[calibrated] = "calibrated"
        lower, upper = self.intervals.find(scope, table)
        return {
            "latency_s": latency,
            "lo_s": latency * np.exp(lower),
            "hi_s": latency * np.exp(upper),
            "scope": scope,
        }

    def calibrated(self, rows: pd.DataFrame, find: FindLinks) -> CollectiveModel:
        """Return a copy that is calibrated to the machines of measured rows.

        Only parameters of machines (depth 4) are fitted; those of fabrics, operations and libraries
        are kept.

        Args:
            rows: As for :meth:`predict`, with ``latency_us``.
            find: Links by device string.

        Raises:
            DatasetError: There is no row, or a latency is missing or not positive.
        """
        table, latency = measured_table(rows, find)
        tree = refine_tree(self.tree, table, latency, depths=(4,))
        scores = _fold_scores(
            lambda t, y: refine_tree(self.tree, t, y, depths=(4,)), table, latency
        )
        intervals = Intervals(dict(self.intervals.ends))
        intervals.learn("calibrated", table, scores)
        machines = tuple(sorted({*self.calibrated_machines, *map(str, table.machine)}))
        return CollectiveModel(tree, intervals, machines, self.provenance)

    def joined(self, rows: pd.DataFrame, find: FindLinks, about: dict[str, object]) -> Self:
        """Return a copy that also covers the libraries of measured rows.

        Parameters of libraries and machines (depths 3 and 4) are fitted; those of fabrics and
        operations are kept.

        Args:
            rows: As for :meth:`calibrated`; machines with the same ``group`` count as one.
            find: Links by device string.
            about: Provenance of the rows.

        Raises:
            DatasetError: There is no row, or a latency is missing or not positive.
        """
        table, latency = measured_table(rows, find)

        group = rows["group"].to_numpy(object) if "group" in rows else table.machine
        owner = dict(zip(table.machine, group, strict=True))

        def fit(part: CollectiveTable, part_us: np.ndarray) -> CurveTree:
            # A library's curves are for unmeasured machines: groups have equal weight.
            some = np.zeros(len(part), bool)
            groups_of = np.array([owner[m] for m in part.machine], object)
            for own in groups(part, depth=3).values():
                mask = np.zeros(len(part), bool)
                mask[own] = True
                some |= _even(groups_of, mask)
            library = refine_tree(self.tree, part.take(some), part_us[some], depths=(3,))
            return refine_tree(library, part, part_us, depths=(4,))

        fresh = Intervals()
        folds = _fold_scores(fit, table, latency)
        fresh.learn("known", table, folds)
        left_out, related = leave_one_out(table, latency, group, fit)
        # Groups have equal weight, so that a machine with many rows does not dominate.
        even = _even(group, np.isfinite(left_out))
        for scope, of_scope in (("new", even & related), ("foreign", even & ~related)):
            scores = np.log(latency[of_scope] / left_out[of_scope])
            fresh.learn(scope, table.take(of_scope), scores)
        # Bounds below a library; wider pools keep those of the first fit.
        own = {key: ends for key, ends in fresh.ends.items() if key.count("/") >= LIBRARY_DEPTH}
        errors = _errors(table, group, np.log(latency / left_out), folds, fresh, related)
        joined = [*listed(self.provenance.get("joined")), {**about, "errors": errors}]
        return type(self)(
            fit(table, latency),
            Intervals(self.intervals.ends | own),
            self.calibrated_machines,
            {**self.provenance, "joined": joined},
        )

    def joined_errors(self) -> pd.DataFrame:
        """Errors of the libraries that were joined last, by what was held out, in per cent."""
        last = listed(self.provenance.get("joined"))[-1:]
        errors = last[0].get("errors") if last and isinstance(last[0], dict) else None
        return pd.DataFrame.from_dict(errors or {}, orient="index")

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data: parameters, interval bounds and provenance."""
        return {
            "parameters": PARAMETERS,
            "curves": {k: np.round(v, 4).tolist() for k, v in sorted(self.tree.curves.items())},
            "residuals": {
                k: [np.round(part, 4).tolist() for part in v]
                for k, v in sorted(self.tree.residuals.items())
            },
            "intervals": {
                k: np.round(v, 4).tolist() for k, v in sorted(self.intervals.ends.items())
            },
            "calibrated_machines": self.calibrated_machines,
            "provenance": self.provenance,
        }

    def text(self, data: JsonMapping) -> str:
        """JSON text of the data, with each list of numbers on one line.

        One number per line would make the file, which is under version control, several times as
        long.
        """
        return json.dumps(data, indent=1).replace("\n   ", " ").replace("\n  ]", " ]") + "\n"

    @classmethod
    def from_dict(cls, data: JsonMapping) -> CollectiveModel:
        """Read :meth:`to_dict`'s data."""
        # Curves do not name their parameters: another order would be silently wrong.
        if tuple(data["parameters"]) != PARAMETERS:
            raise ValueError("its parameters are of another format")
        curves = {k: np.array(v, dtype=float) for k, v in data["curves"].items()}
        tables = data.get("residuals", {}).items()
        residuals = {k: (np.array(v[0]), np.array(v[1])) for k, v in tables}
        ends = typed(dict[str, Ends], data["intervals"], "intervals")
        machines = tuple(data["calibrated_machines"])
        return cls(CurveTree(curves, residuals), Intervals(ends), machines, data["provenance"])


def fit_collectives(
    rows: pd.DataFrame, find: FindLinks, provenance: dict[str, object] | None = None
) -> CollectiveModel:
    """Fit curves and intervals to measured collectives.

    Args:
        rows: As for :meth:`CollectiveModel.predict`, with ``latency_us``.
        find: Links by device string.
        provenance: Stored in the saved file.

    Returns:
        The model, fitted to every row. Its intervals of known machines come from cross-validation
        over rows, those of new machines from holding out each architecture in turn, separately for
        libraries that are then left without rows on the fabric.
    """
    table, latency = measured_table(rows, find)
    intervals = Intervals()
    intervals.learn("known", table, _fold_scores(fit_tree, table, latency))
    left_out, related = leave_one_out(table, latency)
    # Rows whose library's operation no other architecture has on that fabric are a worse case than
    # a new machine.
    for scope, of_scope in (("new", related), ("foreign", ~related & np.isfinite(left_out))):
        scores = np.log(latency[of_scope] / left_out[of_scope])
        intervals.learn(scope, table.take(of_scope), scores)
    return CollectiveModel(fit_tree(table, latency), intervals, provenance=provenance or {})


def measured_table(rows: pd.DataFrame, find: FindLinks) -> tuple[CollectiveTable, np.ndarray]:
    """The table of ``rows`` and their ``latency_us``.

    Raises:
        DatasetError: There is no row, or a latency is missing, not positive, or one that no link
            of the machine allows.
    """
    if "latency_us" not in rows or rows.empty:
        raise DatasetError("measured collectives need rows with latency_us", hint="check the table")
    check_measured(rows, ["latency_us"], "collectives", needed=True)
    table, latency_us = collective_table(rows, find), rows["latency_us"].to_numpy(float)
    least = table.points.wire / table.points.bandwidth
    low = np.flatnonzero(latency_us < _LEAST_SHARE * least)
    if low.size:
        one = low[0]
        others = f", and {low.size - 1} more" if low.size > 1 else ""
        raise DatasetError(
            f"latency_us is {latency_us[one]:g}{others}, but {rows['op'].iloc[one]} of "
            f"{rows['bytes'].iloc[one]:g} bytes over {table.points.world[one]:g} devices takes "
            f"{least[one]:.3g} µs at the rate of the links of {table.machine[one]}",
            where=f"collectives: row {one}",
            hint="is it in the unit that the column names, and of this device and number?",
        )
    return table, latency_us


def leave_one_out(
    table: CollectiveTable,
    latency_us: np.ndarray,
    group: np.ndarray | None = None,
    fit: Fit = fit_tree,
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of each row by a model that saw no machine of its architecture.

    Args:
        table: Collectives, ``n`` of them.
        latency_us: Measured latencies, shape ``(n,)``.
        group: Group of each row to hold out together, shape ``(n,)``; architectures by default.
        fit: Fits the model.

    Returns:
        Microseconds, shape ``(n,)``, NaN if there is only one group; and whether other groups had
        rows of the same fabric, operation and library, shape ``(n,)``.
    """
    result, related = np.full(len(table), np.nan), np.zeros(len(table), dtype=bool)
    owner = table.family if group is None else group
    families = sorted(set(owner.tolist()))
    for family in families if len(families) > 1 else []:
        held = owner == family
        tree = fit(table.take(~held), latency_us[~held])
        part = table.take(held)
        result[held] = tree.predict_us(part, known=False)
        related[held] = tree.knows(part, depth=3)
    return result, related


def _even(group: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Mask of usable rows with equally many of every group, drawn at random."""
    names, counts = np.unique(group[usable].astype(str), return_counts=True)
    rng, chosen = np.random.default_rng(0), np.zeros(len(group), bool)
    for name in names:
        own = np.flatnonzero(usable & (group == name))
        chosen[rng.choice(own, counts.min(), replace=False)] = True
    return chosen


def _errors(
    table: CollectiveTable,
    group: np.ndarray,
    left_out: np.ndarray,
    folds: np.ndarray,
    intervals: Intervals,
    related: np.ndarray,
) -> dict[str, dict[str, float]]:
    """Errors in per cent on held-out groups and rows, by size, with coverage of the intervals."""
    result: dict[str, dict[str, float]] = {}
    known = np.full(len(table), "known", object)
    scopes = np.where(related, "new", "foreign").astype(object)
    small = table.points.size < 2.0**20
    for what, scores, scope in (("left out", left_out, scopes), ("folds", folds, known)):
        lower, upper = intervals.find(scope, table)
        inside = (scores >= lower) & (scores <= upper)
        for name in dict.fromkeys(group):
            for size, chosen in (("below 1 MiB", small), ("from 1 MiB on", ~small)):
                own = chosen & (group == name) & np.isfinite(scores)
                if own.any():
                    ape = 100 * np.abs(np.expm1(-scores[own]))
                    result[f"{name}, {what}, {size}"] = {
                        "rows": int(own.sum()),
                        "mean": round(float(ape.mean()), 1),
                        "median": round(float(np.median(ape)), 1),
                        "covered": round(100 * float(inside[own].mean()), 1),
                    }
    return result


def _fold_scores(
    fit: Fit,
    table: CollectiveTable,
    latency_us: np.ndarray,
) -> np.ndarray:
    # Hold out single rows, not machines: the scope is a known machine at another size. The fixed
    # seed makes the shipped file reproducible.
    fold = np.random.default_rng(0).permutation(len(table)) % FOLDS
    scores = np.zeros(len(table))
    for k in range(FOLDS):
        held = fold == k
        if held.any() and not held.all():
            tree = fit(table.take(~held), latency_us[~held])
            scores[held] = np.log(latency_us[held] / tree.predict_us(table.take(held)))
    return scores
