"""How the model of unseen devices is made: as it carries furthest to chips that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..tabular import TabularEstimator
from .intervals import twins
from .kin import Kin
from .material import GeneralFit, balanced_weights, draw_rows
from .slopes import Slopes
from .trust import chips_by_library, trust

#: Rows from which the model for unseen devices learns, each of its leave-one-device-out copies,
#: and those that judge a copy.
GENERAL_ROWS, FOLD_ROWS, JUDGE_ROWS = 120_000, 40_000, 4000

#: Powers of the trust that are tried.
SHRINKING = (0.0, 1.0, 2.0, 3.0)


class Way(NamedTuple):
    """A way to make the model.

    Attributes:
        within: Whether it learns what is left of a ratio within each device.
        shrunk: Power of :func:`~opcast.models.ops.trust.trust` by which ratios are shrunk; 0 does
            not.
        alien: Whether it learns from other vendors' chips, too.
    """

    within: bool
    shrunk: float
    alien: bool


@dataclass(slots=True)
class Unseen:
    """The model of unseen devices.

    Attributes:
        general: Its regressor.
        slopes: Effects of the devices that it learned from.
        way: How it was made.
        seen: Number of chips from which it knows each library.
        folds: By group of left-out devices, rows of theirs and their log-ratios by a model of the
            same way that never saw them.
    """

    general: TabularEstimator
    slopes: Slopes
    way: Way
    seen: dict[str, int]
    folds: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]]


@dataclass(slots=True)
class UnseenFit:
    """Makes the model of unseen devices.

    Attributes:
        job: Rows and how regressors are fitted to them.
        kin: Chips and vendors of the devices.
        library: What runs each row, shape ``(n,)``.
        honest: Rows that tell something of other devices, bool, shape ``(n,)``.
        rng: Draws.
    """

    job: GeneralFit
    kin: Kin
    library: np.ndarray
    honest: np.ndarray
    rng: np.random.Generator

    def make(self, fitting: np.ndarray) -> Unseen:
        """Fit to rows.

        Args:
            fitting: Positions of the rows to learn from.
        """
        fitting = fitting[self.honest[fitting]]
        groups = twins(list(self.kin.chips), self.kin.chips)
        if len(groups) < 2:
            general, slopes = self.job.fit(self._drawn(fitting, GENERAL_ROWS), within=False)
            return Unseen(general, slopes, Way(False, 0.0, True), self._seen(fitting), {})
        folds = {group: self._left_out(fitting, group) for group in groups}
        way = self._best(folds)
        pool = self._pool(fitting, way.alien)
        general, slopes = self.job.fit(self._drawn(pool, GENERAL_ROWS), way.within)
        own = {group: (rows, ratios[way]) for group, (rows, ratios) in folds.items()}
        return Unseen(general, slopes, way, self._seen(pool), own)

    def _left_out(
        self, fitting: np.ndarray, group: Sequence[str]
    ) -> tuple[np.ndarray, dict[Way, np.ndarray]]:
        """Rows of a group of devices, and their log-ratios by models that never saw them."""
        own = np.flatnonzero(np.isin(self.job.device, group) & self.honest)
        own = self.rng.choice(own, min(len(own), JUDGE_ROWS), replace=False)
        mixed = not self.kin.native(self.job.device).all()
        found: dict[Way, np.ndarray] = {}
        for alien in (False, True) if mixed else (False,):
            pool = self._pool(fitting, alien)
            pool = pool[~np.isin(self.job.device[pool], group)]
            learn = self._drawn(pool, FOLD_ROWS)
            sure = trust(self.library[own], self._seen(pool))
            for within in (False, True):
                plain = self.job.left_out(learn, own, within=within)
                for power in SHRINKING:
                    found[Way(within, power, alien)] = sure**power * plain
        return own, found

    def _best(self, folds: dict[tuple[str, ...], tuple[np.ndarray, dict[Way, np.ndarray]]]) -> Way:
        """The way with the least mean error over the left-out chips of the common vendor."""
        judges = [g for g in folds if g[0] not in self.kin.foreign] or list(folds)
        ways = [Way(*p) for p in product((False, True), SHRINKING, (False, True))]
        ways = [way for way in ways if all(way in folds[g][1] for g in judges)]
        return min(ways, key=lambda way: np.mean([self._ape(folds[g], way) for g in judges]))

    def _ape(self, fold: tuple[np.ndarray, dict[Way, np.ndarray]], way: Way) -> float:
        rows, ratios = fold
        return mean_ape(self.job.target[rows] - ratios[way])

    def _pool(self, fitting: np.ndarray, alien: bool) -> np.ndarray:
        return fitting if alien else fitting[self.kin.native(self.job.device)[fitting]]

    def _drawn(self, pool: np.ndarray, count: int) -> np.ndarray:
        names = tuple(self.kin.chips)
        weights = balanced_weights(self.job.device[pool], names, self.kin.chips)
        return draw_rows(self.rng, pool, weights, min(count, self.job.settings.max_rows))

    def _seen(self, pool: np.ndarray) -> dict[str, int]:
        return chips_by_library(self.library[pool], self.kin.chip_names(self.job.device[pool]))


def mean_ape(errors: np.ndarray) -> float:
    """Mean absolute percentage error of errors ``log(measured / predicted)``, as a share."""
    return float(np.abs(np.exp(-errors) - 1).mean())
