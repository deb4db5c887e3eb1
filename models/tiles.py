"""Model of kernels with tile configurations: times, intervals, and ranking of candidates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from numpy.random import default_rng

from ..common.errors import ModelError
from ..common.types import JsonMapping, typed
from ..features.operators.schema import faulty
from .core.store import JsonModel
from .estimators.xgboost_trees import SavedTrees, applied, compact, grow
from .tile_rows import TileRows, keys_of
from .trust.calibrator import UNKNOWN, Calibrator, Ends

if TYPE_CHECKING:
    from xgboost import Booster

#: Number of trees, depth and least rows in a leaf of the models of known and of unseen devices,
#: where fewer and shallower trees transfer better.
_KNOWN, _GENERAL = (300, 6, 3), (150, 5, 3)
#: Folds over problems, for errors on unseen shapes.
FOLDS = 5


class TileAnswer(NamedTuple):
    """Times in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        seconds: Estimates.
        lo: Lower bounds.
        hi: Upper bounds.
        scope: ``known``, or ``unseen`` for devices without measured rows of the op.
    """

    seconds: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    scope: np.ndarray


@dataclass
class TileModel(JsonModel):
    """Learned times of kernels with tile configurations.

    Attributes:
        names: Ops and implementations.
        keys: Keys of configurations.
        pairs: ``device|op`` with measured rows.
        trees: Trees of known devices, and of others.
        ends: Interval bounds as logarithms, by device for known ones; ``""`` for others.
        offsets: Log-ratios of measured to least time by op, implementation and platform
            (``op|implementation|platform``), the base of the trees for other devices.
        provenance: Description of the training data.
    """

    form, what = 2, "tiles"

    names: list[str]
    keys: list[str]
    pairs: list[str]
    trees: tuple[SavedTrees, SavedTrees]
    ends: Calibrator[str]
    offsets: dict[str, float]
    provenance: dict[str, object] = field(default_factory=dict)

    @property
    def devices(self) -> list[str]:
        """Devices with measured rows."""
        return sorted({pair.split("|")[0] for pair in self.pairs})

    def predict(self, rows: TileRows) -> TileAnswer:
        """Predict the time of each row."""
        pairs = [f"{d}|{op}" for d, op in zip(rows.device, rows.names[:, 0], strict=True)]
        known = np.isin(pairs, self.pairs)
        log = np.where(
            known,
            self.trees[0].predict(rows.known(self.names, self.keys, self.devices)),
            _offset(rows, self.offsets)
            + self.trees[1].predict(rows.general(self.names, self.keys)),
        )
        # No kernel is faster than its chip's physical limit.
        seconds = np.maximum(rows.base_s * np.exp(log), rows.ceiling_s)
        keys = np.where(known, rows.device, "")
        own = np.array([self.ends.of((key, ""), UNKNOWN) for key in keys]).reshape(-1, 2)
        return TileAnswer(
            seconds,
            seconds * np.exp(own[:, 0]),
            seconds * np.exp(own[:, 1]),
            np.where(known, "known", "unseen").astype(object),
        )

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {
            "names": self.names,
            "keys": self.keys,
            "pairs": self.pairs,
            "trees": [trees.text() for trees in self.trees],
            "ends": self.ends.ends,
            "offsets": self.offsets,
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> TileModel:
        """Read :meth:`to_dict`'s data."""
        known, general = map(SavedTrees.from_text, data["trees"])
        names, keys, pairs = ([str(v) for v in data[k]] for k in ("names", "keys", "pairs"))
        return cls(
            names,
            keys,
            pairs,
            (known, general),
            Calibrator(typed(dict[str, Ends], data["ends"], "ends")),
            typed(dict[str, float], data["offsets"], "offsets"),
            dict(data["provenance"]),
        )


@dataclass(frozen=True)
class LeftOut:
    """Logarithms of measured over predicted time of held-out rows.

    Attributes:
        shapes: By a model fitted without the row's problem on any device.
        devices: By a model fitted without the row's device.
    """

    shapes: np.ndarray
    devices: np.ndarray


