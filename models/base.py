"""What every estimator offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np

from ..features.dataset import Dataset
from ..features.device import DeviceSpec
from ..features.kernel import Kernel


@dataclass(slots=True)
class KernelPrediction:
    """Predictions for ``n`` kernels; arrays have shape ``(n,)``, seconds of one execution.

    Attributes:
        latency: Predicted latency.
        lo: Lower end of the 90 % interval.
        hi: Upper end of the 90 % interval.
        bound: What limits it: ``compute``, ``memory``, ``latency`` or ``communication``.
        source: ``measured``, ``learned``, ``roofline`` or ``compiler``; an estimator with several
            routes adds a colon and the route (``learned:graph/linear``).
        in_domain: Whether the kernel lies within what the model was trained on.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    bound: np.ndarray
    source: np.ndarray
    in_domain: np.ndarray

    def take(self, index: np.ndarray) -> KernelPrediction:
        """The given kernels, by position or mask."""
        return KernelPrediction(*(getattr(self, name)[index] for name in self.__slots__))


def distinct(kernels: Sequence[Kernel]) -> tuple[list[Kernel], np.ndarray]:
    """Every kernel once, and for each of ``kernels`` its place among those, shape ``(n,)``."""
    first: dict[str, int] = {}
    index = np.array([first.setdefault(k.hash, len(first)) for k in kernels], np.intp)
    by_hash = {k.hash: k for k in kernels}
    return [by_hash[h] for h in first], index


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
