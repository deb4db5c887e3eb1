"""The model of board power: times and watts of library operators, with intervals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from ...common.types import JsonMapping, typed
from ..core.store import JsonModel
from ..estimators.xgboost_trees import SavedTrees, applied, compact, grow
from ..trust.calibrator import Calibrator, Ends, ends, including_zero, size_bins
from .law import PowerLaw, fit_law, left_out_errors
from .rows import PowerRows

#: Trees of the time and of the power, their depth, and least rows of a leaf. Small: the file ships.
_TREES, _DEPTH, _LEAF = (300, 180), 6, 5
#: Readings of the board's sensor from which a row shows the sustained power. The sensor averages
#: over a second or so: shorter runs read what ran before them (rows of one shape differ by 20 % in
#: the mean below ten readings, by 4 % from ten on).
SUSTAINED = 10
#: Readings from which a row is learned from at all (the kernel pack's README, trap 3).
LEAST = 4
#: Bins of the time in which errors of power are kept apart: short kernels' readings are noisier.
_BINS = 5


class PowerAnswer(NamedTuple):
    """Times in seconds and board power in watts with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        seconds: Times.
        seconds_lo: Lower ends.
        seconds_hi: Upper ends.
        watts: Mean board power; nan where the device's limit is unknown.
        watts_lo: Lower ends.
        watts_hi: Upper ends.
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
    """What measured kernels teach about power.

    Attributes:
        law: The law; for programs and steps, all there is.
        classes: Classes of kernels of the measured rows.
        devices: Devices that they ran on.
        trees: Logarithm of measured over predicted time, and of measured over
            the law's power.
        time_ends: Ends of the interval of times as logarithms: known, and unseen.
        power_ends: Of power, by bin of time.
        unseen_ends: Of power for unseen devices and classes.
        edges: Edges of the bins, in seconds.
        provenance: What it was learned from.
    """

    form, what = 1, "power"

    law: PowerLaw
    classes: list[str]
    devices: list[str]
    trees: tuple[SavedTrees, SavedTrees]
    time_ends: tuple[Ends, Ends]
    power_ends: list[Ends]
    unseen_ends: Ends
    edges: np.ndarray
    provenance: dict[str, object] = field(default_factory=dict)

    def predict(self, rows: PowerRows, device: np.ndarray) -> PowerAnswer:
        """Predict operators.

        Args:
            rows: The operators.
            device: Name of each row's device, object, shape ``(n,)``.
        """
        seconds, share = self._raw(rows)
        known = np.isin(rows.name.astype(str), self.classes)
        known &= np.isin(device.astype(str), self.devices)
        own = np.array(self.power_ends)[np.searchsorted(self.edges, seconds, side="right")]
        power = np.where(known[:, None], own, np.array(self.unseen_ends))
        time = np.where(known[:, None], np.array(self.time_ends[0]), np.array(self.time_ends[1]))
        watts = share * rows.limit
        return PowerAnswer(
            seconds,
            seconds * np.exp(time[:, 0]),
            seconds * np.exp(time[:, 1]),
            watts,
            # A board holds its limit but for a reading's ripple, and never draws less than idle.
            np.maximum(watts * np.exp(power[:, 0]), 0.9 * self.law.idle * rows.limit),
            np.minimum(watts * np.exp(power[:, 1]), 1.02 * rows.limit),
            np.where(known, "known", "unseen").astype(object),
        )

    def _raw(self, rows: PowerRows) -> tuple[np.ndarray, np.ndarray]:
        time, power = self.trees
        seconds = rows.seconds * np.exp(time.predict(rows.features(rows.seconds, self.classes)))
        law = _of_law(self.law, rows, seconds)
        share = law * np.exp(power.predict(rows.features(seconds, self.classes)))
        return seconds, np.clip(share, 0.9 * self.law.idle, 1.0)

    def calibrate(
        self, rows: PowerRows, seconds: np.ndarray, share: np.ndarray, judge: np.ndarray
    ) -> None:
        """Take the ends of intervals from rows that were not learned from, where ``judge``."""
        said, power = self._raw(rows)
        time_left = np.log(seconds / said)[judge]
        left = np.log(share / power)[judge]
        self.edges, bins = size_bins(said[judge], _BINS)
        by_bin = Calibrator[int]().pool(left, bins.tolist())
        every = including_zero(ends(left))
        self.power_ends = [by_bin.of((b,), every) for b in range(len(self.edges) + 1)]
        low, high = including_zero(ends(time_left))
        # Another chip's times are off by what the operators' model errs there, twice as much as on
        # chips that it knows (docs/operators.md); its power by what the law errs on classes of
        # kernels that it lacks.
        self.time_ends = ((low, high), (2.0 * low, 2.0 * high))
        widest = np.array(self.power_ends)
        self.unseen_ends = (
            min(self.law.ends[0], float(widest[:, 0].min())),
            max(self.law.ends[1], float(np.median(widest[:, 1]))),
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
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


def _of_law(law: PowerLaw, rows: PowerRows, seconds: np.ndarray) -> np.ndarray:
    """Shares by the law; where no family counts work, half of the limit, which trees correct."""
    return np.where(rows.known, law.share(rows.work(seconds)), 0.5)


def fit_power(
    rows: PowerRows,
    seconds: np.ndarray,
    share: np.ndarray,
    readings: np.ndarray,
    device: np.ndarray,
    learn: np.ndarray,
    seed: int = 0,
) -> PowerModel:
    """Learn power, and the times of the software that it was measured with.

    Args:
        rows: The operators.
        seconds: Measured times.
        share: Measured power over the board's limit.
        readings: Readings of the board's sensor within each row.
        device: Name of each row's device.
        learn: Rows to learn from; the others (at least 100) give the ends of intervals.
        seed: Of the trees' draws.
    """
    fam = np.array([str(name).split("|")[0] for name in rows.name])
    steady = learn & rows.known & (readings >= SUSTAINED)
    # Not the least reading: a row may catch its board asleep.
    idle = float(np.quantile(share[learn], 0.001))
    weight = np.ones(len(share))
    for name in np.unique(fam[steady]):
        weight[fam == name] = 1.0 / np.sqrt((fam[steady] == name).sum())
    weight /= weight[steady].mean()

    def fit(chosen: np.ndarray) -> PowerLaw:
        return fit_law(rows.work(seconds), share, weight, idle, steady & chosen)

    law = fit(np.ones(len(share), bool))
    lacking = left_out_errors(fit, rows.work(seconds), share, fam)[steady]
    low, high = including_zero(_balanced(lacking, fam[steady]))
    law = PowerLaw(law.idle, law.active, law.matrix, law.memory, (low, high))
    classes = sorted({str(name) for name in rows.name[learn]})
    log_time = np.log(seconds / rows.seconds)
    time = grow(
        rows.features(rows.seconds, classes), log_time, learn, _TREES[0], _DEPTH, _LEAF, seed
    )
    said = rows.seconds * np.exp(applied(time, rows.features(rows.seconds, classes)))
    log_power = np.log(share / _of_law(law, rows, said))
    read = learn & (readings >= LEAST)
    power = grow(rows.features(said, classes), log_power, read, _TREES[1], _DEPTH, _LEAF, seed)
    trees = (SavedTrees(compact(time)), SavedTrees(compact(power)))
    model = PowerModel(
        law, classes, sorted(set(map(str, device[learn]))), trees,
        ((-0.5, 0.5), (-1.0, 1.0)), [(-0.5, 0.5)], (-0.5, 0.5), np.array([]),
    )  # fmt: skip
    model.calibrate(rows, seconds, share, ~learn & (readings >= LEAST))
    return model


def _balanced(errors: np.ndarray, group: np.ndarray) -> Ends:
    """5 and 95 % quantiles of errors over groups that count alike."""
    lows, highs = zip(
        *(np.quantile(errors[group == g], (0.05, 0.95)) for g in np.unique(group)), strict=True
    )
    return float(np.mean(lows)), float(np.mean(highs))
