"""Covariance of a family's errors on a new device, and corrections learned from samples there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows
from ..adapt.covariance import Scale, Sites, start_params, time_shares
from ..adapt.gaussian_process import ErrorPosterior, fit_params
from .devices import Chip, twins
from .prediction import FamilyPrediction
from .regressors import Folds, KnownModel, UnseenModel
from .rows import codes

#: Errors per held-out device that the covariance is fitted to: its likelihood costs O(n³), and a
#: few hundred determine its dozen parameters.
COVARIANCE_ROWS = 200
#: Scale of the "behaves like that known chip" directions of the error covariance, relative to the
#: factors on compute, memory and launch. Engineering estimate; not fitted.
LIKENESS = 2.0
#: Separator between device and library in the name of a correction for a single library.
OF_LIBRARY = "@"


@dataclass(slots=True)
class DeviceErrors:
    """Errors of a family's models on an unseen device.

    Attributes:
        known: The model of known devices.
        unseen: The model of unseen ones.
        groups: Known devices by chip: twins behave alike.
        scale: Scale of the key features.
        params: Logarithms of the parameters of the covariance.
        corrections: Corrections by calibrated device, or by device, :data:`OF_LIBRARY` and library.
    """

    known: KnownModel
    unseen: UnseenModel
    groups: Sequence[tuple[str, ...]]
    scale: Scale
    params: np.ndarray
    corrections: dict[str, ErrorPosterior] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        known: KnownModel,
        unseen: UnseenModel,
        chips: Mapping[str, Chip],
        features: OpFeatures,
        code: tuple[np.ndarray, np.ndarray],
        target: np.ndarray,
        folds: Folds,
    ) -> DeviceErrors:
        """Fit the covariance to the errors on each chip when it is held out.

        Args:
            known: The model of known devices.
            unseen: The model of unseen ones.
            chips: Identity of the chip by known device.
            features: Features of ``n`` rows.
            code: Result of :func:`~opcast.models.operators.rows.codes` for the rows.
            target: Log-ratios of measured latency to the estimate, shape ``(n,)``.
            folds: Held-out devices, their rows and log-ratios; without any, the covariance keeps
                its defaults.
        """
        scale = Scale.of(features)
        sites = scale.sites(features, *code)
        start = start_params(sites.place.shape[1])
        made = cls(known, unseen, twins(known.devices, chips), scale, start)
        tasks = []
        for group, (own, ratio) in folds.items():
            some = own[:COVARIANCE_ROWS]
            task = sites.take(some)
            likes = made._likes(features.take(some), code[0][some])
            task.share = made._with_likes(task.share, likes, ratio[: len(some)], group)
            tasks.append((task, (target[own] - ratio)[: len(some)]))
        if tasks:
            made.params = fit_params(tasks)
        return made

    def correct(
        self,
        prediction: FamilyPrediction,
        rows: OpRows,
        features: OpFeatures,
        devices: Mapping[str, DeviceSpec],
    ) -> None:
        """Apply the corrections of calibrated devices to a prediction, in place."""
        device, library = rows.texts("device"), rows.texts("backend")
        left = np.ones(len(rows), bool)
        # A correction of a library takes precedence over one of its whole device.
        for name in sorted(self.corrections, key=lambda key: OF_LIBRARY not in key):
            where, _, alone = name.partition(OF_LIBRARY)
            mask = left & (device == where)
            at = np.flatnonzero(mask & (library == alone) if alone else mask)
            if not len(at):
                continue
            left[at] = False
            # The posterior interval replaces the prior one of an unseen device. Other prior
            # intervals, widened as far as the samples require, stay where they are narrower: the
            # posterior is scaled to its least certain sample if there are few.
            correction, plain = self.corrections[name], prediction.take(at)
            mean, half = correction.apply(self.sites(rows.take(at), features.take(at), devices))
            low, high = np.log(plain.lo / plain.latency), np.log(plain.hi / plain.latency)
            wide = np.where(plain.scope == "unseen", correction.widening(low, high), np.inf)
            latency = plain.latency * np.exp(mean)
            prediction.latency[at] = latency
            prediction.lo[at] = latency * np.exp(-np.minimum(half, -low * wide))
            prediction.hi[at] = latency * np.exp(np.minimum(half, high * wide))
            prediction.scope[at] = "calibrated"

    def learn(self, device: str, library: str, sites: Sites, errors: np.ndarray) -> ErrorPosterior:
        """Learn a correction; replaces an earlier one of the same name.

        Args:
            device: Name of the device.
            library: Library to correct; empty for all.
            sites: Sites of ``n`` measured rows, from :meth:`sites`.
            errors: ``log(measured / predicted)`` of the uncorrected model, shape ``(n,)``.
        """
        correction = ErrorPosterior.fit(self.params, sites, errors)
        self.corrections[f"{device}{OF_LIBRARY}{library}" if library else device] = correction
        return correction

    def sites(self, rows: OpRows, features: OpFeatures, devices: Mapping[str, DeviceSpec]) -> Sites:
        """Sites of rows for the covariance of errors."""
        coarse, fine = codes(rows)
        sites = self.scale.sites(features, coarse, fine)
        table = self.unseen.table(features)
        ratio = self.unseen.log_ratio(rows, features, table, devices)
        sites.share = self._with_likes(sites.share, self._likes(features, coarse), ratio, ())
        leaves = self.unseen.regressor.leaves(table)
        sites.leaves = leaves if leaves.shape[1] else None
        return sites

    def _likes(self, features: OpFeatures, library: np.ndarray) -> np.ndarray:
        """Log-ratios as if the device were each of the known chips, shape ``(n, chips)``."""
        share = time_shares(features)
        ratios = []
        for group in self.groups:
            # Twins behave alike, so one device stands for its chip.
            device = np.full(len(library), group[0], object)
            table = self.known.table(features, device)
            ratio = np.log(self.known.regressor.point(table)) - np.log(table.base_s)
            ratios.append(ratio + self.known.effects.predict(share, device, library))
        return np.stack(ratios, axis=1)

    def _with_likes(
        self, share: np.ndarray, likes: np.ndarray, unseen: np.ndarray, own: tuple[str, ...]
    ) -> np.ndarray:
        """Append the difference of each known chip from the model of unseen devices to the shares.

        In a covariance that is linear in these columns, a few samples can show that a new device
        behaves like one of the known chips.

        Args:
            share: Shares of time, shape ``(n, 3)``.
            likes: From :meth:`_likes`.
            unseen: Log-ratios of the model of unseen devices, shape ``(n,)``.
            own: Devices of the held-out chip, which must not stand for itself.
        """
        apart = LIKENESS * (likes - unseen[:, None])
        for place, group in enumerate(self.groups):
            if group == own:
                apart[:, place] = 0.0
        # Clipped to a factor e either way before scaling (2 after), so that one outlying chip does
        # not outweigh the shares.
        return np.concatenate([share, np.clip(apart, -2, 2)], axis=1)

    def distance(self, features: OpFeatures, others: OpFeatures) -> np.ndarray:
        """Distance of operators from a given one, over their key features.

        Args:
            features: Features of the given operator.
            others: Features of ``n`` operators.

        Returns:
            Root mean square differences in standard deviations of training, shape ``(n,)``.
        """
        own = features.X[:, features.keys].astype(np.float64)
        gap = (others.X[:, features.keys].astype(np.float64) - own) / self.scale.spread
        return np.asarray(np.sqrt((gap**2).mean(axis=1)))
