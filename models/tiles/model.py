"""The model of kernels with tile configurations: times, intervals, and the order of candidates."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import default_rng

from ...common.errors import ModelError
from ...common.files import parse_json, write_text
from ...common.paths import PACKAGE
from ..estimators.xgboost_import import xgboost as import_xgboost
from ..estimators.xgboost_trees import compact, read_booster
from ..trust.conformal import ends, including_zero
from .rows import TileRows, keys_of

if TYPE_CHECKING:
    from xgboost import Booster

#: Format of the file that :meth:`TileModel.save` writes.
FORMAT = 1
#: Model that ships with the package.
PRETRAINED = PACKAGE / "models" / "pretrained" / "tiles.json"
#: Trees and depth of the model of known devices and of that of others, where fewer and shallower
#: ones carry further; and their rate.
_KNOWN, _GENERAL, _RATE = (300, 6), (150, 5), 0.08
#: Folds of problems, for errors of shapes that were not learned from.
FOLDS = 5

Ends = tuple[float, float]


class TileAnswer(NamedTuple):
    """Times in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        seconds: Estimates.
        lo: Lower ends.
        hi: Upper ends.
        scope: ``known``, or ``unseen`` for devices without measured rows of the op.
    """

    seconds: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    scope: np.ndarray


@dataclass
class TileModel:
    """What measured configurations teach.

    Attributes:
        names: Ops and implementations.
        keys: Keys of configurations.
        pairs: ``device|op`` with measured rows.
        trees: Compressed boosters: of known devices, and of others.
        ends: Ends of intervals as logarithms, by device for known ones; ``""`` for others.
        provenance: What it was learned from.
    """

    names: list[str]
    keys: list[str]
    pairs: list[str]
    trees: tuple[bytes, bytes]
    ends: dict[str, Ends]
    provenance: dict[str, object] = field(default_factory=dict)
    _boosters: list[Booster] = field(default_factory=list, repr=False)

    @property
    def devices(self) -> list[str]:
        """Devices with measured rows."""
        return sorted({pair.split("|")[0] for pair in self.pairs})

    def predict(self, rows: TileRows) -> TileAnswer:
        """Predict the time of each row."""
        if not self._boosters:
            self._boosters = [read_booster(data) for data in self.trees]
        pairs = [f"{d}|{op}" for d, op in zip(rows.device, rows.names[:, 0], strict=True)]
        known = np.isin(pairs, self.pairs)
        log = np.where(
            known,
            _applied(self._boosters[0], rows.known(self.names, self.keys, self.devices)),
            _applied(self._boosters[1], rows.general(self.names)),
        )
        # No kernel beats its chip, whatever the trees say.
        seconds = np.maximum(rows.base_s * np.exp(log), rows.ceiling_s)
        own = np.array(
            [
                self.ends.get(str(d) if k else "", self.ends[""])
                for d, k in zip(rows.device, known, strict=True)
            ]
        ).reshape(-1, 2)
        return TileAnswer(
            seconds,
            seconds * np.exp(own[:, 0]),
            seconds * np.exp(own[:, 1]),
            np.where(known, "known", "unseen").astype(object),
        )

    def save(self, path: Path) -> None:
        """Write the model as one JSON file."""
        data = {
            "format": FORMAT,
            "names": self.names,
            "keys": self.keys,
            "pairs": self.pairs,
            "trees": [base64.b64encode(tree).decode() for tree in self.trees],
            "ends": self.ends,
            "provenance": self.provenance,
        }
        write_text(path, json.dumps(data, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path = PRETRAINED) -> TileModel:
        """Read a model.

        Raises:
            ModelError: The file is missing, damaged, or of another format.
        """
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']} is not one that this version reads")
            known, general = (base64.b64decode(text) for text in data["trees"])
            return cls(
                [str(v) for v in data["names"]],
                [str(v) for v in data["keys"]],
                [str(v) for v in data["pairs"]],
                (known, general),
                {str(k): (float(v[0]), float(v[1])) for k, v in data["ends"].items()},
                dict(data["provenance"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(
                f"the model of tiles cannot be read: {error}",
                where=str(path),
                hint="train it again: opcast train --tiles TABLE",
            ) from None


@dataclass(frozen=True)
class LeftOut:
    """Logarithms of measured over predicted time of rows that were not learned from.

    Attributes:
        shapes: By a model that lacks the row's problem, on any device.
        devices: By a model that lacks the row's device.
    """

    shapes: np.ndarray
    devices: np.ndarray


def fit_tiles(rows: TileRows, seconds: np.ndarray, seed: int = 0) -> tuple[TileModel, LeftOut]:
    """Learn times; errors of problems and devices left out in turn give the intervals.

    Args:
        rows: Measured rows, of two devices or more.
        seconds: Their times.
        seed: Of the folds and of the trees' draws.

    Raises:
        ModelError: All rows are of one device.
    """
    names = sorted({str(n) for n in rows.names.ravel()})
    keys, devices = keys_of(rows), sorted(set(map(str, rows.device)))
    if len(devices) < 2:
        raise ModelError("tiles of one device alone say nothing of others", where=devices[0])
    target = np.log(seconds / rows.base_s)
    own, general = rows.known(names, keys, devices), rows.general(names)
    # A problem's rows on all devices are in one fold: its shape is new to all of them.
    problems = np.array([str(s).split("|", 1)[1] for s in rows.subject])
    _, problem = np.unique(problems, return_inverse=True)
    fold = default_rng(seed).permutation(problem.max() + 1)[problem] % FOLDS
    shapes = _left_out(own, target, fold, _KNOWN, seed)
    chip = np.unique(rows.device.astype(str), return_inverse=True)[1]
    others = _left_out(general, target, chip, _GENERAL, seed)
    apart = {d: ends(shapes[rows.device == d]) for d in devices}
    # Over all devices together: one whose compiler lacked an op (XLA's ragged products on v5p, a
    # hundred times slower) would make every interval useless.
    unseen = including_zero(ends(others))
    every = np.ones(len(rows), bool)
    model = TileModel(
        names,
        keys,
        sorted({f"{d}|{op}" for d, op in zip(rows.device, rows.names[:, 0], strict=True)}),
        (
            compact(_grow(own, target, every, _KNOWN, seed)),
            compact(_grow(general, target, every, _GENERAL, seed)),
        ),
        {**{d: including_zero(e) for d, e in apart.items()}, "": unseen},
        {"rows": len(rows), "devices": devices},
    )
    return model, LeftOut(shapes, others)


def _left_out(
    features: np.ndarray, target: np.ndarray, fold: np.ndarray, size: tuple[int, int], seed: int
) -> np.ndarray:
    errors = np.zeros(len(target))
    for number in np.unique(fold):
        out = fold == number
        errors[out] = (target - _applied(_grow(features, target, ~out, size, seed), features))[out]
    return errors


def _grow(
    features: np.ndarray, target: np.ndarray, rows: np.ndarray, size: tuple[int, int], seed: int
) -> Booster:
    xgboost = import_xgboost()
    settings = {
        "objective": "reg:absoluteerror",
        "max_depth": size[1],
        "eta": _RATE,
        "subsample": 0.8,
        "min_child_weight": 3,
        "nthread": 1,
        "seed": seed,
        "verbosity": 0,
    }
    grown: Booster = xgboost.train(settings, xgboost.DMatrix(features[rows], target[rows]), size[0])
    return grown


def _applied(booster: Booster, features: np.ndarray) -> np.ndarray:
    return np.asarray(booster.predict(import_xgboost().DMatrix(features)), float)


@dataclass(frozen=True)
class Ranking:
    """How well candidates of the same problem were ranked.

    Attributes:
        groups: Problems with two candidates or more.
        top: Share of them whose first choice is within 5 % of the best.
        loss: Mean time of the first choice over the best, minus 1.
        kendall: Mean Kendall's τ of problems with three candidates or more.
    """

    groups: int
    top: float
    loss: float
    kendall: float


def ranking(rows: TileRows, predicted: np.ndarray, seconds: np.ndarray) -> Ranking:
    """Judge the order of candidates by problem.

    A candidate that was measured in several versions of its library counts once, with its fastest.

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


@lru_cache(maxsize=1)
def shipped_tiles() -> TileModel:
    """The model that ships with the package, read once."""
    return TileModel.load()
