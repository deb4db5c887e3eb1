"""Predicts one family of operators, by one regressor for known devices and one for unseen ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures, op_features
from ...features.operators.columns import OpRows
from ...features.operators.schema import BLOCKS
from ..adapt.covariance import Sites
from ..adapt.gaussian_process import ErrorPosterior
from ..core.registry import estimator_class
from .designs import Designs, likeness, why_outside
from .device_errors import OF_LIBRARY
from .devices import KnownDevices
from .family_fit import GROUP, FamilyFit, Fitted
from .family_tables import FamilySettings, constants, latency_s
from .mixture import Member, Menu, foreign, members_of, mixed
from .prediction import UNSEEN, DeviceIntervals, FamilyPrediction, joined, least_s
from .rows import among, dispatch, group_names, libraries, named_columns, unnamed

if TYPE_CHECKING:
    import pandas as pd

#: Factor on the log half-width of intervals for an unseen device with a format or library that was
#: measured on no device. Engineering estimate.
NOVEL = 2.0


class FamilyModel:
    """Learns and predicts one family.

    Args:
        family: One of the keys of ``features.operators.FAMILIES``.
        settings: Settings of its regressors.

    Attributes:
        known_devices: Chips and vendors of the devices in the training data.
        named: Text parameters that are filled in every training row.
        menu: Libraries in the training rows.
        groups: Known layers or head configurations, if there are few: names of devices and groups,
            joined by :data:`GROUP`.
        intervals: Interval bounds.
        left_out: Errors on each chip when held out; by names of devices joined by ``+``.
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

    def own(self) -> FamilyModel:
        """A copy whose corrections can change without changing these."""
        result, errors = copy.copy(self), self.fitted.errors
        errors = replace(errors, corrections=dict(errors.corrections))
        result._models = replace(self.fitted, errors=errors)
        return result

    @property
    def fitted(self) -> Fitted:
        """The fitted models.

        Raises:
            ModelError: The model was not fitted.
        """
        if self._models is None:
            raise ModelError(f"the model of {self.family} has not been fitted")
        return self._models

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that it was fitted to; empty before the fit."""
        return self._models.known.devices if self._models else ()

    @property
    def corrections(self) -> dict[str, ErrorPosterior]:
        """Corrections by name, as in :class:`.device_errors.DeviceErrors`."""
        return self.fitted.errors.corrections

    @property
    def designs(self) -> Designs:
        """Maps designs (hypothetical devices) to the chips they start from."""
        own = {*self.devices, *(name.split(OF_LIBRARY)[0] for name in self.corrections)}
        return Designs(self.family, self.known_devices, self.devices, frozenset(own))

    @property
    def _names_library(self) -> bool:
        # Blocks have their libraries in separate columns.
        return bool(self.named) or self.family in BLOCKS

    # Fitting

    def fit(self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> FamilyModel:
        """Learn from rows of the family.

        Args:
            rows: Columns as of :func:`~opcast.models.operators.rows_of_dataset`.
            devices: Descriptions by name.

        Raises:
            DatasetError: A row lacks a parameter, or has no positive latency.
            ModelError: The estimator does not learn from a feature table.
        """
        rows = rows.reset_index(drop=True)
        names = tuple(sorted(set(rows["device"])))
        self.known_devices = KnownDevices.of({name: devices[name] for name in names})
        # Blocks are distinguished by more names than operators of serving frameworks.
        self.named = () if self.family in BLOCKS else named_columns(rows)
        self.menu = Menu.of(rows) if self.named else Menu()
        job = FamilyFit(self.family, self.settings, rows, self.features(rows, devices))
        vendors = self.known_devices.own_vendors(self._names_library)
        learned = job.run(self.known_devices, vendors)
        self._models, self.intervals, self.groups, self.left_out = learned
        return self

    def recalibrate(self, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec]) -> None:
        """Calibrate the intervals of known devices on rows that were not learned from.

        Args:
            rows: Rows of the family, with ``latency_us``; a device with fewer than 60 of them,
                three in each tail, keeps its bounds.
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
        """Predict rows of the family, on known or unseen devices.

        Rows that do not name a library are predicted as a mixture over those known for the format.

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
        learned, known = self.designs.bases(rows, devices)
        features = self.features(rows, devices)
        if learned is not rows:
            found = self.predict(learned, known, corrected)
            base = self.features(learned, known)
            # Kernels start as much later as the design's shortest one takes longer.
            later = _floors(rows, devices) - _floors(learned, known)
            here = np.maximum(features.base_s + later, features.roofline_s)
            # Compare whole calls: times are means per kernel, and a design may split differently.
            ratio = here * features.kernels / (base.base_s * base.kernels)
            self.designs.move(found, features, ratio, likeness(rows, devices, learned, known))
            found.hold_above(least_s(self.family, rows, features, devices))
            return found
        prediction = self._plain(rows, features, devices)
        if corrected and models.errors.corrections:
            models.errors.correct(prediction, rows, features, devices)
        prediction.hold_above(least_s(self.family, rows, features, devices))
        return prediction

    def _mixed(
        self,
        rows: OpRows,
        unsaid: np.ndarray,
        devices: Mapping[str, DeviceSpec],
        corrected: bool,
    ) -> FamilyPrediction:
        """Predict rows of which some (mask ``unsaid``) do not name a library."""
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
        """Rows of all mixture members, the index of each one's origin, and its weight."""
        learned, known = self.designs.bases(rows, devices)
        proxy, _ = self.known_devices.proxies(learned.texts("device"), known)
        code, names = learned.codes("device")
        vendors = np.array([known[name].vendor for name in names], object)[code]
        return self.menu.expanded(rows, proxy, vendors)

    def with_members(
        self, row: OpRows, devices: Mapping[str, DeviceSpec]
    ) -> tuple[FamilyPrediction, list[Member]]:
        """Predict a single row, and list the libraries in its mixture, fastest first.

        The list is empty if the row names its library.
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
        # A format or library not measured on a known chip is treated like an unseen chip.
        if self.family not in BLOCKS:
            ran = known.effects.measured(proxy, rows.texts("dtype"), rows.texts("backend"))
            scope = np.where(own & ~ran, "unseen", scope)
        latency, inside = self.fitted.latency_s(rows, features, proxy, devices)
        dtype, foreign_devices = rows.texts("dtype"), self.known_devices.foreign
        lo, hi = self.intervals.around(latency, proxy, dtype, scope, foreign_devices)
        # Intervals of unseen chips cover the error of the chip alone, not also of an unseen format
        # or library.
        novel = scope == "unseen"
        if novel.any():
            novel &= ~among(libraries(rows), unseen.seen)
            # If a known chip of the vendor stands in, its measurements count.
            novel &= ~(own & known.effects.knows(proxy, dispatch(rows)))
            lo[novel] *= (lo[novel] / latency[novel]) ** (NOVEL - 1)
            hi[novel] *= (hi[novel] / latency[novel]) ** (NOVEL - 1)
        wide_lo, wide_hi = self.intervals.of(UNSEEN, latency)
        # Outside the domain of a known device the error was not measured: bounds halfway (geometric
        # mean) to those of an unseen device.
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
        # The library matters as much as the device (docs/operator-learning.md).
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
            # For a mixture, report the first member outside.
            members, _, _ = self._expanded(row, devices)
            first = int(np.argmin(self.predict(members, devices).in_domain))
            row = members.take(np.array([first]))
        reasons = []
        learned, known = self.designs.bases(row, devices)
        if learned is not row:
            both = self.features(row, devices).base_s, self.features(learned, known).base_s
            design, base = devices[row.texts("device")[0]], known[learned.texts("device")[0]]
            reasons += why_outside(design, base, both[0] / both[1])
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
            device: Name of the device.
            rows: Rows of the family on it, with ``latency_us``.
            devices: Descriptions by name.
            library: Library (``backend``) of all rows, to correct predictions for this library
                only.

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
        """Features of rows, with the kernels' text if the estimator needs their graphs."""
        texts = getattr(estimator_class(self.settings.estimator), "needs_graphs", False)
        return op_features(rows, self.family, devices, texts=texts)

    # Saving

    def save(self, path: Path) -> dict[str, object]:
        """Write both regressors below ``path``; returns the entries for the manifest."""
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
    def load(cls, family: str, path: Path, manifest: JsonMapping) -> FamilyModel:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: A regressor is damaged, or has other features.
            KeyError: The manifest lacks an entry.
        """
        model = cls(family, FamilySettings(estimator=manifest["estimator"]))
        model.known_devices = KnownDevices.from_dict(manifest)
        # Entries that the first released models lack have defaults.
        model.named = tuple(manifest.get("named", ()))
        model.menu = Menu.from_list(manifest.get("menu", ()))
        model.groups = frozenset(manifest.get("groups", ()))
        model.intervals = DeviceIntervals.from_dict(manifest["intervals"])
        model.left_out = dict(manifest["left_out"])
        model._models = Fitted.load(family, path, manifest, model.known_devices.chips)
        model._models.unseen.vendors = model.known_devices.own_vendors(model._names_library)
        return model


def _floors(rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
    """Shortest kernel of each row's device in seconds, shape ``(n,)``."""
    code, names = rows.codes("device")
    return np.asarray(np.array([devices[name].floor for name in names])[code])
