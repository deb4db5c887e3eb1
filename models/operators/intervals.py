"""Interval ends of operator models: by device and size in domain, across devices outside.

What an unknown version of a library may change widens them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import JsonMapping
from ...features.operators.columns import OpRows, texts_of
from ..trust.calibrator import (
    MIN_SCORES,
    UNCALIBRATED,
    Calibrator,
    Ends,
    ends,
    including_zero,
    size_bins,
    widest,
    with_error,
)
from .family_tables import constants
from .prediction import FamilyPrediction

if TYPE_CHECKING:
    import pandas as pd

#: Most size bins of a device; with fewer scores than MIN_SCORES for each, there are fewer.
#: Engineering estimate.
BINS = 4
#: Name that stands for devices of another vendor than most that were learned from.
FOREIGN = "*"
#: Between library, device and family in the name of versions that are known of one family on one
#: device alone.
SEPARATOR = "@"
#: Ends before any calibration.
UNKNOWN = (-UNCALIBRATED, UNCALIBRATED)


@dataclass
class DeviceIntervals:
    """Split-conformal ends of the log-ratio of measured to predicted, by device and size.

    Attributes:
        edges: Log predictions (s) between the size bins, by device.
        lower: Lower ends by device, one a bin.
        upper: Upper ends by device, one a bin.
        unseen: Ends for a device without samples.
        foreign: The same for a device of another vendor than most that were learned from.
    """

    edges: dict[str, list[float]] = field(default_factory=dict)
    lower: dict[str, list[float]] = field(default_factory=dict)
    upper: dict[str, list[float]] = field(default_factory=dict)
    unseen: Ends = UNKNOWN
    foreign: Ends = UNKNOWN

    def fit_device(self, device: str, scores: np.ndarray, predicted_s: np.ndarray) -> None:
        """Calibrate a device.

        Args:
            device: Its name.
            scores: ``log(measured / predicted)`` of rows that the model was not fitted to.
            predicted_s: Their predictions.
        """
        bins = int(np.clip(len(scores) // MIN_SCORES, 1, BINS))
        # By prediction, not by measurement: only the prediction is known when an interval is asked
        # for.
        edges, place = size_bins(np.log(predicted_s), bins)
        own = Calibrator[int]().pool(scores, place.tolist())
        every = including_zero(ends(scores))
        by_bin = [own.of((b,), every) for b in range(len(edges) + 1)]
        self.edges[device] = edges.tolist()
        self.lower[device] = [lo for lo, _ in by_bin]
        self.upper[device] = [hi for _, hi in by_bin]

    def fit_unseen(
        self,
        scores: Mapping[str, np.ndarray],
        foreign: Sequence[str] = (),
        widened: bool = False,
    ) -> None:
        """Calibrate for a device without samples, leave-one-device-out.

        The ends are the widest of those of the devices that were left out in turn: a new device is
        one more draw of a device, not of a row, and few devices have been drawn.

        Args:
            scores: Scores of each left-out device by a model that never saw it.
            foreign: Devices of a minority vendor; they count for :attr:`foreign` only.
            widened: Whether ends are moved out, see :func:`moved_out`.
        """
        own = [values for name, values in scores.items() if name not in foreign]
        # A single chip is no sample of chips: the physics may have been read off it.
        self.unseen = widest(own if len(own) > 1 else scores.values()) or UNKNOWN
        # All left-out devices count, those of minority vendors with their larger errors included.
        self.foreign = widest(scores.values()) or UNKNOWN
        if widened:
            self.unseen, self.foreign = moved_out(self.unseen), moved_out(self.foreign)

    def of(self, device: str, predicted_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the interval in seconds for rows of one device.

        Args:
            device: A calibrated device; any other name stands for an unseen one, and
                :data:`FOREIGN` for one of another vendor.
            predicted_s: Predictions, shape ``(n,)``.
        """
        if device not in self.edges:
            lo, hi = self.foreign if device == FOREIGN else self.unseen
            return predicted_s * np.exp(lo), predicted_s * np.exp(hi)
        place = np.searchsorted(self.edges[device], np.log(predicted_s), side="right")
        lower, upper = np.array(self.lower[device]), np.array(self.upper[device])
        return predicted_s * np.exp(lower[place]), predicted_s * np.exp(upper[place])

    def to_dict(self) -> dict[str, object]:
        """Plain data for the manifest."""
        return {
            "edges_log_s": self.edges,
            "lower_log": self.lower,
            "upper_log": self.upper,
            "unseen_log": list(self.unseen),
            "foreign_log": list(self.foreign),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> DeviceIntervals:
        """Read :meth:`to_dict`'s data."""
        lo, hi = data["unseen_log"]
        other_lo, other_hi = data["foreign_log"]
        return cls(
            {k: list(v) for k, v in data["edges_log_s"].items()},
            {k: list(v) for k, v in data["lower_log"].items()},
            {k: list(v) for k, v in data["upper_log"].items()},
            (float(lo), float(hi)),
            (float(other_lo), float(other_hi)),
        )


def moved_out(ends: Ends) -> Ends:
    """Ends for one more chip than those they were read off (``wider`` in ``constants.yaml``)."""
    wider, least = constants()["wider"], constants()["least_end"]
    lo, hi = wider * ends[0], wider * ends[1]
    return min(lo, -least * hi), max(hi, -least * lo)


def twins(names: Sequence[str], chips: Mapping[str, tuple[object, ...]]) -> list[tuple[str, ...]]:
    """Devices of the same chip together: leaving out one of them would leave its twin in."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        found.setdefault(chips[name], []).append(name)
    return [tuple(group) for group in found.values()]


def versions_of(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Versions by library; none where rows do not name them.

    Args:
        rows: Rows of operators, with ``backend`` and ``version`` where they are known.
    """
    import pandas as pd

    if "version" not in rows or "backend" not in rows:
        return {}
    named = pd.DataFrame({"library": texts_of(rows["backend"]), "it": texts_of(rows["version"])})
    named = named[(named["library"] != "") & (named["it"] != "")].drop_duplicates().astype(str)
    return {str(k): sorted(part["it"]) for k, part in named.groupby("library")}


def joined_versions(
    first: Mapping[str, Collection[str]], second: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Versions by library of two sets together."""
    return {
        name: sorted({*first.get(name, ()), *second.get(name, ())}) for name in {**first, **second}
    }


def widen_unknown(
    prediction: FamilyPrediction, rows: pd.DataFrame | OpRows, known: Mapping[str, Collection[str]]
) -> None:
    """Widen, in place, the intervals of rows that name another version than those learned from.

    Errors of the model and changes between versions count as independent. Libraries without a known
    version, and rows that name none, keep their intervals.

    Args:
        prediction: Of ``n`` rows.
        rows: The rows, with ``key``, ``device``, and ``backend`` and ``version`` where they are
            known.
        known: Versions by library, or by library, device and family joined by :data:`SEPARATOR`.
    """
    rows = OpRows.of(rows)
    if not known or "version" not in rows or "backend" not in rows:
        return
    other = rows.where("version", bool) & rows.where("backend", known.__contains__)
    for name, versions in known.items() if other.any() else ():
        own = other.copy()
        texts = name.split(SEPARATOR, 2)
        for column, text in zip(("backend", "device", "key"), texts, strict=False):
            own &= rows.where(column, text.__eq__)
        other &= ~(own & rows.where("version", versions.__contains__))
    if not other.any():
        return
    release = np.full(len(other), constants()["release"])
    for family, own_release in constants()["releases"].items():
        release[rows.where("key", family.__eq__)] = own_release
    release = release[other]
    latency = prediction.latency[other]
    now = np.log(prediction.lo[other] / latency), np.log(prediction.hi[other] / latency)
    below, above = with_error(now, (release, release))
    prediction.lo[other], prediction.hi[other] = latency * np.exp(below), latency * np.exp(above)
