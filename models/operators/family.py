"""Predicts one family of operators, by one regressor for known devices and one for unseen ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import ModelError
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures, op_features
from ...features.operators.columns import OpRows, distinct
from ...features.operators.features import ops_schema_hash
from ...features.operators.schema import BLOCKS
from ..adapt.gaussian_process import (
    ErrorPosterior,
    Scale,
    Sites,
    fit_params,
    start_params,
    time_shares,
)
from ..core.kernel_table import KernelTable
from ..core.registry import estimator_class
from ..estimators.tabular import TabularEstimator
from .device_effects import DeviceEffects
from .device_kinship import KnownDevices
from .family_tables import (
    FamilySettings,
    GeneralFit,
    general_table,
    known_table,
    latency_s,
    learn,
    new_regressor,
    sized,
    target_of,
)
from .intervals import FOREIGN, WIDENED, DeviceIntervals, twins
from .mixture import LIBRARY, NVIDIA_ONLY, Member, Menu, is_foreign, mixed
from .prediction import FamilyPrediction, arithmetic_s, joined
from .rows import (
    BLOCK_GROUP,
    codes,
    dispatch,
    group_draw,
    libraries,
    misleading,
    named_columns,
    unnamed,
)
from .shrinkage import shrinkage
from .unseen import Strategy, UnseenFit, mean_ape

if TYPE_CHECKING:
    import pandas as pd

#: Share of the groups, and of single rows, held out of the fit to calibrate intervals. Whole groups
#: show the error on shapes that were never seen, single rows that between measured sizes. Both are
#: kept small because every held-out row is lost to the regressor. Engineering estimates.
HELD_GROUPS, HELD_ROWS = 0.05, 0.03
#: With fewer groups than this only single rows are held out: one group would be a large share.
#: Engineering estimate.
MIN_GROUPS = 8
#: Least number of groups to hold out, but never more than a fifth of them: fewer would make the
#: intervals those of one or two layers. Engineering estimate.
LEAST_GROUPS = 5
#: Errors per left-out device that the covariance is fitted to: its likelihood costs O(n³), and a
#: few hundred determine its dozen parameters.
COVARIANCE_ROWS = 200
#: Scale of the "behaves like that known chip" directions of the error covariance, relative to the
#: factors on compute, memory and launch. Engineering estimate; not fitted.
LIKENESS = 2.0
#: How many times wider (in the logarithm) an interval is for a format or library that was seen on
#: no chip, on a chip that was not seen. Engineering estimate.
NOVEL = 2.0
#: Between device and library in the name of a correction that holds for one library alone.
OF_LIBRARY = "@"


class FamilyModel:
    """Learns and predicts one family.

    Args:
        family: One of the keys of ``features.operators.FAMILIES``.
        settings: Settings of its regressors.

    Attributes:
        devices: Names of the devices that it was fitted to, in order.
        seen: Number of chips on which the model of unseen devices saw each library.
        strategy: How the model of unseen devices was fitted.
        named: Text parameters that every training row of the family gives.
        menu: Libraries that its training rows ran on.
        corrections: Corrections by calibrated device, or by device, :data:`OF_LIBRARY` and library.
        intervals: Interval ends.
    """

    def __init__(self, family: str, settings: FamilySettings | None = None) -> None:
        self.family = family
        self.settings = settings or FamilySettings()
        self.devices: tuple[str, ...] = ()
        self.known_devices = KnownDevices()
        self.seen: dict[str, int] = {}
        self.strategy = Strategy(False, 0.0, True)
        self.named: tuple[str, ...] = ()
        self.menu = Menu()
        self.effects = DeviceEffects()
        self.known: TabularEstimator | None = None
        self.general: TabularEstimator | None = None
        self.general_effects = DeviceEffects()
        self.intervals = DeviceIntervals()
        self.scale: Scale | None = None
        self.params = np.zeros(0)
        self.corrections: dict[str, ErrorPosterior] = {}
        self.left_out: dict[str, dict[str, float]] = {}

    # Fitting

    def fit(self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> FamilyModel:
        """Learn from rows of the family.

        Args:
            rows: Columns as :func:`~opcast.models.operators.rows_of_dataset` gives them.
            devices: Descriptions by name.

        Raises:
            DatasetError: A row lacks a parameter, or has no positive latency.
            ModelError: The estimator does not learn from a feature table.
        """
        rows = rows.reset_index(drop=True)
        self.devices = tuple(sorted(set(rows["device"])))
        self.known_devices = KnownDevices.of({name: devices[name] for name in self.devices})
        # Blocks are told apart by more names than those of serving frameworks.
        self.named = () if self.family in BLOCKS else named_columns(rows)
        self.menu = Menu.of(rows) if self.named else Menu()
        features = self.features(rows, devices)
        ratio = target_of(rows, features)
        rng = np.random.default_rng(self.settings.seed)
        held = self._held(rows, rng)
        fitting = np.flatnonzero(~held)
        if len(fitting) > self.settings.max_rows:
            fitting = rng.choice(fitting, self.settings.max_rows, replace=False)
        device = rows["device"].to_numpy(object)
        library, share = codes(rows)[0], time_shares(features)
        self.effects.fit(share[fitting], ratio[fitting], device[fitting], library[fitting])
        # The trees learn what the linear part leaves, so that beyond their sizes they add a
        # constant to it.
        linear = self.effects.predict(share, device, library)
        self.known = new_regressor(self.settings, sized(self.settings.known, len(fitting)))
        learn(self.known, self._known_table(features, device), ratio - linear, fitting)
        self._calibrate(features, device, ratio - linear, np.flatnonzero(held))
        self._fit_general(rows, features, device, ratio, np.flatnonzero(~held), rng)
        return self

    def _held(self, rows: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
        """Rows held out of the fit, bool, shape ``(n,)``: whole groups, and some single rows."""
        place = group_draw(rows, self.family, self.settings.seed)
        groups = np.unique(place)
        least = min(LEAST_GROUPS, len(groups) // 5)
        count = max(least, round(HELD_GROUPS * len(groups))) if len(groups) >= MIN_GROUPS else 0
        first = groups[count - 1] if count else -1.0
        # What is asked of layers and head configurations of blocks is mostly new ones, and their
        # tables have few: rows of known ones would make the intervals too narrow.
        single = 0.0 if count and self.family in BLOCK_GROUP else HELD_ROWS
        return np.asarray((place <= first) | (rng.random(len(rows)) < single))

    def _calibrate(
        self, features: OpFeatures, device: np.ndarray, target: np.ndarray, held: np.ndarray
    ) -> None:
        assert self.known is not None
        if not len(held):
            return
        table = self._known_table(features.take(held), device[held])
        predicted = self.known.point(table)
        scores = np.log(table.base_s) + target[held] - np.log(predicted)
        if self.known.domain is not None:
            self.known.domain.calibrate(self.known.domain.score(table))
        for name in self.devices:
            own = device[held] == name
            # With fewer than ten scores a device stays without ends of its own and takes those of
            # an unseen one.
            if own.sum() >= 10:
                self.intervals.fit_device(name, scores[own], predicted[own])

    def recalibrate(self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> None:
        """Take the ends of known devices' intervals from rows that were not learned from.

        Args:
            rows: Rows of the family, with ``latency_us``; a device with fewer than 60 of them,
                three in each tail, keeps its ends.
            devices: Descriptions by name.
        """
        known = rows[rows["device"].isin(self.devices)].reset_index(drop=True)
        latency = self._plain(OpRows.of(known), self.features(known, devices), devices).latency
        scores = np.log(latency_s(known) / latency)
        for name, own in known.groupby("device").indices.items():
            if len(own) >= 60:
                self.intervals.fit_device(str(name), scores[own], latency[own])

    def _fit_general(
        self,
        rows: pd.DataFrame,
        features: OpFeatures,
        device: np.ndarray,
        target: np.ndarray,
        fitting: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        """Fit the model of unseen devices, its intervals and the covariance of its errors.

        The errors are those on each chip when it is left out.
        """
        self.scale = Scale.of(features)
        coarse, fine = codes(rows)
        sites = self.scale.sites(features, coarse, fine)
        self.params = start_params(sites.place.shape[1])
        job = GeneralFit(self.family, self.settings, features, target, device, coarse)
        # Rows that mislead about other devices stay in the fit of known ones, where they are true.
        made = UnseenFit(job, self.known_devices, libraries(rows), ~misleading(rows), rng).make(
            fitting
        )
        self.general, self.general_effects = made.general, made.effects
        self.strategy, self.seen = made.strategy, made.seen
        if not made.folds:
            return
        # The errors on left-out chips are what a new device's errors will look like: intervals and
        # covariance are fitted to them.
        tasks, scores = [], {}
        for group, (own, ratio) in made.folds.items():
            errors = target[own] - ratio
            # Twins count as one device.
            scores[group[0]] = errors
            some = own[:COVARIANCE_ROWS]
            task = sites.take(some)
            likes = self._likes(features.take(some), coarse[some])
            task.share = self._with_likes(task.share, likes, ratio[: len(some)], group)
            tasks.append((task, errors[: len(some)]))
            self.left_out["+".join(group)] = {
                "mape": mean_ape(errors),
                "median": float(np.median(np.abs(np.exp(-errors) - 1))),
                "rows": float(len(own)),
            }
        self.intervals.fit_unseen(scores, self.known_devices.foreign, self.family in WIDENED)
        self.params = fit_params(tasks)

    # Predicting

    def predict(
        self,
        rows: pd.DataFrame | OpRows,
        devices: Mapping[str, DeviceSpec],
        corrected: bool = True,
    ) -> FamilyPrediction:
        """Predict rows of the family, on devices that the model has seen or not.

        Rows that leave the library open are predicted as a mixture over those known for the format.

        Args:
            rows: Columns of the family's parameters and ``device``.
            devices: Descriptions by the values of ``device``.
            corrected: Whether to apply corrections of calibrated devices.

        Raises:
            ModelError: The model was not fitted.
        """
        self._require_fitted()
        rows = OpRows.of(rows)
        unsaid = self.menu.open(rows, self.named)
        if unsaid.any():
            return self._mixed(rows, unsaid, devices, corrected)
        features = self.features(rows, devices)
        prediction = self._plain(rows, features, devices)
        if corrected and self.corrections:
            self._correct(prediction, rows, features)
        prediction.hold_above(arithmetic_s(self.family, rows, features, devices))
        return prediction

    def _mixed(
        self,
        rows: OpRows,
        unsaid: np.ndarray,
        devices: Mapping[str, DeviceSpec],
        corrected: bool,
    ) -> FamilyPrediction:
        """Predictions of rows of which some (``unsaid``) leave the library open."""
        at = np.flatnonzero(unsaid)
        table, origin, weight = self._expanded(rows.take(at), devices)
        members = self.predict(table, devices, corrected)
        found = mixed(members, origin, weight, len(at))
        others = np.flatnonzero(~unsaid)
        if not len(others):
            return found
        return joined(
            len(rows), ((at, found), (others, self.predict(rows.take(others), devices, corrected)))
        )

    def _expanded(
        self, rows: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[OpRows, np.ndarray, np.ndarray]:
        """Rows of all members, the position of each one's origin, and its weight."""
        proxy, _ = self.known_devices.proxies(rows.texts("device"), devices)
        code, names = rows.codes("device")
        vendors = np.array([devices[name].vendor for name in names], object)[code]
        return self.menu.expanded(rows, proxy, vendors)

    def members(
        self, rows: pd.DataFrame | OpRows, devices: Mapping[str, DeviceSpec]
    ) -> list[Member]:
        """Libraries in the mixture of the first row, fastest first; none if it names its own."""
        return self.with_members(OpRows.of(rows).take(np.array([0])), devices)[1]

    def with_members(
        self, row: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[FamilyPrediction, list[Member]]:
        """Predict a single row, and give the libraries that :meth:`members` lists of it."""
        self._require_fitted()
        if not self.menu.open(row, self.named)[0]:
            return self.predict(row, devices), []
        table, origin, weight = self._expanded(row, devices)
        found = self.predict(table, devices)
        times = np.stack([found.latency, found.lo, found.hi], axis=1) * 1e6
        names = zip(*(table.texts(column) for column in LIBRARY), strict=True)
        members = [
            Member(str(backend), str(kernel), float(share), *map(float, own))
            for (backend, kernel), share, own in zip(names, weight, times, strict=True)
        ]
        members.sort(key=lambda member: member.latency_us)
        return mixed(found, origin, weight, 1), members

    def _require_fitted(self) -> None:
        if self.known is None or self.general is None or self.scale is None:
            raise ModelError(f"the model of {self.family} has not been fitted")

    def _plain(
        self, rows: OpRows, features: OpFeatures, devices: Mapping[str, DeviceSpec]
    ) -> FamilyPrediction:
        """Predictions without corrections."""
        assert self.known is not None and self.general is not None
        device = rows.texts("device")
        proxy, scope = self.known_devices.proxies(device, devices)
        own = _among(proxy, self.devices)
        latency = np.empty(len(rows))
        inside = np.zeros(len(rows), bool)
        for mask, model in ((own, self.known), (~own, self.general)):
            at = np.flatnonzero(mask)
            if len(at):
                some = features.take(at) if len(at) < len(rows) else features
                mine = rows.take(at) if len(at) < len(rows) else rows
                part = (
                    self._known_table(some, proxy[at])
                    if model is self.known
                    else general_table(self.family, some)
                )
                latency[at] = model.point(part)
                if model is self.known:
                    library, share = dispatch(mine), time_shares(some)
                    latency[at] *= np.exp(self.effects.predict(share, proxy[at], library))
                else:
                    ratio = self._general_ratio(mine, some, latency[at])
                    latency[at] = some.base_s * np.exp(ratio)
                inside[at] = model.domain.contains(part) if model.domain is not None else True
        lo, hi = np.empty(len(rows)), np.empty(len(rows))
        code, names = distinct(device)
        for place in range(len(names)):
            at = np.flatnonzero(code == place)
            lo[at], hi[at] = self._ends(str(proxy[at[0]]), str(scope[at[0]]), latency[at])
        # A format or library that no chip was seen with, on a chip that was not seen, either: what
        # was measured is the error of the chip alone.
        novel = scope == "unseen"
        if novel.any():
            novel &= ~_among(libraries(rows), self.seen)
            # Where a vendor's known chip stands in, what counts is what ran on that one.
            novel &= ~(own & self.effects.knows(proxy, dispatch(rows)))
            lo[novel] *= (lo[novel] / latency[novel]) ** (NOVEL - 1)
            hi[novel] *= (hi[novel] / latency[novel]) ** (NOVEL - 1)
        wide_lo, wide_hi = self.intervals.of("", latency)
        # Outside the domain of a known device: ends halfway (geometric mean) to those of a device
        # that was never seen, since the error on such rows was not measured.
        far = ~inside & own
        if far.any():
            lo[far] = np.minimum(lo, np.sqrt(lo * wide_lo))[far]
            hi[far] = np.maximum(hi, np.sqrt(hi * wide_hi))[far]
        nameless = unnamed(rows, self.named) | self._elsewhere(rows, devices)
        nameless |= _foreign(rows, devices)
        # Which library runs an operator matters as much as the device does (docs/operators.md).
        if nameless.any():
            lo[nameless] = np.minimum(lo, wide_lo)[nameless]
            hi[nameless] = np.maximum(hi, wide_hi)[nameless]
            inside &= ~nameless
        return FamilyPrediction(latency, lo, hi, features.roofline_s, features.bound, scope, inside)

    def why_outside(
        self, rows: pd.DataFrame | OpRows, devices: Mapping[str, DeviceSpec]
    ) -> list[str]:
        """Reasons why the first of some rows is outside the training domain, one text each."""
        self._require_fitted()
        assert self.known is not None and self.general is not None
        row = OpRows.of(rows).take(np.array([0]))
        if self.menu.open(row, self.named)[0]:
            # Of a mixture, the first member that is outside.
            members, _, _ = self._expanded(row, devices)
            first = int(np.argmin(self.predict(members, devices).in_domain))
            row = members.take(np.array([first]))
        features = self.features(row, devices)
        proxy, _ = self.known_devices.proxies(row.texts("device"), devices)
        own = bool(np.isin(proxy, self.devices)[0])
        table = self._known_table(features, proxy) if own else general_table(self.family, features)
        domain = (self.known if own else self.general).domain
        reasons = []
        if self._elsewhere(row, devices).any():
            reasons.append("its operators are known of other kinds of device alone")
        if _foreign(row, devices).any():
            reasons.append(f"{row.texts('backend')[0]} runs on NVIDIA's GPUs alone")
        if bool(unnamed(row, self.named)[0]):
            reasons.append("what runs it (backend=…, kernel=…) is not named, or was not seen")
        if domain is not None and not bool(domain.contains(table)[0]):
            reasons += domain.reasons(table)
        return reasons

    def _general_ratio(self, rows: OpRows, features: OpFeatures, point_s: np.ndarray) -> np.ndarray:
        """Log-ratios of rows on a device that was never seen, shape ``(n,)``.

        Args:
            rows: ``n`` rows of the family.
            features: Their features.
            point_s: Seconds by the general regressor alone, shape ``(n,)``.
        """
        linear = self.general_effects.unseen(time_shares(features), dispatch(rows))
        ratio = np.log(point_s / features.base_s) + linear
        return np.asarray(self._shrinkage(libraries(rows)) * ratio)

    def _ends(self, device: str, scope: str, latency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Interval ends in seconds of rows for which a known device stands in.

        A sibling's ends lie halfway (geometric mean) between those of the known device and those of
        an unseen one, and never inside the former; the lower end moves by at most half of its own
        distance.
        """
        if scope == "unseen":
            return self.intervals.of(
                FOREIGN if device in self.known_devices.foreign else "", latency
            )
        lo, hi = self.intervals.of(device, latency)
        if scope != "sibling":
            return lo, hi
        wide_lo, wide_hi = self.intervals.of("", latency)
        # The ends of an unseen device are those of all sizes together: at some size the known
        # device's own may be wider.
        wide_lo = np.clip(wide_lo, lo**2 / latency, lo)
        return np.sqrt(lo * wide_lo), np.sqrt(hi * np.maximum(hi, wide_hi))

    def _correct(
        self,
        prediction: FamilyPrediction,
        rows: OpRows,
        features: OpFeatures,
    ) -> None:
        device, library = rows.texts("device"), rows.texts("backend")
        left = np.ones(len(rows), bool)
        # A correction of a library comes before that of its whole device.
        for name in sorted(self.corrections, key=lambda key: OF_LIBRARY not in key):
            where, _, alone = name.partition(OF_LIBRARY)
            mask = left & (device == where)
            at = np.flatnonzero(mask & (library == alone) if alone else mask)
            if not len(at):
                continue
            left[at] = False
            # The posterior knows the uncertainty around the corrected value: its interval replaces
            # the uncorrected one.
            mean, half = self.corrections[name].apply(self.sites(rows.take(at), features.take(at)))
            prediction.latency[at] *= np.exp(mean)
            prediction.lo[at] = prediction.latency[at] * np.exp(-half)
            prediction.hi[at] = prediction.latency[at] * np.exp(half)
            prediction.scope[at] = "calibrated"

    def sites(self, rows: pd.DataFrame | OpRows, features: OpFeatures) -> Sites:
        """Sites of rows for the covariance of errors."""
        rows = OpRows.of(rows)
        assert self.scale is not None and self.general is not None
        coarse, fine = codes(rows)
        sites = self.scale.sites(features, coarse, fine)
        table = general_table(self.family, features)
        ratio = self._general_ratio(rows, features, self.general.point(table))
        sites.share = self._with_likes(sites.share, self._likes(features, coarse), ratio, ())
        leaves = self.general.leaves(table)
        sites.leaves = leaves if leaves.shape[1] else None
        return sites

    def _likes(self, features: OpFeatures, library: np.ndarray) -> np.ndarray:
        """Log-ratios as if the device were each of the known chips, shape ``(n, chips)``."""
        assert self.known is not None
        share = time_shares(features)
        ratios = []
        for group in twins(self.devices, self.known_devices.chips):
            # Twins behave alike, so one device stands for its chip.
            device = np.full(len(library), group[0], object)
            table = self._known_table(features, device)
            ratio = np.log(self.known.point(table)) - np.log(table.base_s)
            ratios.append(ratio + self.effects.predict(share, device, library))
        return np.stack(ratios, axis=1)

    def _with_likes(
        self, share: np.ndarray, likes: np.ndarray, general: np.ndarray, own: tuple[str, ...]
    ) -> np.ndarray:
        """Append to the shares how far each known chip lies from the model of unseen devices.

        In a covariance linear in these columns, a few samples can tell that a new device behaves
        like one of the known chips.

        Args:
            share: Shares of time, shape ``(n, 3)``.
            likes: From :meth:`_likes`.
            general: Log-ratios of the model of unseen devices, shape ``(n,)``.
            own: Devices of the chip that is left out, which must not stand for itself.
        """
        apart = LIKENESS * (likes - general[:, None])
        for place, group in enumerate(twins(self.devices, self.known_devices.chips)):
            if group == own:
                apart[:, place] = 0.0
        # Clipped at a factor e either way before scaling (2 after), so that one odd chip does not
        # outweigh the shares.
        return np.concatenate([share, np.clip(apart, -2, 2)], axis=1)

    def calibrate(
        self,
        device: str,
        rows: pd.DataFrame,
        devices: Mapping[str, DeviceSpec],
        library: str = "",
    ) -> ErrorPosterior:
        """Adapt to a device from rows measured there; replaces an earlier correction.

        Args:
            device: Its name.
            rows: Rows of the family on it, with ``latency_us``.
            devices: Descriptions by name.
            library: Library (``backend``) that all rows ran on, if only its rows are to be
                corrected, since others did not change with it.

        Raises:
            DatasetError: A row lacks a parameter, or has no positive latency.
        """
        sites, errors, _ = self.site_errors(rows, devices)
        correction = ErrorPosterior.fit(self.params, sites, errors)
        self.corrections[f"{device}{OF_LIBRARY}{library}" if library else device] = correction
        return correction

    def site_errors(
        self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]
    ) -> tuple[Sites, np.ndarray, np.ndarray]:
        """Sites of measured rows, and the errors of the uncorrected model on them.

        Args:
            rows: Rows of the family, with ``latency_us``.
            devices: Descriptions by name.

        Returns:
            Sites, ``log(measured / predicted)`` of shape ``(n,)`` and predictions in seconds.

        Raises:
            DatasetError: A row lacks a parameter, or has no positive latency.
            ModelError: The model was not fitted.
        """
        self._require_fitted()
        rows = rows.reset_index(drop=True)
        features = self.features(rows, devices)
        latency = self._plain(OpRows.of(rows), features, devices).latency
        errors = np.log(latency_s(rows)) - np.log(latency)
        return self.sites(rows, features), errors, latency

    def regressor_of(
        self, rows: pd.DataFrame, features: OpFeatures, devices: Mapping[str, DeviceSpec]
    ) -> tuple[TabularEstimator, KernelTable]:
        """The regressor that predicts rows, all of one device, and its table of them."""
        assert self.known is not None and self.general is not None
        proxy, _ = self.known_devices.proxies(rows["device"].to_numpy(object), devices)
        if proxy[0] in self.devices:
            return self.known, self._known_table(features, proxy)
        return self.general, general_table(self.family, features)

    def linear_parts(
        self, rows: pd.DataFrame, features: OpFeatures, devices: Mapping[str, DeviceSpec]
    ) -> dict[str, float]:
        """Contributions of the device effects to the log-ratio of one row, by level."""
        proxy, _ = self.known_devices.proxies(rows["device"].to_numpy(object), devices)
        library, share = dispatch(rows), time_shares(features)
        if proxy[0] in self.devices:
            return self.effects.parts(share, str(proxy[0]), str(library[0]))
        return {"mean of known devices": float(self.general_effects.unseen(share, library)[0])}

    def carried(self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
        """Share of the learned log-ratio that is kept, 1 on known devices, shape ``(n,)``."""
        proxy, _ = self.known_devices.proxies(rows["device"].to_numpy(object), devices)
        return np.where(np.isin(proxy, self.devices), 1.0, self._shrinkage(libraries(rows)))

    def _shrinkage(self, library: np.ndarray) -> np.ndarray:
        # Power 0 gives 1: ratios stay as they are.
        return shrinkage(library, self.seen) ** self.strategy.shrunk

    def distance(
        self, features: OpFeatures, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]
    ) -> np.ndarray:
        """Distance of rows from one operator, over its key features.

        Args:
            features: Features of the operator.
            rows: ``n`` rows of the family.
            devices: Descriptions by name.

        Returns:
            Root mean square differences in standard deviations of training, shape ``(n,)``.
        """
        assert self.scale is not None
        own = features.X[:, features.keys].astype(np.float64)
        others = self.features(rows, devices).X[:, features.keys].astype(np.float64)
        gap = (others - own) / self.scale.spread
        return np.asarray(np.sqrt((gap**2).mean(axis=1)))

    def _elsewhere(self, rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
        """Rows on TPUs and other devices of a kind that was not learned from, bool, ``(n,)``."""
        if not self.known_devices.platforms <= {"gpu"}:
            return np.zeros(len(rows), bool)
        return rows.where("device", lambda name: devices[name].platform != "gpu")

    # Tables

    def features(
        self, rows: pd.DataFrame | OpRows, devices: Mapping[str, DeviceSpec]
    ) -> OpFeatures:
        """Features of rows, with the kernels' texts if the estimator looks at their graphs."""
        texts = getattr(estimator_class(self.settings.estimator), "needs_graphs", False)
        return op_features(rows, self.family, devices, texts=texts)

    def _known_table(self, features: OpFeatures, device: np.ndarray) -> KernelTable:
        return known_table(self.family, features, device, self.devices)

    # Saving

    def save(self, path: Path) -> dict[str, object]:
        """Write both regressors below ``path``; returns what the manifest has to hold."""
        assert self.known is not None and self.general is not None and self.scale is not None
        self.known.save(path / "known")
        self.general.save(path / "general")
        return {
            "devices": list(self.devices),
            "chips": {name: list(chip) for name, chip in self.known_devices.chips.items()},
            "vendors": self.known_devices.vendors,
            "platforms": sorted(self.known_devices.platforms),
            "seen_chips": self.seen,
            # Names of entries are those of the released format; "way" is the strategy, "slopes" are
            # the effects.
            "way": self.strategy._asdict(),
            "named": list(self.named),
            "menu": self.menu.to_list(),
            "intervals": self.intervals.to_dict(),
            "scale": {"centre": self.scale.centre.tolist(), "spread": self.scale.spread.tolist()},
            "slopes": self.effects.to_dict(),
            "general_slopes": self.general_effects.to_dict(),
            "covariance_log": self.params.tolist(),
            "left_out": self.left_out,
            "estimator": self.settings.estimator,
        }

    @classmethod
    def load(cls, family: str, path: Path, manifest: Mapping[str, Any]) -> FamilyModel:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: A regressor is damaged, or of other features.
            KeyError: The manifest lacks an entry.
        """
        model = cls(family, FamilySettings(estimator=manifest["estimator"]))
        kind = estimator_class(manifest["estimator"])
        if not issubclass(kind, TabularEstimator):
            raise ModelError(f"estimator {manifest['estimator']!r} has no feature table")
        schema = ops_schema_hash(family)
        model.known = kind.load(path / "known", schema)
        model.general = kind.load(path / "general", schema)
        model.devices = tuple(manifest["devices"])
        chips = {name: tuple(chip) for name, chip in manifest["chips"].items()}
        platforms = frozenset(manifest.get("platforms", ("gpu",)))
        model.known_devices = KnownDevices(chips, dict(manifest["vendors"]), platforms)
        model.seen = {name: int(count) for name, count in manifest["seen_chips"].items()}
        # Entries that the first released models lack have a default.
        model.named = tuple(manifest.get("named", ()))
        model.menu = Menu.from_list(manifest.get("menu", ()))
        strategy = manifest["way"]
        model.strategy = Strategy(strategy["within"], float(strategy["shrunk"]), strategy["alien"])
        model.intervals = DeviceIntervals.from_dict(manifest["intervals"])
        scale = manifest["scale"]
        model.scale = Scale(np.array(scale["centre"]), np.array(scale["spread"]))
        model.effects = DeviceEffects.from_dict(manifest["slopes"])
        model.general_effects = DeviceEffects.from_dict(manifest.get("general_slopes", {}))
        model.params = np.array(manifest["covariance_log"])
        model.left_out = dict(manifest["left_out"])
        return model


def _foreign(rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
    """Whether rows name a framework that their device's vendor has none of, shape ``(n,)``."""
    alone = rows.where("backend", lambda name: name in NVIDIA_ONLY)
    return np.asarray(alone & rows.where("device", lambda name: is_foreign(devices[name].vendor)))


def _among(values: np.ndarray, names: Collection[str]) -> np.ndarray:
    """Whether each value is one of some names, bool, shape ``(n,)``."""
    code, found = distinct(values)
    return np.asarray(np.array([value in names for value in found], bool)[code])
