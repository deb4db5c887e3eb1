"""Interval ends of operator models: per device and size in domain, across devices outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..conformal import MIN_SCORES, UNCALIBRATED, Ends, ends

BINS = 4
#: Stands for devices of another vendor than most that were learned from.
FOREIGN = "*"


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
    unseen: Ends = (-UNCALIBRATED, UNCALIBRATED)
    foreign: Ends = (-UNCALIBRATED, UNCALIBRATED)

    def fit_device(self, device: str, scores: np.ndarray, predicted_s: np.ndarray) -> None:
        """Calibrate a device.

        Args:
            device: Its name.
            scores: ``log(measured / predicted)`` of rows that the model was not fitted to.
            predicted_s: Their predictions.
        """
        size = np.log(predicted_s)
        bins = int(np.clip(len(scores) // MIN_SCORES, 1, BINS))
        edges = np.unique(np.quantile(size, np.linspace(0, 1, bins + 1)[1:-1]))
        place = np.searchsorted(edges, size, side="right")
        every = ends(scores)
        found = [
            ends(scores[place == b]) if (place == b).sum() >= MIN_SCORES else every
            for b in range(len(edges) + 1)
        ]
        self.edges[device] = edges.tolist()
        self.lower[device] = [min(lo, 0.0) for lo, _ in found]
        self.upper[device] = [max(hi, 0.0) for _, hi in found]

    def fit_unseen(self, scores: Mapping[str, np.ndarray], foreign: Sequence[str] = ()) -> None:
        """Calibrate for a device without samples, leave-one-device-out.

        The ends are the widest of those of the devices that were left out in turn: a new device is
        one more draw of a device, not of a row, and few devices have been drawn.

        Args:
            scores: Scores of each left-out device by a model that never saw it.
            foreign: Which of them are of another vendor than most; they count for their like only.
        """
        own = [values for name, values in scores.items() if name not in foreign]
        self.unseen = _widest(own)
        self.foreign = _widest(list(scores.values()))

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {
            "edges_log_s": self.edges,
            "lower_log": self.lower,
            "upper_log": self.upper,
            "unseen_log": list(self.unseen),
            "foreign_log": list(self.foreign),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceIntervals:
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


def _widest(scores: Sequence[np.ndarray]) -> Ends:
    found = [ends(values) for values in scores if len(values) >= MIN_SCORES]
    if not found:
        return (-UNCALIBRATED, UNCALIBRATED)
    return (min(0.0, *(lo for lo, _ in found)), max(0.0, *(hi for _, hi in found)))


def twins(names: Sequence[str], chips: Mapping[str, tuple[object, ...]]) -> list[tuple[str, ...]]:
    """Devices of the same chip together: leaving out one of them would leave its twin in."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        found.setdefault(chips[name], []).append(name)
    return [tuple(group) for group in found.values()]
