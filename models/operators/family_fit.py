"""Fits the models of a family, and judges them on rows that were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.schema import faulty
from .device_errors import DeviceErrors
from .devices import KnownDevices
from .family_tables import (
    FamilySettings,
    GeneralFit,
    balanced_weights,
    constants,
    draw_rows,
    target_of,
)
from .fitted import Fitted
from .prediction import FOREIGN, UNSEEN, DeviceIntervals
from .regressors import Folds, KnownModel, UnseenFit, error_figures
from .rows import codes, drawn, group_names, held_out, libraries

if TYPE_CHECKING:
    import pandas as pd

#: Least number of rows of groups that were held out in turn. Engineering estimate.
LEAST_TESTED = 10_000
#: Between a device and a group of its training rows.
GROUP = "|"
#: Fewest rows of a group on a device from which on it is known there, and their least share of
#: those that the device's groups have in the median. Held-out rows of layers of ``tuned/linear``
#: with 10 to 20 others lie within -12 to 14 %, as do those of layers with 40 to 100; of layers with
#: fewer within -50 to 40 %. Where other groups have hundreds, ten are those of one batch.
GROUP_ROWS, GROUP_SHARE = 10, 0.25

_Tests = Iterable[tuple[KnownModel, np.ndarray]]


class Learned(NamedTuple):
    """What a family learned.

    Attributes:
        models: Its models.
        intervals: Interval ends.
        groups: Known groups by device, as of :class:`.family.FamilyModel`.
        left_out: Errors on each chip, left out; by names of devices joined by ``+``.
    """

    models: Fitted
    intervals: DeviceIntervals
    groups: frozenset[str]
    left_out: dict[str, dict[str, float]]


@dataclass
class FamilyFit:
    """A fit to the rows of a family.

    Attributes:
        family: Its key.
        settings: Settings of its regressors.
        rows: ``n`` rows with their latencies.
        features: Of the rows.
    """

    family: str
    settings: FamilySettings
    rows: pd.DataFrame
    features: OpFeatures
    intervals: DeviceIntervals = field(default_factory=DeviceIntervals, init=False)

    def __post_init__(self) -> None:
        self.ratio = target_of(self.rows, self.features)
        self.device, self.code = self.rows["device"].to_numpy(object), codes(self.rows)
        self.names = tuple(sorted(set(self.device)))
        self.rng = np.random.default_rng(self.settings.seed)

    def run(self, known_devices: KnownDevices, vendors: frozenset[str]) -> Learned:
        """Fit, and take the interval ends from rows that were left out.

        Args:
            known_devices: Chips and vendors of the rows' devices.
            vendors: Vendors on whose unseen devices the ratios hold; none if on all.
        """
        held, parts = held_out(self.rows, self.family, self.settings.seed, self.rng)
        known = self._known(np.flatnonzero(~held), self.settings.max_rows)
        groups = self._judge_known(known, held, parts)
        job = GeneralFit(
            self.family, self.settings, self.features, self.ratio, self.device, self.code[0]
        )
        # Rows that mislead about other devices stay in the fit of known ones, where they are true.
        usable = ~faulty(self.rows, "local")
        fit = UnseenFit(job, known_devices, libraries(self.rows), usable, self.rng)
        unseen, folds = fit.make(np.flatnonzero(~held))
        unseen.vendors = vendors
        left_out = self._judge_unseen(known_devices.foreign, folds)
        errors = DeviceErrors.fit(
            known, unseen, known_devices.chips, self.features, self.code, self.ratio, folds
        )
        return Learned(Fitted(known, unseen, errors), self.intervals, groups, left_out)

    def _known(self, fitting: np.ndarray, most: int) -> KnownModel:
        """The model of known devices, of at most so many rows of those at ``fitting``."""
        fitting = draw_rows(self.rng, fitting, balanced_weights(self.device[fitting]), most)
        args = self.features, self.device, self.code[0], self.ratio, fitting
        return KnownModel.fit(self.family, self.names, self.settings, *args)

    def _judge_known(
        self, known: KnownModel, held: np.ndarray, parts: list[np.ndarray]
    ) -> frozenset[str]:
        """Take interval ends of known devices from held-out rows; returns the known groups.

        Args:
            known: Fitted without the rows ``held``.
            held: Rows that were held out, bool, shape ``(n,)``.
            parts: Rows of groups that are held out in turn, likewise.
        """
        tested, left = [(known, np.flatnonzero(held))], []
        for part in parts:
            # As many rows of new groups as of known ones.
            own, most = np.flatnonzero(part), max(LEAST_TESTED, int(held.sum())) // len(parts)
            own = draw_rows(self.rng, own, balanced_weights(self.device[own]), most)
            single = ~part & drawn(len(self.rows), self.rng)
            fold = self._known(np.flatnonzero(~part & ~single), self.settings.fold_rows)
            left.append((fold, own))
            # A model of fewer rows errs more on known groups than the one that is kept.
            if len(self.rows) <= self.settings.fold_rows:
                tested.append((fold, np.flatnonzero(single)))
        own, scores, predicted, near = self._errors(tested)
        groups: frozenset[str] = frozenset()
        if parts:
            names = group_names(self.rows, self.family)
            groups = _known_groups(self.device, names)
            others, new_scores, _, new_near = self._errors(left)
            self.intervals.fit_groups(new_scores, names[others], self.device[others])
            near = np.concatenate([near, new_near])
        if len(own):
            if known.regressor.domain is not None:
                known.regressor.domain.calibrate(near)
            # With fewer than ten scores a device stays without ends of its own and takes those of
            # an unseen one.
            dtype = OpRows.of(self.rows).texts("dtype")[own]
            self.intervals.fit_devices(self.device[own], dtype, scores, predicted, 10)
        return groups

    def _errors(self, tests: _Tests) -> list[np.ndarray]:
        """Positions of tested rows, and what :meth:`KnownModel.held_out` says of them."""
        found = [
            (
                own,
                *model.held_out(
                    self.features.take(own), self.device[own], self.code[0][own], self.ratio[own]
                ),
            )
            for model, own in tests
        ]
        return [np.concatenate(part) for part in zip(*found, strict=True)]

    def _judge_unseen(self, foreign: Sequence[str], folds: Folds) -> dict[str, dict[str, float]]:
        """Take the interval ends of unseen devices from the errors on left-out chips.

        Args:
            foreign: Devices of other vendors than most.
            folds: Log-ratios by models that never saw a chip.

        Returns:
            Each chip's own figures, which are those by the ends of the others.
        """
        if not folds:
            return {}
        # The errors on left-out chips are what a new device's errors will look like. Twins count as
        # one device.
        scores = {group[0]: self.ratio[own] - left for group, (own, left) in folds.items()}
        widened = self.family in constants()["widened"]
        figures = {}
        for group in folds:
            others = {name: own for name, own in scores.items() if name != group[0]}
            judged = DeviceIntervals()
            judged.fit_unseen(others, foreign, widened)
            kind = FOREIGN if group[0] in foreign else UNSEEN
            ends = judged.ends.ends[kind, 0]
            figures["+".join(group)] = error_figures(scores[group[0]], ends)
        self.intervals.fit_unseen(scores, foreign, widened)
        return figures


def _known_groups(device: np.ndarray, group: np.ndarray) -> frozenset[str]:
    """Groups of which a device has enough rows, each after the device and :data:`GROUP`."""
    pairs, counts = np.unique((device + GROUP + group).astype(str), return_counts=True)
    # A few rows of a group say nothing of its others.
    own = np.char.partition(pairs, GROUP)[:, 0]
    usual = {name: np.median(counts[own == name]) for name in set(own.tolist())}
    least = np.array([max(GROUP_ROWS, GROUP_SHARE * usual[name]) for name in own.tolist()])
    return frozenset(pairs[counts >= least].tolist())
