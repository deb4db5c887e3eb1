"""Base class of estimators whose answers, for some of the kernels, come from another tool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.row import rows
from ..core.base import KernelPrediction
from ..core.kernel_table import SMALLEST, kernel_table
from ..core.store import check_estimator, read_manifest, write_folder
from ..trust.conformal import UNCALIBRATED


@dataclass(frozen=True)
class Answer:
    """A tool's answer about a kernel.

    Attributes:
        seconds: Time of the part of the kernel that it models; 0 if it models none.
        reason: Why it models none; empty if it models the kernel.
    """

    seconds: float
    reason: str = ""

    @property
    def covered(self) -> bool:
        """Whether the tool models the kernel."""
        return not self.reason


class AnsweringEstimator(ABC):
    """An estimator whose answers come from another tool; it learns nothing.

    A kernel without an answer takes ``roofline + floor``, marked ``roofline`` and out of domain;
    :meth:`reasons` gives the reason.

    Args:
        params: Keywords of the constructor; saved with the estimator.
    """

    name: str = ""
    #: ``source`` of its answers.
    source: ClassVar[str] = ""

    def __init__(self, **params: object) -> None:
        self.params = params

    @property
    @abstractmethod
    def version(self) -> str:
        """Name and version of the tool."""

    @abstractmethod
    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The tool's answer about each kernel.

        Raises:
            ModelError: The tool is not installed.
            DeviceError: It cannot model the device.
        """

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """Seconds of whole kernels from the answers, shape ``(n,)``: the answers themselves.

        Args:
            answered: Seconds of the answers.
            row: Feature rows of the kernels.
            device: Device they run on.
        """
        return answered

    def fit(self, dataset: Dataset) -> Self:
        """Return the estimator as it is: it learns nothing."""
        return self

    def reasons(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[str]:
        """Why each kernel takes its roofline; empty for those that the tool models."""
        return [answer.reason for answer in self.answers(kernels, device)]

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device.

        Raises:
            OpcastError: As :meth:`answers`.
        """
        answers = self.answers(kernels, device)
        if not kernels:
            empty, names = np.zeros(0), np.zeros(0, object)
            return KernelPrediction(empty, empty, empty, names, names, np.zeros(0, bool))
        table = kernel_table(kernels, device)
        covered = np.array([answer.covered for answer in answers], bool)
        simulated = np.array([answer.seconds for answer in answers])
        own = np.maximum(self.latency(simulated, rows(kernels), device), SMALLEST)
        latency = np.where(covered, own, table.roofline_s)
        # No tool is calibrated against measurements, so the interval is as wide as an uncalibrated
        # roofline's.
        width = float(np.exp(UNCALIBRATED))
        return KernelPrediction(
            latency,
            latency / width,
            latency * width,
            table.bound,
            source=np.where(covered, self.source, "roofline").astype(object),
            in_domain=covered,
        )

    def notes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
        """Share of the kernels that the tool models, and reasons for the others, as notes."""
        own = [kernel for kernel in kernels if kernel.takes_time]
        reasons = Counter(filter(None, self.reasons(own, device)))
        covered = len(own) - sum(reasons.values())
        notes = [f"{self.version} models {covered} of {len(own)} kernels; nothing is calibrated"]
        notes += [f"{count} kernels take the roofline: {why}" for why, count in reasons.items()]
        return tuple(notes)

    def save(self, path: Path) -> None:
        """Write the model folder: a manifest, no weights."""
        manifest = {"estimator": self.name, "params": self.settings, "units": {"latency": "s"}}
        write_folder(Path(path), manifest, {})

    @property
    def settings(self) -> dict[str, object]:
        """Keywords that construct the same estimator again."""
        return dict(self.params)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a model folder.

        Raises:
            ModelError: The folder is missing, damaged, or of another estimator.
        """
        manifest = read_manifest(Path(path))
        check_estimator(Path(path), manifest, cls.name)
        return cls(**manifest.get("params", {}))
