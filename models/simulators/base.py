"""What the simulators share: which kernels they model, their process, their answers on disk."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from ...features._columns import INDEX
from ...features._row import rows
from ...features.cache import LoweringCache
from ...features.compile_process import shown
from ...features.dataset import Dataset
from ...features.device import DeviceSpec
from ...features.errors import ModelError
from ...features.kernel import Kernel
from ...features.paths import home
from ...features.roofline import compute_seconds, memory_seconds
from ..base import KernelPrediction, distinct
from ..conformal import UNCALIBRATED
from ..store import read_manifest, write_folder
from ..tables import SMALLEST, kernel_table
from .tool_process import ToolProcess

#: Raised when the drivers change what they ask a tool or make of its answer.
ANSWER_VERSION = 1


@dataclass(frozen=True)
class Answer:
    """What a tool says of a kernel.

    Attributes:
        seconds: Its time of the part that it models; 0 if it models none.
        reason: Why it models none; empty if it does.
    """

    seconds: float
    reason: str = ""

    @property
    def covered(self) -> bool:
        """Whether the tool models the kernel."""
        return not self.reason


class SimulatorEstimator(ABC):
    """An estimator whose answers a tool of others gives; it learns nothing.

    A kernel that the tool cannot model takes ``roofline + floor``, marked ``roofline`` and outside
    of the domain; :meth:`reasons` says why. Answers are kept in the user's cache folder, by kernel,
    device, parameters and version of the tool.

    Args:
        limit_s: Seconds that the tool may take for one kernel.
        progress: Whether to show progress, if a person looks.
        params: Parameters of the tool; part of an answer's key.
    """

    name: str = ""
    #: Extra of ``pyproject.toml`` that installs it, and the packages whose versions count.
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    #: Module of this package that runs it.
    tool: ClassVar[str] = ""
    #: ``source`` of its answers.
    source: ClassVar[str] = ""

    def __init__(self, limit_s: float = 60.0, progress: bool = True, **params: Any) -> None:
        self.limit_s = float(limit_s)
        self.progress = progress
        self.params = params
        self._cache = LoweringCache(home() / "simulated")
        self._known: dict[str, Answer] = {}

    @abstractmethod
    def check(self, device: DeviceSpec) -> None:
        """Refuse a device that the tool cannot model.

        Raises:
            DeviceError: It cannot; the message lists what is missing.
        """

    @abstractmethod
    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> dict[str, Any] | str:
        """What to ask the tool of a kernel with a feature row, or why nothing can be asked."""

    @abstractmethod
    def seconds(self, reply: Mapping[str, Any], job: Mapping[str, Any]) -> float:
        """Seconds of one execution from the tool's reply."""

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """Seconds of whole kernels from those of their products, shape ``(n,)``.

        ``max(product + vector work, memory traffic) + floor``, the last three as the roofline has
        them: what a fusion does besides its product is not in the tools' models.
        """
        _, vector = compute_seconds(row, device)
        moved = row[:, INDEX["bytes_in"]] + row[:, INDEX["bytes_out"]]
        return np.asarray(
            np.maximum(answered + vector, memory_seconds(moved, device)) + device.floor
        )

    @property
    def version(self) -> str:
        """Versions of the tool's packages.

        Raises:
            ModelError: One is not installed.
        """
        try:
            return " ".join(f"{name} {version(name)}" for name in self.packages)
        except PackageNotFoundError as error:
            raise ModelError(
                f"estimator {self.name!r} needs the package {error.name}, which is not installed",
                hint=f"pip install 'opcast[{self.extra}]'",
            ) from None

    def fit(self, dataset: Dataset) -> Self:
        """Nothing is learned."""
        return self

    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """What the tool says of each kernel: from the cache, or by running it.

        Raises:
            ModelError: The tool is not installed.
            DeviceError: It cannot model the device.
        """
        tool_version = self.version
        self.check(device)
        unique, index = distinct(kernels)
        found = self._answers(unique, device, tool_version)
        return [found[i] for i in index.tolist()]

    def _answers(
        self, kernels: Sequence[Kernel], device: DeviceSpec, tool_version: str
    ) -> list[Answer]:
        if not kernels:
            return []
        key_of = self._keys(device, tool_version)
        jobs: dict[str, dict[str, Any]] = {}
        answers: list[Answer | str] = []
        for kernel, row in zip(kernels, rows(kernels), strict=True):
            job = self.job(kernel, row, device)
            if isinstance(job, str):
                answers.append(Answer(0.0, job))
                continue
            key = key_of(kernel, job)
            answers.append(key)
            if not self._remembered(key):
                jobs[key] = job
        if jobs:
            self._run(jobs, device)
        return [self._known[own] if isinstance(own, str) else own for own in answers]

    def _keys(
        self, device: DeviceSpec, tool_version: str
    ) -> Callable[[Kernel, Mapping[str, Any]], str]:
        described = json.dumps(asdict(device), sort_keys=True, default=str)
        params = json.dumps(self.params, sort_keys=True)
        fixed = (str(ANSWER_VERSION), self.name, tool_version, params, described)
        return lambda kernel, job: LoweringCache.key(
            *fixed,
            kernel.hash,
            hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest(),
        )

    def _remembered(self, key: str) -> bool:
        """Whether there is an answer; one that only says that a shorter limit passed is none."""
        if key in self._known:
            return True
        entry = self._cache.get(key)
        if entry is None or entry.meta.get("hung_s", np.inf) < self.limit_s:
            return False
        self._known[key] = Answer(float(entry.meta["seconds"]), str(entry.meta["reason"]))
        return True

    def _run(self, jobs: Mapping[str, dict[str, Any]], device: DeviceSpec) -> None:
        with (
            ToolProcess(self.tool, self.limit_s) as process,
            shown(f"{self.name} for {device.name}", len(jobs), self.progress) as show,
        ):
            for done, (key, job) in enumerate(jobs.items(), start=1):
                reply = process.ask(job)
                answer, meta = Answer(0.0, str(reply.get("error", ""))), {}
                if answer.covered:
                    answer = Answer(self.seconds(reply, job))
                elif reply.get("hung"):
                    meta = {"hung_s": self.limit_s}
                self._known[key] = answer
                self._cache.put(key, "", {**asdict(answer), **meta})
                show(done)

    def reasons(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[str]:
        """Why each kernel takes its roofline; empty for those that the tool models."""
        return [answer.reason for answer in self.answers(kernels, device)]

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device.

        Raises:
            ModelError: The tool is not installed.
            DeviceError: It cannot model the device.
        """
        answers = self.answers(kernels, device)
        if not kernels:
            empty, names = np.zeros(0), np.zeros(0, object)
            return KernelPrediction(empty, empty, empty, names, names, np.zeros(0, bool))
        table = kernel_table(kernels, device)
        covered = np.array([answer.covered for answer in answers], bool)
        simulated = np.array([answer.seconds for answer in answers])
        own = np.maximum(self.latency(simulated, rows(kernels), device), SMALLEST)
        latency = np.where(covered, own, table.base_s)
        width = float(np.exp(UNCALIBRATED))
        return KernelPrediction(
            latency, latency / width, latency * width, table.bound,
            source=np.where(covered, self.source, "roofline").astype(object), in_domain=covered,
        )  # fmt: skip

    def notes(self, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
        """How much the tool models and why not the rest, for the prediction's notes."""
        own = [kernel for kernel in kernels if kernel.takes_time]
        reasons = Counter(filter(None, self.reasons(own, device)))
        covered = len(own) - sum(reasons.values())
        found = [f"{self.version} models {covered} of {len(own)} kernels; nothing is calibrated"]
        found += [f"{count} kernels take the roofline: {why}" for why, count in reasons.items()]
        return tuple(found)

    def save(self, path: Path) -> None:
        """Write the model folder: a manifest, no weights."""
        params = {"limit_s": self.limit_s, **self.params}
        write_folder(
            Path(path),
            {"estimator": self.name, "params": params, "units": {"latency": "s"}},
            {},
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a model folder.

        Raises:
            ModelError: The folder is missing, damaged, or of another estimator.
        """
        manifest = read_manifest(Path(path))
        if manifest.get("estimator") != cls.name:
            raise ModelError(
                f"holds a {manifest.get('estimator')!r} model, not {cls.name!r}", where=str(path)
            )
        return cls(**manifest.get("params", {}))
