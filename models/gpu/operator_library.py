"""Published operator families: loaded on first use, queried, their intervals widened.

Measurements of kernels under XLA correct their predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ...features.devices.catalogue import find_device, in_catalogue, same_figures
from ...features.devices.device import DeviceSpec, MemoryLevel
from ...features.operators import OpFeatures, op_features
from ..core.base import KernelPrediction
from ..core.kernel_table import KernelTable
from ..core.registry import OPERATOR_MODEL, PRETRAINED, estimator_class, make_estimator
from ..core.store import predicts_operators, read_manifest
from ..estimators.tabular import TabularEstimator
from ..operators.family import FamilyModel
from ..operators.prediction import FamilyPrediction
from ..trust.calibrator import with_error

#: Folder of the shipped operator model.
SHIPPED = PRETRAINED / OPERATOR_MODEL
#: Factor on bandwidths that removes memory from the physics: large enough to make traffic free,
#: small enough to stay finite in 64 bits.
ENDLESS = 1e9
#: Fewest rows for boosted trees to learn the correction; with fewer they would overfit, so ridge
#: regression is used. Engineering estimate; not fitted (docs/gpu.md).
TREES_FROM = 500
#: Folds for calibrating intervals, as in cross-fitting elsewhere
#: (:data:`~opcast.models.training_data.crossfit.DEFAULT_FOLDS`).
FOLDS = 4


class Operators:
    """Latencies of published operators, loaded family by family.

    Reading a whole operator model takes seconds; a program needs two or three of its families.

    Args:
        path: Folder of an operator model.

    Raises:
        ModelError: The folder has no operator model.
    """

    def __init__(self, path: Path = SHIPPED) -> None:
        self.path = path
        manifest = read_manifest(path)
        if not predicts_operators(manifest):
            raise ModelError("holds no model of library operators", where=str(path))
        self._stored: JsonMapping = manifest["families"]
        self._loaded: dict[str, FamilyModel] = {}
        self.devices: Mapping[str, object] = manifest["devices"]

    @property
    def families(self) -> frozenset[str]:
        """Keys of the model's families."""
        return frozenset(self._stored)

    def family(self, key: str) -> FamilyModel:
        """A family's model.

        Raises:
            ModelError: The operator model lacks it, or its folder is damaged.
        """
        if key not in self._loaded:
            if key not in self._stored:
                known = ", ".join(sorted(self._stored))
                raise ModelError(f"no operators {key!r}", where=str(self.path), hint=f"has {known}")
            folder = self.path / key.replace("/", "-")
            self._loaded[key] = FamilyModel.load(key, folder, self._stored[key])
        return self._loaded[key]

    def predict(self, key: str, rows: pd.DataFrame, device: DeviceSpec) -> FamilyPrediction:
        """Latencies of rows of one family on one device."""
        rows = rows.assign(device=device.name)
        return self.family(key).predict(rows, {device.name: device})

    def knows_chip(self, key: str, device: DeviceSpec) -> bool:
        """Whether a family was fitted to the device or to another one with the same chip."""
        known = self.family(key).known_devices
        _, scope = known.proxies(np.array([device.name], object), {device.name: device})
        return bool(scope[0] in ("known", "sibling"))

    def knows_architecture(self, key: str, device: DeviceSpec) -> bool:
        """Whether a family was fitted to any device of the same architecture."""
        chips = self.family(key).known_devices.chips.values() if key in self.families else ()
        return any(device.architecture == architecture for architecture, *_ in chips)

    def knows(self, key: str, device: str) -> bool:
        """Whether the model has a family that was fitted to a device."""
        return key in self.families and device in self._stored[key]["devices"]


class Estimates(Operators):
    """The same families by their analytical estimates, without learned corrections.

    Args:
        learned: The learned families.
    """

    def __init__(self, learned: Operators) -> None:
        self.__dict__.update(learned.__dict__)

    def predict(self, key: str, rows: pd.DataFrame, device: DeviceSpec) -> FamilyPrediction:
        """Estimates of rows of one family on one device, without intervals."""
        found = physics_of(key, rows, device)
        base, n = found.base_s, len(rows)
        scope, inside = np.full(n, "unseen", object), np.zeros(n, bool)
        return FamilyPrediction(base, base, base, found.roofline_s, found.bound, scope, inside)


def canonical(device: DeviceSpec) -> DeviceSpec:
    """Rename a device to the catalogue's name, if it has an alias such as JAX's.

    This includes devices from files with the figures of a catalogue device. The operator models
    identify devices by catalogue name, and chips by architecture and lanes; all other figures of
    the description are kept.
    """
    if not in_catalogue(device.name):
        same = same_figures(device)
        return device if same is None else replace(device, name=same.name)
    listed = find_device(device.name)
    return replace(
        device,
        name=listed.name,
        vendor=listed.vendor,
        architecture=listed.architecture,
        lanes_per_core=listed.lanes_per_core,
    )


def physics_of(key: str, rows: pd.DataFrame, device: DeviceSpec) -> OpFeatures:
    """Analytical estimates of ``n`` rows of a family on ``device``, which replaces theirs."""
    return op_features(rows.assign(device=device.name), key, {device.name: device})


def with_rate(device: DeviceSpec, rate: float) -> DeviceSpec:
    """The device with another bf16 rate, so that a product of another type can stand in as bf16."""
    if rate == device.matrix_peak("bf16"):
        return device
    return replace(device, peak_flops={**device.peak_flops, "bf16": rate})