def fit_tiles(rows: TileRows, seconds: np.ndarray, seed: int = 0) -> tuple[TileModel, LeftOut]:
    """Learn times, with intervals from problems and devices held out in turn.

    Args:
        rows: Measured rows, of at least two devices.
        seconds: Measured times.
        seed: Seed of the folds and of the trees' draws.

    Raises:
        ModelError: All rows come from one device.
    """
    names = sorted({str(n) for n in rows.names.ravel()})
    keys, devices = keys_of(rows), sorted(set(map(str, rows.device)))
    if len(devices) < 2:
        raise ModelError("tiles of one device alone do not predict others", where=devices[0])
    target = np.log(seconds / rows.base_s)
    own, general = rows.known(names, keys, devices), rows.general(names, keys)
    # A problem's rows on all devices are in one fold, so that its shape is unseen.
    problems = np.array([str(s).split("|", 1)[1] for s in rows.subject])
    _, problem = np.unique(problems, return_inverse=True)
    fold = default_rng(seed).permutation(problem.max() + 1)[problem] % FOLDS
    shapes = _left_out(own, target, fold, seed)
    columns = {"device": rows.device, "op": rows.names[:, 0], "implementation": rows.names[:, 1]}
    carries = ~faulty(pd.DataFrame(columns), "local")
    others = np.zeros(len(rows))
    for name in devices:
        out = rows.device == name
        start, trees = _grow_general(rows, general, target, ~out & carries, seed)
        others[out] = (target - _offset(rows, start) - applied(trees, general))[out]
    intervals = Calibrator[str]().pool(shapes, rows.device, least=1)
    # Pooled over devices: few were measured, each with different ops.
    intervals.pool(others[carries], [""] * int(carries.sum()), least=1)
    every = np.ones(len(rows), bool)
    offsets, trees = _grow_general(rows, general, target, carries, seed)
    model = TileModel(
        names,
        keys,
        sorted({f"{d}|{op}" for d, op in zip(rows.device, rows.names[:, 0], strict=True)}),
        (
            SavedTrees(compact(grow(own, target, every, *_KNOWN, seed))),
            SavedTrees(compact(trees)),
        ),
        intervals,
        offsets,
        {"rows": len(rows), "devices": devices},
    )
    return model, LeftOut(shapes, others)


def _grow_general(
    rows: TileRows, features: np.ndarray, target: np.ndarray, some: np.ndarray, seed: int
) -> tuple[dict[str, float], Booster]:
    """Learn what transfers: offsets of implementations, and trees on the residuals.

    An offset is the mean over devices of a platform, so that the one with most rows does not
    dominate.
    """
    found: dict[str, dict[str, float]] = {}
    rest = target.copy()
    for label in sorted(set(rows.labels[some])):
        labelled = some & (rows.labels == label)
        for device in sorted(set(rows.device[labelled])):
            own = labelled & (rows.device == device)
            middle = float(np.median(target[own]))
            rest[own] -= middle
            found.setdefault(f"{label}|{rows.platform[own][0]}", {})[device] = middle
    offsets = {key: float(np.mean([*by_device.values()])) for key, by_device in found.items()}
    return offsets, grow(features, rest, some, *_GENERAL, seed)


def _offset(rows: TileRows, offsets: dict[str, float]) -> np.ndarray:
    """Offset of each row, from other platforms if its own has none, shape ``(n,)``."""
    by_label: dict[str, list[float]] = {}
    for key, value in offsets.items():
        by_label.setdefault(key.rsplit("|", 1)[0], []).append(value)
    every = float(np.mean([*offsets.values()])) if offsets else 0.0
    found = np.empty(len(rows))
    for place, (label, platform) in enumerate(zip(rows.labels, rows.platform, strict=True)):
        other = by_label.get(label)
        elsewhere = every if other is None else float(np.mean(other))
        found[place] = offsets.get(f"{label}|{platform}", elsewhere)
    return found


def _left_out(features: np.ndarray, target: np.ndarray, fold: np.ndarray, seed: int) -> np.ndarray:
    errors = np.zeros(len(target))
    for number in np.unique(fold):
        out = fold == number
        errors[out] = (target - applied(grow(features, target, ~out, *_KNOWN, seed), features))[out]
    return errors


@dataclass(frozen=True)
class Ranking:
    """Quality of the ranking of candidates for the same problem.

    Attributes:
        groups: Problems with at least two candidates.
        top: Fraction of them whose first choice is within 5 % of the best.
        loss: Mean time of the first choice over the best, minus 1.
        kendall: Mean Kendall's τ of problems with at least three candidates.
    """

    groups: int
    top: float
    loss: float
    kendall: float


def ranking(rows: TileRows, predicted: np.ndarray, seconds: np.ndarray) -> Ranking:
    """Evaluate the ranking of candidates by problem.

    A candidate measured in several versions of its library counts once, with its fastest time.

    Args:
        rows: The candidates.
        predicted: Predicted times, shape ``(n,)``.
        seconds: Measured times.
    """
    from scipy.stats import kendalltau

    groups: dict[str, dict[str, int]] = {}
    for place, (name, one) in enumerate(zip(rows.subject, rows.candidate, strict=True)):
        best = groups.setdefault(str(name), {})
        if one not in best or seconds[place] < seconds[best[one]]:
            best[one] = place
    losses, taus = [], []
    for best in groups.values():
        at = np.array(list(best.values()))
        if len(at) < 2:
            continue
        losses.append(seconds[at[np.argmin(predicted[at])]] / seconds[at].min() - 1.0)
        # τ of equal times is not defined.
        if len(at) > 2 and np.ptp(seconds[at]) > 0 and np.ptp(predicted[at]) > 0:
            taus.append(kendalltau(predicted[at], seconds[at]).statistic)
    loss = np.array(losses)
    return Ranking(
        len(loss),
        float((loss <= 0.05).mean()) if len(loss) else float("nan"),
        float(loss.mean()) if len(loss) else float("nan"),
        float(np.mean(taus)) if taus else float("nan"),
    )
