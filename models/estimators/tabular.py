"""Base class of the estimators that learn from the feature table.

``latency = (roofline + floor) × exp(ratio)``: a subclass learns the ratio. Intervals, domain, the
roofline for untrained kinds, and the model folder are implemented here.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.scalar_loops import scalar_seconds
from ..core.base import KernelPrediction, Params, distinct
from ..core.kernel_table import CELLS, KernelTable, kernel_table
from ..core.store import (
    MANIFEST,
    check_estimator,
    check_schema,
    pack,
    read_files,
    read_manifest,
    unpack,
    write_folder,
)
from ..trust.calibrator import UNCALIBRATED, Conformal, ends
from ..trust.domain import Domain

#: Definition of the ratio, for the manifest.
TARGET = "log(latency_s / (roofline_s + floor_s))"
#: Fewest training rows of a cell; others take the roofline, since a handful of kernels does not
#: represent their kind. Engineering estimate; not fitted.
MIN_ROWS = 8
#: Largest absolute value of learned ratios (a factor of 3000): larger ones must be extrapolations.
#: Engineering estimate.
MAX_LOG_RATIO = 8.0
_DOMAIN_FILE = "domain.npz"


class TabularEstimator(ABC):
    """An estimator on the feature table.

    Args:
        params: Fields of :attr:`keywords`.

    Attributes:
        name: Name in the registry.
        keywords: Dataclass of the constructor's keywords, which are saved with the estimator.
        params: Values of the keywords.
        retired: Keywords of earlier versions, which saved models may have, and the only value that
            they can be loaded with.
        learned: Whether predictions count as learned; false for the bare roofline.
        needs_graphs: Whether it also reads ``KernelTable.graphs``.
        schema: Digest of the features that it was fitted to; empty before fitting.
        feature_names: Names of those features.
        conformal: Interval bounds, calibrated on held-out samples.
        fallback: Interval bounds in log space for the bare roofline.
        domain: Region of the training rows; ``None`` before fitting.
        trained: Cells that it was trained on, bool, shape ``(cells,)``.
    """

    name: str = ""
    keywords: ClassVar[type[Params]] = Params
    retired: ClassVar[JsonMapping] = {}
    learned: ClassVar[bool] = True
    needs_graphs: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Lets callers check whether it takes a seed or threads.
        cls.__signature__ = inspect.signature(cls.keywords)  # type: ignore[attr-defined]

    def __init__(self, **params: object) -> None:
        self.params = self.keywords(**params)
        self.schema = ""
        self.feature_names: tuple[str, ...] = ()
        self.conformal = Conformal()
        self.fallback = (-UNCALIBRATED, UNCALIBRATED)
        self.domain: Domain | None = None
        self.trained = np.zeros(len(CELLS), bool)
        self._queries: np.ndarray | None = None

    @property
    def ranks(self) -> bool:
        """Whether it learns an order, which depends on the compared rows."""
        return False

    @abstractmethod
    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        """Learn the log-ratio ``target``, shape ``(n,)``, keeping the rows of a group together."""

    @abstractmethod
    def _ratio(self, table: KernelTable) -> np.ndarray:
        """Predicted log-ratio, shape ``(n,)``."""

    def leaves(self, table: KernelTable) -> np.ndarray:
        """Leaf of each tree that a row falls into, ``(n, trees)``; no columns without trees."""
        return np.zeros((len(table), 0), np.int32)

    def contributions(self, table: KernelTable) -> np.ndarray | None:
        """Exact contributions of the features to the log-ratio, if the estimator has them.

        Returns:
            Shape ``(n, d + 1)``, with the value before any feature as the last column; a row sums
            to the log-ratio. ``None`` if the estimator has no exact contributions.
        """
        return None

    @abstractmethod
    def _weights(self) -> dict[str, bytes]:
        """Learned state as contents of files by name."""

    @abstractmethod
    def _restore(self, files: Mapping[str, bytes]) -> None:
        """Restore the state from the result of :meth:`_weights`."""

    @property
    def settings(self) -> dict[str, object]:
        """Keywords that construct the same estimator."""
        return asdict(self.params)

    def clone(self) -> Self:
        """An unfitted estimator with the same parameters."""
        return type(self)(**self.settings)

    def fit(self, dataset: Dataset) -> Self:
        """Learn from the dataset's kernel rows and calibrate by cross-fitting over kernels.

        Raises:
            DatasetError: The dataset has too few kernel rows.
        """
        from ..training_data.crossfit import fit_and_calibrate
        from ..training_data.prepared import prepare

        data = prepare(dataset, programs=False)
        fit_and_calibrate(self, data, np.arange(len(data.frame)), split="random")
        return self

    def fit_table(
        self,
        table: KernelTable,
        latency_s: np.ndarray,
        groups: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> Self:
        """Learn from a table, without calibrating.

        Args:
            table: ``n`` kernels.
            latency_s: Measured latencies in seconds, shape ``(n,)``.
            groups: Rows of a group are never split between fitting and early stopping.
            queries: Rows of a query are compared, by estimators that learn an order.
        """
        self.schema, self.feature_names = table.schema, table.names
        counts = np.bincount(table.cell, minlength=len(CELLS))
        # In a dataset smaller than that, the most common cell counts as trained.
        self.trained = counts >= min(MIN_ROWS, int(counts.max(initial=1)))
        self.domain = Domain.fit(table)
        own = np.arange(len(table)) if groups is None else groups
        # Passed as an attribute: only estimators that rank read it.
        self._queries = queries
        self._fit(table, np.log(latency_s / table.base_s), own)
        self._queries = None
        return self

    def calibrate(
        self,
        table: KernelTable,
        latency_s: np.ndarray,
        predicted_s: np.ndarray,
        domain_scores: np.ndarray | None = None,
    ) -> None:
        """Calibrate intervals and the domain's threshold on held-out samples.

        Args:
            table: ``n`` kernels.
            latency_s: Measured latencies, shape ``(n,)``.
            predicted_s: Predictions of models that were not fitted to the sample.
            domain_scores: Domain scores by those models.
        """
        self.conformal = Conformal.fit(latency_s, predicted_s, table.cell)
        # 98 % rather than 90 %: it is for cells without training rows, whose errors are unknown. On
        # a TPU these take the base, and kernels without an estimate the plain roofline: cover both.
        own = [ends(np.log(latency_s / s), 0.98) for s in (table.base_s, table.roofline_s)]
        self.fallback = (
            min(-UNCALIBRATED, *(lo for lo, _ in own)),
            max(UNCALIBRATED, *(hi for _, hi in own)),
        )
        if self.domain is not None and domain_scores is not None:
            self.domain.calibrate(domain_scores)

    def log_ratio(self, table: KernelTable) -> np.ndarray:
        """Predicted log-ratio within :data:`MAX_LOG_RATIO`, shape ``(n,)``.

        It is 0 for kernels of a cell that the estimator was not trained on.
        """
        table = table.with_names(self.feature_names)
        ratio = np.clip(self._ratio(table).astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return np.where(self.trained[table.cell], ratio, 0.0)

    def point(self, table: KernelTable) -> np.ndarray:
        """Predicted latency in seconds, shape ``(n,)``, without interval and domain."""
        return np.asarray(table.base_s * np.exp(self.log_ratio(table)))

    def predict_table(self, table: KernelTable) -> KernelPrediction:
        """Predict the kernels of a table."""
        table = table.with_names(self.feature_names)
        latency = self.point(table)
        known = self.trained[table.cell]
        lo, hi = self.conformal.interval(latency, table.cell)
        source = np.where(known & self.learned, "learned", "roofline")
        inside = known & self.domain.contains(table) if self.domain is not None else known
        return KernelPrediction(
            latency=latency,
            lo=np.where(known, lo, latency * np.exp(self.fallback[0])),
            hi=np.where(known, hi, latency * np.exp(self.fallback[1])),
            bound=table.bound,
            source=source.astype(object),
            in_domain=inside,
        )

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device; equal kernels are only computed once."""
        if not kernels:
            return KernelPrediction.empty(0)
        # A program repeats its layers: most of its kernels are equal.
        unique, index = distinct(kernels)
        prediction = self.predict_table(kernel_table(unique, device, graphs=self.needs_graphs))
        least = scalar_seconds(unique, device)
        return _at_least(prediction, least).take(index)

    def save(self, path: Path) -> None:
        """Write the model folder: ``manifest.json`` and weights."""
        files = self._weights()
        if self.domain is not None:
            files[_DOMAIN_FILE] = pack(self.domain.to_arrays())
        write_folder(Path(path), self._manifest(), files)

    def _manifest(self) -> dict[str, object]:
        return {
            "estimator": self.name,
            "params": self.settings,
            "units": {"latency": "s", "features": "see feature_names"},
            "target": TARGET,
            "schema_hash": self.schema,
            "feature_names": list(self.feature_names),
            "trained_cells": [name for name, on in zip(CELLS, self.trained, strict=True) if on],
            "conformal": self.conformal.to_dict(),
            "roofline_interval_log": list(self.fallback),
        }

    @classmethod
    def load(cls, path: Path, schema: str | None = None) -> Self:
        """Read a model folder.

        Args:
            path: The folder.
            schema: Feature schema to expect; ``None`` takes the current one.

        Raises:
            ModelError: The folder is missing, damaged, of another format, estimator or schema.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_estimator(path, manifest, cls.name)
        files = read_files(path, manifest)
        try:
            return cls._from_parts(path, manifest, files, schema)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ModelError(f"model folder is incomplete: {error!r}", where=str(path)) from None

    @classmethod
    def _from_parts(
        cls, path: Path, manifest: JsonMapping, files: dict[str, bytes], schema: str | None
    ) -> Self:
        given = manifest["params"].items()
        # A model fitted with another value is rejected, like any unknown keyword.
        model = cls(**{k: v for k, v in given if k not in cls.retired or v != cls.retired[k]})
        model.schema = str(manifest["schema_hash"])
        model.feature_names = tuple(manifest["feature_names"])
        if model.schema:
            today = current_schema(model.feature_names) if schema is None else schema
            check_schema(path, manifest, today)
        model.trained = np.array([name in manifest["trained_cells"] for name in CELLS])
        _check_tpu(path, model)
        model.conformal = Conformal.from_dict(manifest["conformal"])
        lo, hi = manifest["roofline_interval_log"]
        model.fallback = (float(lo), float(hi))
        if _DOMAIN_FILE in files:
            model.domain = Domain.from_arrays(unpack(files[_DOMAIN_FILE]))
        model._restore(files)
        return model


def _check_tpu(path: Path, model: TabularEstimator) -> None:
    """Reject a model trained on TPUs before these had separate features and a separate base.

    Its ratios refer to another base, so that it would be wrong by large factors without an error.
    """
    from ...features.table.tpu import tpu_feature_names

    cells = [name for name, on in zip(CELLS, model.trained, strict=True) if on]
    known = set(tpu_feature_names()) <= set(model.feature_names)
    if model.schema and not known and any(name.startswith("tpu/") for name in cells):
        raise ModelError(
            "model was trained on TPUs without their own features",
            where=str(path / MANIFEST),
            hint="train again on the dataset: features are recomputed from its kernels",
        )


def current_schema(names: Sequence[str] = ()) -> str:
    """Digest of the current feature schema, with TPU features if ``names`` ends in them."""
    from ...features.table.table import feature_names, schema_hash
    from ...features.table.tpu import tpu_feature_names

    own = tpu_feature_names()
    wide = tuple(names[-len(own) :]) == own
    return schema_hash((*feature_names(), *own) if wide else ())


def _at_least(prediction: KernelPrediction, least_s: np.ndarray) -> KernelPrediction:
    """Raise latencies, with their intervals, to physical lower limits, shape ``(n,)``."""
    factor = np.maximum(least_s / prediction.latency, 1.0)
    if (factor == 1.0).all():
        return prediction
    return replace(prediction.scaled(factor), unclamped=prediction.estimate)
