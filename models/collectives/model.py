"""Predicts collectives from the operation, its bytes, the number of devices and their links.

The physics is ring volume over link bandwidth plus start-ups (:mod:`.curve`); on top come a few
fitted parameters for each fabric, operation, library and machine (:mod:`.fit`). A machine without
measurements takes the parameters of its fabric, operation and library, scaled by its own bandwidth
and clock. The parameters shipped with the package are made by :mod:`.report`;
:mod:`.on_cluster` applies the model to the ranks of a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, ModelError
from ...common.files import parse_json, write_text
from ...common.paths import PACKAGE
from .curve import PARAMETERS
from .fit import CurveTree, fit_tree, refine_tree
from .intervals import Intervals
from .links import Links
from .table import CollectiveTable, collective_table

#: Format of the file that :meth:`CollectiveModel.save` writes.
FORMAT = 1
#: Parameters that ship with the package.
PRETRAINED = PACKAGE / "models" / "pretrained" / "collectives.json"
#: Folds of the calibration scores; each costs a fit of the whole tree, which takes about a minute.
FOLDS = 5

FindLinks = Callable[[str], Links]


@dataclass
class CollectiveModel:
    """Fitted collectives.

    Attributes:
        tree: Parameters by group.
        intervals: Ends of the 90 % intervals.
        calibrated_machines: Machines that were calibrated with rows of their own.
        provenance: Sources of the parameters.
    """

    tree: CurveTree
    intervals: Intervals = field(default_factory=Intervals)
    calibrated_machines: tuple[str, ...] = ()
    provenance: dict[str, object] = field(default_factory=dict)

    def predict(self, frame: pd.DataFrame, find: FindLinks) -> pd.DataFrame:
        """Latencies of collectives.

        Args:
            frame: Rows as :func:`~opcast.models.collectives.table.collective_table` takes them.
            find: Links by device string.

        Returns:
            ``latency_s``, ``lo_s``, ``hi_s`` (90 %) in seconds and ``scope`` (``known``,
            ``calibrated`` or ``new`` machine; ``foreign`` where the library's operation was never
            measured on that fabric), with the index of ``frame``.
        """
        table = collective_table(frame, find)
        latency = self.tree.predict_us(table) / 1e6
        # Depth 3 is the library's operation on the fabric; without it nothing closer than the
        # operation on the fabric was fitted.
        scope = np.where(self.tree.knows(table, depth=3), "new", "foreign").astype(object)
        scope[self.tree.knows(table)] = "known"
        own = np.isin(table.machine, self.calibrated_machines) & (scope == "known")
        scope[own] = "calibrated"
        lower, upper = self.intervals.find(scope, table)
        columns = {
            "latency_s": latency,
            "lo_s": latency * np.exp(lower),
            "hi_s": latency * np.exp(upper),
            "scope": scope,
        }
        return pd.DataFrame(columns, index=frame.index)

    def calibrated(self, rows: pd.DataFrame, find: FindLinks) -> CollectiveModel:
        """Return a copy that is calibrated to the machines of measured rows.

        Only parameters of machines (depth 4) are fitted; those of fabrics, operations and libraries
        stay as they are.

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
        intervals.add("calibrated", table, scores)
        machines = tuple(sorted({*self.calibrated_machines, *map(str, table.machine)}))
        return CollectiveModel(tree, intervals, machines, self.provenance)

    def save(self, path: Path) -> None:
        """Write JSON with parameters by name, interval ends and provenance."""
        content = {
            "format": FORMAT,
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
        # A list of numbers on one line: one number a line would make the file, which is under
        # version control, several times as long.
        lines = json.dumps(content, indent=1).replace("\n   ", " ").replace("\n  ]", " ]")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, lines + "\n")

    @classmethod
    def load(cls, path: Path = PRETRAINED) -> CollectiveModel:
        """Read what :meth:`save` wrote; without a path, the parameters shipped with the package.

        Raises:
            ModelError: The file is missing, damaged, or of another format.
        """
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            # The vector has no names of its own: parameters in another order would be silently
            # wrong.
            if content["format"] != FORMAT or tuple(content["parameters"]) != PARAMETERS:
                raise ModelError(
                    "collective parameters of another format",
                    where=str(path),
                    hint="fit them again",
                )
            curves = {k: np.array(v, dtype=float) for k, v in content["curves"].items()}
            ends = {k: (float(v[0]), float(v[1])) for k, v in content["intervals"].items()}
            tables = content.get("residuals", {}).items()
            residuals = {k: (np.array(v[0]), np.array(v[1])) for k, v in tables}
            machines = tuple(content["calibrated_machines"])
            tree = CurveTree(curves, residuals)
            return cls(tree, Intervals(ends), machines, content["provenance"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ModelError(
                f"collective parameters cannot be read: {error}", where=str(path)
            ) from None


def fit_collectives(
    rows: pd.DataFrame, find: FindLinks, provenance: dict[str, object] | None = None
) -> CollectiveModel:
    """Fit curves and intervals to measured collectives.

    Args:
        rows: As for :meth:`CollectiveModel.predict`, with ``latency_us``.
        find: Links by device string.
        provenance: Kept in the saved file.

    Returns:
        The model, fitted to every row. Its intervals of known machines come from folds of the rows,
        those of new machines from leaving out each architecture in turn, apart for libraries that
        are then left without rows on the fabric.
    """
    table, latency = measured_table(rows, find)
    intervals = Intervals()
    intervals.add("known", table, _fold_scores(fit_tree, table, latency))
    left_out, related = leave_one_out(table, latency)
    # Rows whose library's operation no other architecture has on that fabric show a worse case than
    # a new machine does.
    for scope, of_scope in (("new", related), ("foreign", ~related & np.isfinite(left_out))):
        scores = np.log(latency[of_scope] / left_out[of_scope])
        intervals.add(scope, table.take(of_scope), scores)
    return CollectiveModel(fit_tree(table, latency), intervals, provenance=provenance or {})


def measured_table(rows: pd.DataFrame, find: FindLinks) -> tuple[CollectiveTable, np.ndarray]:
    """The table of ``rows`` and their ``latency_us``.

    Raises:
        DatasetError: There is no row, or a latency is missing or not positive.
    """
    if "latency_us" not in rows or rows.empty or not (rows["latency_us"] > 0).all():
        raise DatasetError(
            "measured collectives need rows with positive latency_us", hint="check the table"
        )
    return collective_table(rows, find), rows["latency_us"].to_numpy(float)


def leave_one_out(table: CollectiveTable, latency_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of each row by a model that saw no machine of its architecture.

    Returns:
        Microseconds, shape ``(n,)``, NaN for every row if there is only one architecture; and
        whether other machines had rows of the same fabric, operation and library, shape ``(n,)``.
    """
    result, related = np.full(len(table), np.nan), np.zeros(len(table), dtype=bool)
    families = sorted(set(table.family.tolist()))
    for family in families if len(families) > 1 else []:
        held = table.family == family
        tree = fit_tree(table.take(~held), latency_us[~held])
        part = table.take(held)
        result[held] = tree.predict_us(part, known=False)
        related[held] = tree.knows(part, depth=3)
    return result, related


def _fold_scores(
    fit: Callable[[CollectiveTable, np.ndarray], CurveTree],
    table: CollectiveTable,
    latency_us: np.ndarray,
) -> np.ndarray:
    # Single rows, not machines, are held out: the scope is a known machine at another size. The
    # fixed seed makes the shipped file reproducible.
    fold = np.random.default_rng(0).permutation(len(table)) % FOLDS
    scores = np.zeros(len(table))
    for k in range(FOLDS):
        held = fold == k
        if held.any() and not held.all():
            tree = fit(table.take(~held), latency_us[~held])
            scores[held] = np.log(latency_us[held] / tree.predict_us(table.take(held)))
    return scores
