"""Predicts one family of operators, by one regressor for known devices and one for unseen ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import ModelError
from ...features.devices.catalogue import base_of, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures, op_features
from ...features.operators.columns import OpRows
from ...features.operators.schema import BLOCKS, FAMILIES, faulty
from ..adapt.covariance import Sites
from ..adapt.gaussian_process import ErrorPosterior
from ..core.registry import estimator_class
from ..trust.designs import Likeness, ends_of, is_near, scope_of, why_far
from .device_errors import OF_LIBRARY, DeviceErrors
from .devices import KnownDevices
from .family_tables import (
    FamilySettings,
    GeneralFit,
    balanced_weights,
    constants,
    draw_rows,
    latency_s,
    target_of,
)
from .fitted import Fitted
from .mixture import Member, Menu, foreign, members_of, mixed
from .prediction import FOREIGN, UNSEEN, DeviceIntervals, FamilyPrediction, joined, least_s
from .regressors import Folds, KnownModel, UnseenFit, error_figures
from .rows import (
    among,
    codes,
    dispatch,
    drawn,
    group_names,
    held_out,
    libraries,
    named_columns,
    unnamed,
)

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
#: How many times wider (in the logarithm) an interval is for a format or library that was seen on
#: no chip, on a chip that was not seen. Engineering estimate.
NOVEL = 2.0


class FamilyModel:
    """Learns and predicts one family.

    Args:
        family: One of the keys of ``features.operators.FAMILIES``.
        settings: Settings of its regressors.

    Attributes:
        known_devices: Chips and vendors of the devices that it was fitted to.
        named: Text parameters that every training row of the family gives.
        menu: Libraries that its training rows ran on.
        groups: Layers, or head configurations, that it learned from, where these are few: names of
            devices and groups, joined by :data:`GROUP`.
        intervals: Interval ends.
        left_out: Errors on each chip, left out; by names of devices joined by ``+``.
    """

    def __init__(self, family: str, settings: FamilySettings | None = None) -> None:
        self.family = family
        self.settings = settings or FamilySettings()
        self.known_devices = KnownDevices()
        self.named: tuple[str, ...] = ()
        self.menu = Menu()
        self.groups: frozenset[str] = frozenset()
        self.intervals = DeviceIntervals()
        self.left_out: dict[str, dict[str, float]] = {}
        self._models: Fitted | None = None

    @property
    def fitted(self) -> Fitted:
        """Its models.

        Raises:
            ModelError: They were not fitted.
        """
        if self._models is None:
            raise ModelError(f"the model of {self.family} has not been fitted")
        return self._models

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that it was fitted to, in order; none before it is."""
        return self._models.known.devices if self._models else ()

    @property
    def corrections(self) -> dict[str, ErrorPosterior]:
        """Corrections by what they are for: those of :class:`.device_errors.DeviceErrors`."""
        return self.fitted.errors.corrections

    @property
    def _names_library(self) -> bool:
        # Blocks have their libraries in columns of their own.
        return bool(self.named) or self.family in BLOCKS

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
        names = tuple(sorted(set(rows["device"])))
        self.known_devices = KnownDevices.of({name: devices[name] for name in names})
        # Blocks are told apart by more names than those of serving frameworks.
        self.named = () if self.family in BLOCKS else named_columns(rows)
        self.menu = Menu.of(rows) if self.named else Menu()
        features = self.features(rows, devices)
        ratio = target_of(rows, features)
        rng = np.random.default_rng(self.settings.seed)
        device, code = rows["device"].to_numpy(object), codes(rows)

        def known_of(fitting: np.ndarray, most: int) -> KnownModel:
            fitting = draw_rows(rng, fitting, balanced_weights(device[fitting]), most)
            return KnownModel.fit(
                self.family, names, self.settings, features, device, code[0], ratio, fitting
            )

        held, parts = held_out(rows, self.family, self.settings.seed, rng)
        known = known_of(np.flatnonzero(~held), self.settings.max_rows)
        tested, left = [(known, np.flatnonzero(held))], []
        for part in parts:
            # As many rows of new groups as of known ones.
            own, most = np.flatnonzero(part), max(LEAST_TESTED, int(held.sum())) // len(parts)
            own = draw_rows(rng, own, balanced_weights(device[own]), most)
            single = ~part & drawn(len(rows), rng)
            fold = known_of(np.flatnonzero(~part & ~single), self.settings.fold_rows)
            left.append((fold, own))
            # A model of fewer rows errs more on known groups than the one that is kept.
            if len(rows) <= self.settings.fold_rows:
                tested.append((fold, np.flatnonzero(single)))

        def judged(tests: list[tuple[KnownModel, np.ndarray]]) -> list[np.ndarray]:
            found = [
                (own, *model.held_out(features.take(own), device[own], code[0][own], ratio[own]))
                for model, own in tests
            ]
            return [np.concatenate(part) for part in zip(*found, strict=True)]

        own, scores, predicted, near = judged(tested)
        if parts:
            group = group_names(rows, self.family)
            pairs, counts = np.unique((device + GROUP + group).astype(str), return_counts=True)
            # A few rows of a group say nothing of its others.
            own_device = np.char.partition(pairs, GROUP)[:, 0]
            usual = {d: np.median(counts[own_device == d]) for d in names}
            least = np.array([max(GROUP_ROWS, GROUP_SHARE * usual[d]) for d in own_device])
            self.groups = frozenset(pairs[counts >= least].tolist())
            others, new_scores, _, new_near = judged(left)
            self.intervals.fit_groups(new_scores, group[others], device[others])
            near = np.concatenate([near, new_near])
        if len(own):
            if known.regressor.domain is not None:
                known.regressor.domain.calibrate(near)
            # With fewer than ten scores a device stays without ends of its own and takes those of
            # an unseen one.
            dtype = OpRows.of(rows).texts("dtype")[own]
            self.intervals.fit_devices(device[own], dtype, scores, predicted, 10)
        job = GeneralFit(self.family, self.settings, features, ratio, device, code[0])
        # Rows that mislead about other devices stay in the fit of known ones, where they are true.
        fit = UnseenFit(job, self.known_devices, libraries(rows), ~faulty(rows, "local"), rng)
        unseen, folds = fit.make(np.flatnonzero(~held))
        unseen.vendors = self.known_devices.own_vendors(self._names_library)
        self._judge(ratio, folds)
        chips = self.known_devices.chips
        errors = DeviceErrors.fit(known, unseen, chips, features, code, ratio, folds)
        self._models = Fitted(known, unseen, errors)
        return self

    def _judge(self, ratio: np.ndarray, folds: Folds) -> None:
        """Take the interval ends of unseen devices from the errors on left-out chips.

        Each chip's own figures are those by the ends of the others.
        """
        if not folds:
            return
        # The errors on left-out chips are what a new device's errors will look like. Twins count as
        # one device.
        scores = {group[0]: ratio[own] - left_out for group, (own, left_out) in folds.items()}
        foreign, widened = self.known_devices.foreign, self.family in constants()["widened"]
        for group in folds:
            others = {name: own for name, own in scores.items() if name != group[0]}
            judged = DeviceIntervals()
            judged.fit_unseen(others, foreign, widened)
            kind = FOREIGN if group[0] in foreign else UNSEEN
            ends = judged.ends.ends[kind, 0]
            self.left_out["+".join(group)] = error_figures(scores[group[0]], ends)
        self.intervals.fit_unseen(scores, foreign, widened)

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
        device = known["device"].to_numpy(object)
        dtype = OpRows.of(known).texts("dtype")
        self.intervals.fit_devices(device, dtype, scores, latency, 60)

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
        models = self.fitted
        rows = OpRows.of(rows)
        unsaid = self.menu.open(rows, self.named)
        if unsaid.any():
            return self._mixed(rows, unsaid, devices, corrected)
        learned, known = self.learned_at(rows, devices)
        if learned is not rows:
            found = self.predict(learned, known, corrected)
            like = self._likeness(rows, devices, learned, known)
            self._on_designs(found, rows, devices, self.features(learned, known).base_s, like)
            return found
        features = self.features(rows, devices)
        prediction = self._plain(rows, features, devices)
        if corrected and models.errors.corrections:
            models.errors.correct(prediction, rows, features, devices)
        prediction.hold_above(least_s(self.family, rows, features, devices))
        return prediction

    def learned_at(
        self, rows: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[OpRows, Mapping[str, DeviceSpec]]:
        """Rows and devices at which what was learned holds: those of their bases for designs.

        A design that was measured, or that the model was calibrated to, has its own.

        Args:
            rows: Rows of the family.
            devices: Descriptions by the values of ``device``.

        Returns:
            ``rows`` and ``devices`` themselves where no device is a design.
        """
        own = {*self.devices, *(name.split(OF_LIBRARY)[0] for name in self.corrections)}
        names = rows.codes("device")[1]
        bases = {n: base for n in names if n not in own and (base := self._start(devices[n]))}
        if not bases:
            return rows, devices
        code, found = rows.codes("device")
        renamed = np.array([bases[n].name if n in bases else n for n in found], object)[code]
        known = {base.name: base for base in bases.values()}
        return rows.with_texts({"device": renamed}), {**known, **devices}

    def _start(self, device: DeviceSpec) -> DeviceSpec | None:
        """The device of the catalogue that a design starts from; ``None`` for other devices.

        Where a design's file names none, one is taken by what was learned of the catalogue's chips.
        """
        base = base_of(device)
        if base is None or device.base == base.name:
            return base
        name = np.array([device.name], object)
        like, scope = self.known_devices.proxies(name, {device.name: device})
        learned = [str(like[0])] if scope[0] == "sibling" else self.devices
        return base if any(map(in_catalogue, learned)) else None

    def _likeness(
        self,
        rows: OpRows,
        devices: Mapping[str, DeviceSpec],
        learned: OpRows,
        known: Mapping[str, DeviceSpec],
    ) -> Likeness:
        """How alike the devices of rows and those that stand for them are, shape ``(n,)`` each."""
        code, names = rows.codes("device")
        bases = dict(zip(code.tolist(), learned.texts("device").tolist(), strict=True))
        found = {at: Likeness.of(devices[names[at]], known[base]) for at, base in bases.items()}
        akin, reuse = zip(*(found[at] for at in code.tolist()), strict=True)
        tiled = FAMILIES.get(self.family) != "pointwise"
        return Likeness(np.array(akin), np.array(reuse) if tiled else 1.0)

    def _on_designs(
        self,
        found: FamilyPrediction,
        rows: OpRows,
        devices: Mapping[str, DeviceSpec],
        base_s: np.ndarray,
        like: Likeness,
    ) -> None:
        """Turn predictions on the bases of designs, in place, into those on the designs.

        Args:
            found: Of the rows, on the bases.
            rows: The rows.
            devices: Descriptions by the values of ``device``, of the designs.
            base_s: Analytical estimates on the bases in seconds, shape ``(n,)``.
            like: How alike the designs and their bases are.
        """
        features = self.features(rows, devices)
        ratio = features.base_s / base_s
        found.lo, found.hi = ends_of((found.lo, found.hi), found.latency, ratio, like)
        found.latency = found.latency * ratio
        found.scope, found.in_domain = (
            scope_of(found.scope, ratio, like),
            found.in_domain & is_near(ratio, like),
        )
        found.roofline, found.bound = features.roofline_s, features.bound
        found.hold_above(least_s(self.family, rows, features, devices))

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
        learned, known = self.learned_at(rows, devices)
        proxy, _ = self.known_devices.proxies(learned.texts("device"), known)
        code, names = learned.codes("device")
        vendors = np.array([known[name].vendor for name in names], object)[code]
        return self.menu.expanded(rows, proxy, vendors)

    def with_members(
        self, row: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[FamilyPrediction, list[Member]]:
        """Predict a single row, and list the libraries in its mixture, fastest first.

        There are none if the row names its own.
        """
        if not self.menu.open(row, self.named)[0]:
            return self.predict(row, devices), []
        table, origin, weight = self._expanded(row, devices)
        found = self.predict(table, devices)
        return mixed(found, origin, weight, 1), members_of(table, weight, found)

    def _plain(
        self, rows: OpRows, features: OpFeatures, devices: Mapping[str, DeviceSpec]
    ) -> FamilyPrediction:
        """Predictions without corrections."""
        known, unseen = self.fitted.known, self.fitted.unseen
        proxy, scope = self.known_devices.proxies(rows.texts("device"), devices)
        own = among(proxy, known.devices)
        # A format or library that a known chip was not measured with is as on one that was not.
        if self.family not in BLOCKS:
            ran = known.effects.measured(proxy, rows.texts("dtype"), rows.texts("backend"))
            scope = np.where(own & ~ran, "unseen", scope)
        latency, inside = self.fitted.latency_s(rows, features, proxy, devices)
        dtype, foreign_devices = rows.texts("dtype"), self.known_devices.foreign
        lo, hi = self.intervals.around(latency, proxy, dtype, scope, foreign_devices)
        # A format or library that no chip was seen with, on a chip that was not seen, either: what
        # was measured is the error of the chip alone.
        novel = scope == "unseen"
        if novel.any():
            novel &= ~among(libraries(rows), unseen.seen)
            # Where a vendor's known chip stands in, what counts is what ran on that one.
            novel &= ~(own & known.effects.knows(proxy, dispatch(rows)))
            lo[novel] *= (lo[novel] / latency[novel]) ** (NOVEL - 1)
            hi[novel] *= (hi[novel] / latency[novel]) ** (NOVEL - 1)
        wide_lo, wide_hi = self.intervals.of(UNSEEN, latency)
        # Outside the domain of a known device: ends halfway (geometric mean) to those of a device
        # that was never seen, since the error on such rows was not measured.
        far = ~inside & own
        if far.any():
            lo[far] = np.minimum(lo, np.sqrt(lo * wide_lo))[far]
            hi[far] = np.maximum(hi, np.sqrt(hi * wide_hi))[far]
        if self.groups:
            new = ~among(proxy + GROUP + group_names(rows, self.family), self.groups)
            group_lo, group_hi = self.intervals.of_new_groups(proxy[new], latency[new])
            lo[new], hi[new] = np.minimum(lo[new], group_lo), np.maximum(hi[new], group_hi)
        nameless = unnamed(rows, self.named) | self.known_devices.elsewhere(rows, devices)
        nameless |= foreign(rows, devices)
        # Which library runs an operator matters as much as the device (docs/operator-learning.md).
        if nameless.any():
            lo[nameless] = np.minimum(lo, wide_lo)[nameless]
            hi[nameless] = np.maximum(hi, wide_hi)[nameless]
            inside &= ~nameless
        return FamilyPrediction(latency, lo, hi, features.roofline_s, features.bound, scope, inside)

    def why_outside(
        self, rows: pd.DataFrame | OpRows, devices: Mapping[str, DeviceSpec]
    ) -> list[str]:
        """Reasons why the first of some rows is outside the training domain, one text each."""
        models = self.fitted
        row = OpRows.of(rows).take(np.array([0]))
        if self.menu.open(row, self.named)[0]:
            # Of a mixture, the first member that is outside.
            members, _, _ = self._expanded(row, devices)
            first = int(np.argmin(self.predict(members, devices).in_domain))
            row = members.take(np.array([first]))
        reasons = []
        learned, known = self.learned_at(row, devices)
        if learned is not row:
            both = self.features(row, devices).base_s, self.features(learned, known).base_s
            name, base = row.texts("device")[0], learned.texts("device")[0]
            if not Likeness.of(devices[name], known[base]).akin:
                reasons.append(f"{name} is priced as {base}, of another architecture or other dies")
            elif not is_near(ratio := both[0] / both[1])[0]:
                reasons.append(why_far(name, base, float(ratio[0])))
            row, devices = learned, known
        features = self.features(row, devices)
        proxy, _ = self.known_devices.proxies(row.texts("device"), devices)
        regressor, table = models.choose(features, proxy)
        domain = regressor.domain
        if self.known_devices.elsewhere(row, devices).any():
            reasons.append("its operators are known of other kinds of device alone")
        if foreign(row, devices).any():
            name = row.texts("backend")[0]
            reasons.append(f"{name} runs on {constants()['only_on'][name]}'s GPUs alone")
        if bool(unnamed(row, self.named)[0]):
            reasons.append("what runs it (backend=…, kernel=…) is not named, or was not seen")
        if domain is not None and not bool(domain.contains(table)[0]):
            reasons += domain.reasons(table)
        return reasons

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
        return self.fitted.errors.learn(device, library, sites, errors)

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
        rows = rows.reset_index(drop=True)
        features, asked = self.features(rows, devices), OpRows.of(rows)
        latency = self._plain(asked, features, devices).latency
        errors = np.log(latency_s(rows)) - np.log(latency)
        return self.fitted.errors.sites(asked, features, devices), errors, latency

    # Tables

    def features(
        self, rows: pd.DataFrame | OpRows, devices: Mapping[str, DeviceSpec]
    ) -> OpFeatures:
        """Features of rows, with the kernels' texts if the estimator looks at their graphs."""
        texts = getattr(estimator_class(self.settings.estimator), "needs_graphs", False)
        return op_features(rows, self.family, devices, texts=texts)

    # Saving

    def save(self, path: Path) -> dict[str, object]:
        """Write both regressors below ``path``; returns what the manifest has to hold."""
        return {
            **self.fitted.save(path),
            **self.known_devices.to_dict(),
            "named": list(self.named),
            "menu": self.menu.to_list(),
            **({"groups": sorted(self.groups)} if self.groups else {}),
            "intervals": self.intervals.to_dict(),
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
        model.known_devices = KnownDevices.from_dict(manifest)
        # Entries that the first released models lack have a default.
        model.named = tuple(manifest.get("named", ()))
        model.menu = Menu.from_list(manifest.get("menu", ()))
        model.groups = frozenset(manifest.get("groups", ()))
        model.intervals = DeviceIntervals.from_dict(manifest["intervals"])
        model.left_out = dict(manifest["left_out"])
        model._models = Fitted.load(family, path, manifest, model.known_devices.chips)
        model._models.unseen.vendors = model.known_devices.own_vendors(model._names_library)
        return model
