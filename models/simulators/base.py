"""Base class of the simulators: coverage of kernels, the tool's process, cached answers."""

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

from ...common.errors import ModelError
from ...common.paths import home
from ...common.plugins import extra_hint
from ...common.progress import waiting
from ...common.types import JsonMapping, JsonObject
from ...common.worker_process import WorkerEnded, WorkerProcess, WorkerTimeout, module_command
from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.lowering.cache import LoweringCache
from ...features.table.columns import INDEX
from ...features.table.roofline import compute_seconds, memory_seconds
from ...features.table.row import rows
from ..core.base import KernelPrediction, distinct
from ..core.kernel_table import SMALLEST, kernel_table
from ..core.store import check_estimator, read_manifest, write_folder
from ..trust.calibrator import UNCALIBRATED

#: Seconds for importing a tool, in addition to the limit of its first job. Engineering estimate for
#: a cold disk.
START_S = 60.0
#: Keeps JAX from loading compilers of absent devices, and Matplotlib from opening a display.
_SET = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "2"}
#: Version of the drivers, part of the key of cached answers. Increase it when requests to a tool or
#: the interpretation of its replies change.
ANSWER_VERSION = 1
#: A request to a tool and its reply, as JSON objects; each tool documents its keys.
Job = JsonObject
Reply = JsonMapping


