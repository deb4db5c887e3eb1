"""The protocols of estimators and saved models, and the record of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import numpy as np

from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel

if TYPE_CHECKING:
    from ..trust.domain import Domain
    from .kernel_table import KernelTable


@dataclass(slots=True)
class KernelPrediction:
    """Predictions for ``n`` kernels; arrays have shape ``(n,)``, seconds of one execution.

    Attributes:
        latency: Predicted latency.
        lo: Lower bound of the 90 % interval.
        hi: Upper bound of the 90 % interval.
        bound: Limiting resource: ``compute``, ``memory``, ``latency`` or ``communication``.
        source: ``measured``, ``learned``, ``roofline`` or ``compiler``; an estimator with several
            routes adds a colon and the route (``learned:graph/linear``).
        in_domain: Whether the kernel is in the domain of the training data.
        unclamped: Estimate in seconds before limiting it to physical bounds; ``None`` for a model
            without limits.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    bound: np.ndarray
    source: np.ndarray
    in_domain: np.ndarray
    unclamped: np.ndarray | None = None

    def take(self, index: np.ndarray) -> KernelPrediction:
        """The given kernels, by position or mask."""
        columns = ((name, getattr(self, name)) for name in self.__slots__)
        return replace(self, **{name: c[index] for name, c in columns if c is not None})

    def put(self, at: np.ndarray, other: KernelPrediction) -> None:
        """Set the predictions at some positions."""
        for name in self.__slots__:
            if getattr(other, name) is not None:
                getattr(self, name)[at] = getattr(other, name)

    def without(self, apart: np.ndarray) -> KernelPrediction:
        """The predictions with zero time for the kernels of a mask."""
        none = {f: np.where(apart, 0.0, getattr(self, f)) for f in ("latency", "lo", "hi")}
        return replace(self, **none)

    @classmethod
    def empty(cls, n: int) -> KernelPrediction:
        """Uninitialized predictions of ``n`` kernels."""
        latency, lo, hi = np.empty((3, n))
        bound, source = np.full((2, n), "", object)
        return cls(latency, lo, hi, bound, source, np.zeros(n, bool))

    @classmethod
    def around(
        cls,
        latency: np.ndarray,
        ends: tuple[np.ndarray, np.ndarray] | tuple[float, float],
        source: str | np.ndarray,
        in_domain: np.ndarray | bool = False,
    ) -> KernelPrediction:
        """Predictions from latencies and log interval bounds, with an empty ``bound``."""
        found = cls.empty(len(latency))
        found.latency[:], found.source[:], found.in_domain[:] = latency, source, in_domain
        found.lo[:], found.hi[:] = (latency * np.exp(end) for end in ends)
        return found

    def scaled(self, factor: np.ndarray | float) -> KernelPrediction:
        """Latencies and interval bounds times a factor."""
        own = {name: getattr(self, name) * factor for name in ("latency", "lo", "hi")}
        return replace(self, **own)

    @property
    def estimate(self) -> np.ndarray:
        """The estimate before limiting it to physical bounds, shape ``(n,)``."""
        return self.latency if self.unclamped is None else self.unclamped


def distinct(kernels: Sequence[Kernel]) -> tuple[list[Kernel], np.ndarray]:
    """Distinct kernels, and the position of each of ``kernels`` among them, shape ``(n,)``."""
    # By content hash: kernels with equal text take equal time, whatever their names.
    first: dict[str, int] = {}
    index = np.array([first.setdefault(k.hash, len(first)) for k in kernels], np.intp)
    by_hash = {k.hash: k for k in kernels}
    return [by_hash[h] for h in first], index


@dataclass(frozen=True)
class Params:
    """Keywords of an estimator with their defaults; base class of each estimator's parameters."""


@runtime_checkable
class Estimator(Protocol):
    """Learns and predicts kernel latency; named by entry points ``opcast.estimators``."""

    name: str

    def fit(self, dataset: Dataset) -> Self:
        """Learn from the dataset's kernel rows."""
        ...

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device."""
        ...

    def save(self, path: Path) -> None:
        """Write the model folder: ``manifest.json`` and weights."""
        ...

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a model folder."""
        ...


@runtime_checkable
class TableEstimator(Estimator, Protocol):
    """An estimator that learns from and predicts rows of the feature table.

    Cross-fitting computes the table once and passes rows of it.
    """

    domain: Domain | None

    @property
    def ranks(self) -> bool:
        """Whether it learns an order, which depends on the compared rows."""
        ...

    def clone(self) -> Self:
        """An unfitted estimator with the same parameters."""
        ...

    def fit_table(
        self,
        table: KernelTable,
        latency_s: np.ndarray,
        groups: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> Self:
        """Learn from ``n`` rows with latencies of shape ``(n,)``, without calibrating."""
        ...

    def predict_table(self, table: KernelTable) -> KernelPrediction:
        """Predict every row of the table."""
        ...

    def calibrate(
        self,
        table: KernelTable,
        latency_s: np.ndarray,
        predicted_s: np.ndarray,
        scores: np.ndarray | None = None,
    ) -> None:
        """Calibrate intervals and the domain's threshold on held-out predictions, ``(n,)``."""
        ...
