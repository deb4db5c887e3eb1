"""Board power model: times and watts of library operators, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ...common.types import JsonMapping, typed
from ...features.devices.catalogue import find_device
from ..core.store import JsonModel
from ..estimators.xgboost_trees import SavedTrees, applied, compact, grow
from ..trust.calibrator import (
    Calibrator,
    Ends,
    ends,
    group_weight,
    including_zero,
    size_bins,
    weighted_ends,
)
from .law import PowerLaw, Silicon, fit_law
from .rows import PowerRows

#: Numbers of trees for time and power, their depth, and least rows in a leaf. Small: the file
#: ships.
_TREES, _DEPTH, _LEAF = (400, 400), 8, 5
#: Fewest readings of the board's sensor for a row of sustained power. The sensor averages over a
#: second or so: shorter runs include what ran before (rows of one shape differ by 20 % on average
#: with fewer than ten readings, by 4 % with more).
SUSTAINED = 10
#: Fewest readings for a row to be learned from at all (the kernel pack's README, trap 3).
LEAST = 4
#: Lower limit of predictions relative to idle power: boards may sleep.
_ASLEEP = 0.9
#: Time bins for errors of power: readings of short kernels are noisier.
_BINS = 5


class PowerErrors(NamedTuple):
    """Errors on ``n`` held-out rows.

    Attributes:
        at: Indices of the rows.
        device: Device of each, object.
        name: Class of kernels of each, object.
        seconds: Predicted times.
        time: Logarithms of measured over predicted time.
        power: Logarithms of measured over predicted power.
    """

    at: np.ndarray
    device: np.ndarray
    name: np.ndarray
    seconds: np.ndarray
    time: np.ndarray
    power: np.ndarray


class PowerAnswer(NamedTuple):
    """Times in seconds and board power in watts with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        seconds: Times.
        seconds_lo: Lower bounds of the times.
        seconds_hi: Upper bounds of the times.
        watts: Mean board power; NaN if the device's limit is unknown.
        watts_lo: Lower bounds of the power.
        watts_hi: Upper bounds of the power.
        scope: ``known``, or ``unseen`` for devices and classes of kernels without measured power.
    """

    seconds: np.ndarray
    seconds_lo: np.ndarray
    seconds_hi: np.ndarray
    watts: np.ndarray
    watts_lo: np.ndarray
    watts_hi: np.ndarray
    scope: np.ndarray


@dataclass
class PowerModel(JsonModel):
    """Learned board power.

    Attributes:
        law: The law, the only part for programs and steps.
        classes: Classes of kernels of the measured rows.
        devices: Devices that they ran on.
        trees: Logarithms of measured over predicted time, and of measured power over the law's.
        time_ends: Interval bounds of times as logarithms: known, and unseen.
        power_ends: Interval bounds of power, by bin of time.
        unseen_ends: Interval bounds of power for unseen devices and classes.
        edges: Edges of the bins, in seconds.
        provenance: Description of the training data.
    """

    form, what = 2, "power"

    law: PowerLaw
    classes: list[str]
    devices: list[str]
    trees: tuple[SavedTrees, SavedTrees]
    time_ends: tuple[Ends, Ends]
    power_ends: list[Ends]
    unseen_ends: Ends
    edges: np.ndarray
    provenance: dict[str, object] = field(default_factory=dict)

    def predict(self, rows: PowerRows) -> PowerAnswer:
        """Predict operators.

        Args:
            rows: The operators.
        """
        seconds, share, idle = self._raw(rows)
        known = np.isin(rows.name.astype(str), self.classes)
        known &= np.isin(rows.device.astype(str), self.devices)
        power, time = self._ends(seconds, known)
        watts = share * rows.limit
        return PowerAnswer(
            seconds,
            seconds * np.exp(time[:, 0]),
            seconds * np.exp(time[:, 1]),
            watts,
            # A board exceeds its limit only by sensor ripple, and does not fall below idle.
            np.maximum(watts * np.exp(power[:, 0]), _ASLEEP * idle * rows.limit),
            np.minimum(watts * np.exp(power[:, 1]), 1.02 * rows.limit),
            np.where(known, "known", "unseen").astype(object),
        )

    def _ends(self, seconds: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Interval bounds of power and of times, as logarithms of shape ``(n, 2)``."""
        own = np.array(self.power_ends)[np.searchsorted(self.edges, seconds, side="right")]
        power = np.where(known[:, None], own, np.array(self.unseen_ends))
        time = np.where(known[:, None], np.array(self.time_ends[0]), np.array(self.time_ends[1]))
        return power, time

    def ends_of(self, left: PowerErrors, known: bool) -> tuple[np.ndarray, np.ndarray]:
        """Interval bounds of power and of times on held-out rows."""
        return self._ends(left.seconds, np.full(len(left.seconds), known))

    def _raw(self, rows: PowerRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, power, and idle power as fractions of the limit."""
        alike = {name: self._alike(name) for name in map(str, np.unique(rows.device))}
        every = {name: [name] if name in self.devices else self.devices for name in alike}
        seconds = rows.seconds * np.exp(self._asked(self.trees[0], rows, rows.seconds, alike))
        law, idle = rows.share(self.law, seconds)
        share = law * np.exp(self._asked(self.trees[1], rows, seconds, every))
        return seconds, np.clip(share, _ASLEEP * idle, 1.0), idle

    def _alike(self, name: str) -> list[str]:
        """The known devices whose software a device runs: itself, its line's, or all."""
        if name in self.devices:
            return [name]
        line = find_device(name).line
        own = [d for d in self.devices if find_device(d).line == line]
        return own or self.devices

    def _asked(
        self,
        trees: SavedTrees,
        rows: PowerRows,
        seconds: np.ndarray,
        boards: Mapping[str, Sequence[str]],
    ) -> np.ndarray:
        """Predictions of trees: of each device the mean over the boards that it is asked as."""
        said = np.zeros(len(seconds))
        for name, asked in boards.items():
            at = np.flatnonzero(rows.device == name)
            own = rows.take(at)
            for board in asked:
                flags = np.full(len(at), board, object)
                columns = own.features(seconds[at], self.classes, self.devices, flags)
                said[at] += trees.predict(columns) / len(asked)
        return said

    def calibrate(self, errors: PowerErrors, unseen: PowerErrors | None) -> None:
        """Calibrate intervals on held-out rows.

        Args:
            errors: Errors on rows of known devices and classes.
            unseen: Errors on held-out devices; ``None`` if only one was measured.
        """
        self.edges, bins = size_bins(errors.seconds, _BINS)
        by_bin = Calibrator[int]().pool(errors.power, bins.tolist())
        every = including_zero(ends(errors.power))
        self.power_ends = [by_bin.of((b,), every) for b in range(len(self.edges) + 1)]
        low, high = including_zero(ends(errors.time))
        if unseen is None:
            # On another chip, the operators' model has twice the error in times as on known chips
            # (docs/operators.md); the error of power is taken as twice as large as well.
            self.time_ends = ((low, high), (2.0 * low, 2.0 * high))
            self.unseen_ends = (2.0 * every[0], 2.0 * every[1])
            return
        self.time_ends = ((low, high), weighted_ends(unseen.time, group_weight(unseen.device)))
        self.unseen_ends = weighted_ends(unseen.power, group_weight(unseen.device))

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {
            "law": asdict(self.law),
            "classes": self.classes,
            "devices": self.devices,
            "trees": [trees.text() for trees in self.trees],
            "time_ends": self.time_ends,
            "power_ends": self.power_ends,
            "unseen_ends": self.unseen_ends,
            "edges_s": self.edges.tolist(),
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> PowerModel:
        """Read :meth:`to_dict`'s data."""
        time, power = map(SavedTrees.from_text, data["trees"])
        return cls(
            typed(PowerLaw, data["law"], "law"),
            [str(c) for c in data["classes"]],
            [str(d) for d in data["devices"]],
            (time, power),
            typed(tuple[Ends, Ends], data["time_ends"], "time_ends"),
            list(typed(tuple[Ends, ...], data["power_ends"], "power_ends")),
            typed(tuple[float, float], data["unseen_ends"], "unseen_ends"),
            np.array(data["edges_s"], float),
            dict(data["provenance"]),
        )


def left_errors(
    model: PowerModel, rows: PowerRows, seconds: np.ndarray, share: np.ndarray, at: np.ndarray
) -> PowerErrors:
    """Errors of a model on held-out rows."""
    own = rows.take(at)
    said, power, _ = model._raw(own)
    time, watts = np.log(seconds[at] / said), np.log(share[at] / power)
    return PowerErrors(at, own.device, own.name, said, time, watts)


def fit_power(
    rows: PowerRows,
    seconds: np.ndarray,
    share: np.ndarray,
    readings: np.ndarray,
    learn: np.ndarray,
    seed: int = 0,
) -> tuple[PowerModel, PowerErrors, PowerErrors | None]:
    """Learn power, and times of the software that it was measured with.

    Args:
        rows: The operators.
        seconds: Measured times.
        share: Measured power over the board's limit.
        readings: Number of sensor readings of each row.
        learn: Mask of the training rows; the others (at least 100) calibrate intervals.
        seed: Seed of the trees' draws.

    Returns:
        The model, its errors on held-out rows, and the errors on each device of models trained
        without it, if there are several devices.
    """
    read = readings >= LEAST
    steady = rows.known & (readings >= SUSTAINED)

    def fit(chosen: np.ndarray) -> PowerModel:
        return _learned(rows, seconds, share, read, steady, learn & chosen, seed)

    model = fit(np.ones(len(share), bool))
    without = {}
    if len(model.devices) > 1:
        without = {name: fit(rows.device != name) for name in model.devices}
    parts = [
        left_errors(lacking, rows, seconds, share, np.flatnonzero(read & (rows.device == name)))
        for name, lacking in without.items()
    ]
    unseen = PowerErrors(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
    spread = _law_ends(model, without, rows, seconds, share, steady, learn)
    model.law = replace(model.law, ends=spread)
    errors = left_errors(model, rows, seconds, share, np.flatnonzero(~learn & read))
    model.calibrate(errors, unseen)
    return model, errors, unseen


def _law_ends(
    model: PowerModel,
    without: Mapping[str, PowerModel],
    rows: PowerRows,
    seconds: np.ndarray,
    share: np.ndarray,
    steady: np.ndarray,
    learn: np.ndarray,
) -> Ends:
    """Interval bounds of the law: families and devices held out in turn."""
    family = rows.family()
    errors, group = [], []
    for name in np.unique(family[steady & learn]):
        law = _law(rows, seconds, share, steady & learn & (family != name), model.law.silicon)
        own = rows.take(at := np.flatnonzero(steady & (family == name)))
        errors.append(np.log(share[at] / own.share(law, seconds[at])[0]))
        group += [name] * len(at)
    for name, lacking in without.items():
        own = rows.take(at := np.flatnonzero(steady & (rows.device == name)))
        errors.append(np.log(share[at] / own.share(lacking.law, seconds[at])[0]))
        group += [f"{name} {f}" for f in family[at]]
    return weighted_ends(np.concatenate(errors), group_weight(np.array(group, object)))


def _law(
    rows: PowerRows,
    seconds: np.ndarray,
    share: np.ndarray,
    at: np.ndarray,
    silicon: dict[str, Silicon],
) -> PowerLaw:
    """The law of some rows, with equal weights for the families of a device."""
    group = [f"{d} {f}" for d, f in zip(rows.device, rows.family(), strict=True)]
    _, place = np.unique(group, return_inverse=True)
    weight = 1.0 / np.sqrt(np.maximum(np.bincount(place[at], minlength=place.max() + 1), 1))[place]
    weight /= weight[at].mean()
    parts = [(board, own & at) for board, own in rows.boards() if (own & at).any()]
    return fit_law(parts, rows.work(seconds), share, weight, silicon)


def _silicon(rows: PowerRows, share: np.ndarray, at: np.ndarray) -> dict[str, Silicon]:
    """Idle power by line, in fractions of the limit of the first of its boards."""
    found: dict[str, list[tuple[str, float]]] = {}
    for board, own in rows.boards():
        if (own & at).any():
            chips = found.setdefault(board.line, [])
            base = find_device(chips[0][0]) if chips else board
            # A quantile, since the minimum may be of a sleeping board.
            idle = float(np.quantile(share[own & at], 0.001)) * board.power_w / base.power_w
            chips.append((board.name, idle * base.core_count / board.core_count))
    return {
        name: Silicon(chips[0][0], float(np.mean([idle for _, idle in chips])))
        for name, chips in found.items()
    }


def _learned(
    rows: PowerRows,
    seconds: np.ndarray,
    share: np.ndarray,
    read: np.ndarray,
    steady: np.ndarray,
    learn: np.ndarray,
    seed: int,
) -> PowerModel:
    """A law and trees, without calibrated intervals."""
    law = _law(rows, seconds, share, steady & learn, _silicon(rows, share, learn))
    classes = sorted({str(name) for name in rows.name[learn]})
    devices = sorted({str(name) for name in rows.device[learn]})

    def features(times: np.ndarray) -> np.ndarray:
        return rows.features(times, classes, devices, rows.device)

    columns = features(rows.seconds)
    log_time = np.log(seconds / rows.seconds)
    time = grow(columns, log_time, learn, _TREES[0], _DEPTH, _LEAF, seed)
    said = rows.seconds * np.exp(applied(time, columns))
    log_power = np.log(share / rows.share(law, said)[0])
    power = grow(features(said), log_power, learn & read, _TREES[1], _DEPTH, _LEAF, seed)
    trees = (SavedTrees(compact(time)), SavedTrees(compact(power)))
    return PowerModel(
        law, classes, devices, trees,
        ((-0.5, 0.5), (-1.0, 1.0)), [(-0.5, 0.5)], (-0.5, 0.5), np.array([]),
    )  # fmt: skip