class ToolProcess:
    """A tool's process, started on the first job and restarted after it hung or died.

    Args:
        tool: Module of this package with a function ``run(job) -> reply``.
        limit_s: Time limit of one job in seconds.
    """

    def __init__(self, tool: str, limit_s: float) -> None:
        self._tool = tool
        self._limit_s = limit_s
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> ToolProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, job: Mapping[str, object]) -> dict[str, object]:
        """The tool's reply, or ``{"error": …}``; with ``"hung": True`` if the limit passed."""
        limit_s = self._limit_s + (START_S if self._worker is None else 0.0)
        worker = self._worker = self._worker or self._started()
        try:
            worker.send(json.dumps(job).encode(), limit_s)
            return dict(json.loads(worker.receive(limit_s)))
        except WorkerTimeout:
            self.stop()
            return {"error": f"no answer within {self._limit_s:g} s", "hung": True}
        except WorkerEnded:
            worker.ending()
            last = worker.last_error(200)
            self.stop()
            return {"error": f"the tool's process died{': ' if last else ''}{last}"}

    def stop(self) -> None:
        """End the process and what it started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _started(self) -> WorkerProcess:
        command = module_command(f"{__package__}.worker", self._tool)
        return WorkerProcess(command, variables=_SET)


@dataclass(frozen=True)
class Answer:
    """A tool's answer for a kernel.

    Attributes:
        seconds: Time of the modelled part of the kernel; 0 without one.
        reason: Why the kernel is not modelled; empty if it is.
    """

    seconds: float
    reason: str = ""

    @property
    def covered(self) -> bool:
        """Whether the tool models the kernel."""
        return not self.reason


class AnsweringEstimator(ABC):
    """An estimator whose answers come from another tool; nothing is learned.

    A kernel without an answer takes ``roofline + floor``, marked ``roofline`` and out of domain;
    :meth:`reasons` has the reason.

    Args:
        params: Keywords of the constructor; saved with the estimator.
    """

    name: str = ""
    #: ``source`` of its predictions.
    source: ClassVar[str] = ""

    def __init__(self, **params: object) -> None:
        self.params = params

    @property
    @abstractmethod
    def version(self) -> str:
        """Name and version of the tool."""

    @abstractmethod
    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The tool's answer for each kernel.

        Raises:
            ModelError: The tool is not installed.
            DeviceError: The tool cannot model the device.
        """

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """Seconds of whole kernels, shape ``(n,)``; by default the answers themselves.

        Args:
            answered: Seconds of the answers.
            row: Feature rows of the kernels.
            device: Device they run on.
        """
        return answered

    def fit(self, dataset: Dataset) -> Self:
        """Return the unchanged estimator: nothing is learned."""
        return self

    def reasons(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[str]:
        """Why each kernel takes its roofline; empty for modelled kernels."""
        return [answer.reason for answer in self.answers(kernels, device)]

    def predict(self, kernels: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        """Predict every kernel on the device.

        Raises:
            OpcastError: As :meth:`answers`.
        """
        answers = self.answers(kernels, device)
        if not kernels:
            return KernelPrediction.empty(0)
        table = kernel_table(kernels, device)
        covered = np.array([answer.covered for answer in answers], bool)
        simulated = np.array([answer.seconds for answer in answers])
        own = np.maximum(self.latency(simulated, rows(kernels), device), SMALLEST)
        latency = np.where(covered, own, table.roofline_s)
        # No tool is calibrated against measurements: the interval of an uncalibrated roofline.
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
        """Notes on the number of modelled kernels, and reasons for the others."""
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
        """Keywords that construct the same estimator."""
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


class SimulatorEstimator(AnsweringEstimator):
    """An estimator whose answers come from a third-party tool in a separate process.

    Answers are cached in the user's cache folder, by kernel, device, parameters and tool version.

    Args:
        limit_s: Time limit of one kernel in seconds.
        progress: Whether to show progress, if standard error is a terminal.
        params: Parameters of the tool; part of the key of an answer.
    """

    #: Extra of ``pyproject.toml`` that installs the tool, and packages whose versions are part of
    #: the key of an answer.
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, limit_s: float = 60.0, progress: bool = True, **params: Any) -> None:
        super().__init__(**params)
        self.limit_s = float(limit_s)
        self.progress = progress
        self._cache = LoweringCache(home() / "simulated")
        self._known: dict[str, Answer] = {}

    @abstractmethod
    def check(self, device: DeviceSpec) -> None:
        """Reject a device that the tool cannot model.

        Raises:
            DeviceError: It cannot; the message lists what is missing.
        """

    @abstractmethod
    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """Request to the tool for a kernel with its feature row, or why there is none."""

    @abstractmethod
    def seconds(self, reply: Reply, job: Job) -> float:
        """Seconds of one execution from the tool's reply."""

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """Seconds of whole kernels from the seconds of their products, shape ``(n,)``.

        ``max(product + vector work, memory traffic) + floor``, the last three as in the roofline:
        the tools do not model the other work of a fusion.
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
                hint=extra_hint(self.extra),
            ) from None

    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The tool's answer for each kernel, from the cache or by running it.

        Raises:
            ModelError: The tool is not installed.
            DeviceError: The tool cannot model the device.
        """
        tool_version = self.version
        self.check(device)
        unique, index = distinct(kernels)
        unique_answers = self._answers(unique, device, tool_version)
        return [unique_answers[i] for i in index.tolist()]

    def _answers(
        self, kernels: Sequence[Kernel], device: DeviceSpec, tool_version: str
    ) -> list[Answer]:
        if not kernels:
            return []
        key_of = self._keys(device, tool_version)
        jobs: dict[str, Job] = {}
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

    def _keys(self, device: DeviceSpec, tool_version: str) -> Callable[[Kernel, Job], str]:
        described = json.dumps(asdict(device), sort_keys=True, default=str)
        params = json.dumps(self.params, sort_keys=True)
        # Includes the whole description of the device, since a user's file may change any figure.
        fixed = (str(ANSWER_VERSION), self.name, tool_version, params, described)
        return lambda kernel, job: LoweringCache.key(
            *fixed,
            kernel.hash,
            hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest(),
        )

    def _remembered(self, key: str) -> bool:
        """Whether an answer is cached; a timeout under a shorter limit does not count."""
        if key in self._known:
            return True
        entry = self._cache.get(key)
        if entry is None or entry.meta.get("hung_s", np.inf) < self.limit_s:
            return False
        self._known[key] = Answer(float(entry.meta["seconds"]), str(entry.meta["reason"]))
        return True

    def _run(self, jobs: Mapping[str, Job], device: DeviceSpec) -> None:
        with (
            ToolProcess(self.name, self.limit_s) as process,
            waiting(f"{self.name} for {device.name}", len(jobs), self.progress) as show,
        ):
            for done, (key, job) in enumerate(jobs.items(), start=1):
                reply = process.ask(job)
                answer, meta = Answer(0.0, str(reply.get("error", ""))), {}
                if answer.covered:
                    answer = Answer(self.seconds(reply, job))
                # Stored with its limit, so that it is only retried with a longer one.
                elif reply.get("hung"):
                    meta = {"hung_s": self.limit_s}
                self._known[key] = answer
                self._cache.put(key, "", {**asdict(answer), **meta})
                show(done)

    @property
    def settings(self) -> dict[str, object]:
        """Keywords that construct the same estimator."""
        return {"limit_s": self.limit_s, **self.params}