def with_memory(device: DeviceSpec, factor: float) -> DeviceSpec:
    """The device with memory and caches that are larger and faster by a factor.

    This divides an operator's memory time by ``factor``; with :data:`ENDLESS`, only arithmetic and
    launch remain.
    """
    levels = tuple(MemoryLevel(x.capacity * factor, x.bandwidth * factor) for x in device.levels)
    return replace(device, levels=levels)


def widened(
    found: FamilyPrediction | KernelPrediction,
    latency: np.ndarray,
    half: float | np.ndarray,
    source: str | np.ndarray,
    in_domain: np.ndarray | bool | None = None,
) -> KernelPrediction:
    """Turn a prediction into an answer with an additional, independent error.

    Args:
        found: The prediction.
        latency: Latencies of the answer in seconds, shape ``(n,)``.
        half: Log half-width of the additional error, one or ``n``.
        source: Source of the answer.
        in_domain: Whether there are published rows nearby; as predicted by default.
    """
    below, above = (np.log(end / found.latency) for end in (found.lo, found.hi))
    own = np.minimum(below, 0.0), np.maximum(above, 0.0)
    inside = found.in_domain if in_domain is None else in_domain
    return KernelPrediction.around(latency, with_error(own, (half, half)), source, inside)


class Correction:
    """Learns ``log(measured / predicted)`` of XLA's kernels from the feature table.

    The estimator's base is the published prediction instead of roofline plus floor, so that it only
    has to learn where XLA's kernels differ.

    Args:
        estimator: An estimator on the feature table.
        devices: Devices of its training kernels.
    """

    def __init__(self, estimator: TabularEstimator, devices: Sequence[str]) -> None:
        self.estimator = estimator
        self.devices = tuple(devices)

    @classmethod
    def fit(
        cls,
        table: KernelTable,
        predicted_s: np.ndarray,
        latency_s: np.ndarray,
        groups: np.ndarray,
        devices: Sequence[str],
        **params: object,
    ) -> Correction:
        """Learn from measured kernels, with intervals calibrated on held-out groups.

        Args:
            table: Features of ``n`` kernels.
            predicted_s: Seconds predicted from published operators, shape ``(n,)``.
            latency_s: Measured seconds, shape ``(n,)``.
            groups: Group of each kernel (a program, a family), held out whole, shape ``(n,)``.
            devices: Names of the devices they ran on.
            params: Parameters of the estimator.

        Raises:
            ModelError: A parameter is unknown.
        """
        shifted = replace(table, base_s=predicted_s)
        # The user's parameters are for the trees; ridge regression would reject them.
        name, own = ("xgboost", params) if len(table) >= TREES_FROM else ("ridge", {})
        made = cast("TabularEstimator", make_estimator(name, **own))
        held, scores = np.full(len(table), np.nan), np.full(len(table), np.nan)
        # Groups are numbered by name and assigned to folds in turn: reproducible without a seed.
        fold = np.unique(groups, return_inverse=True)[1] % FOLDS
        for number in range(FOLDS):
            test = fold == number
            # Fewer groups than folds leave folds empty; a single group leaves nothing to fit to.
            if not test.any() or test.all():
                continue
            part = cast("TabularEstimator", make_estimator(name, **own))
            part.fit_table(shifted.take(~test), latency_s[~test], groups[~test])
            held[test] = part.point(shifted.take(test))
            if part.domain is not None:
                scores[test] = part.domain.score(shifted.take(test))
        # The final estimator is fitted to all rows; only its intervals come from the folds.
        made.fit_table(shifted, latency_s, groups)
        done = np.isfinite(held)
        if done.any():
            made.calibrate(shifted.take(done), latency_s[done], held[done], scores[done])
        return cls(made, devices)

    def apply(
        self, prediction: KernelPrediction, table: KernelTable, device: str
    ) -> KernelPrediction:
        """Correct predictions of kernels on one device.

        On a device without measured kernels, intervals move with the latency but never narrow.
        """
        own = self.estimator.predict_table(replace(table, base_s=prediction.latency))
        # Kinds without enough measured kernels are returned as "roofline" and keep their
        # prediction.
        known = own.source == "learned"
        latency = np.where(known, own.latency, prediction.latency)
        moved = latency / prediction.latency
        lo, hi = np.where(known, own.lo, prediction.lo), np.where(known, own.hi, prediction.hi)
        # The errors behind the new bounds are from other devices and need not hold for this one.
        if device not in self.devices:
            lo, hi = np.minimum(lo, prediction.lo * moved), np.maximum(hi, prediction.hi * moved)
        inside = np.where(known & (device in self.devices), own.in_domain, prediction.in_domain)
        source = np.where(known, "learned:xla", prediction.source)
        return KernelPrediction(latency, lo, hi, prediction.bound, source, inside)

    def save(self, path: Path) -> None:
        """Write the estimator's folder."""
        self.estimator.save(path)

    def stored(self) -> dict[str, object]:
        """Entries for the manifest of the whole estimator."""
        return {"estimator": self.estimator.name, "devices": list(self.devices)}

    @classmethod
    def load(cls, path: Path, stored: JsonMapping, schema: str | None = None) -> Correction:
        """Read what :meth:`save` wrote.

        Args:
            path: The estimator's folder.
            stored: Result of :meth:`stored`.
            schema: Feature schema to expect; ``None`` takes the current one.

        Raises:
            ModelError: The folder is damaged, or was written for other features.
        """
        kind = cast(type[TabularEstimator], estimator_class(stored["estimator"]))
        return cls(kind.load(path, schema), stored["devices"])
