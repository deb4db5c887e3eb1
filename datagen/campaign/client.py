"""The campaign's side of its workers: one at a time, replaced when it dies, hangs or fails."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...common.errors import ProfileError
from ...common.types import JsonObject
from ..profile.worker_client import WorkerClient, WorkerDied
from .plan import Case

#: Framework of each kind of worker.
WORKERS: Mapping[str, str] = {"xla": "jax", "torch": "torch"}
#: Seconds to start a worker, import a framework and initialise the device.
START_S = 180.0
#: Seconds that a killed worker gets to exit; one that is blocked in a driver may not.
_STOP_S = 10.0
#: Errors after which a process can run nothing more: the device's context is lost.
_FAULT = re.compile(
    r"CUDA_ERROR|cudaError|CUDA error|HIP error|hipError|illegal memory|device-side assert|"
    r"DEVICE_LOST|uncorrectable|unspecified launch failure|Xid",
    re.IGNORECASE,
)
#: Those of them that report a lack of memory, after which the process remains usable.
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)


@dataclass
class Found:
    """Result of a block of cases.

    Attributes:
        rows: Rows of all cases.
        done: Keys of measured cases.
        failed: Reasons by key.
        unfinished: Keys of cases lost to the end of the time or to a lost driver.
    """

    rows: list[JsonObject] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)


def _broken(reason: str) -> bool:
    """Whether an error leaves the device's context broken."""
    return bool(_FAULT.search(reason)) and not _MEMORY.search(reason)


class Workers:
    """Starts the worker that a case needs, and ends the previous one.

    Args:
        platform: ``cpu`` to hide accelerators; otherwise what the frameworks find.
        end: End of the campaign, on the clock of :func:`time.monotonic`.
        module: The workers' module.

    Attributes:
        starts: Number of workers that were started.
        start_s: Seconds that the last one took until it could measure.
        stuck: Whether one could not be ended.
        measured: Keys that the current worker has measured.
    """

    def __init__(self, platform: str, end: float, module: str = f"{__package__}.worker") -> None:
        self._on_cpu = platform == "cpu"
        self._variables = (
            {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
            if self._on_cpu
            else {}
        )
        self._end = end
        self._kind = ""
        self._client: WorkerClient | None = None
        self.measured: set[str] = set()
        self._module = module
        self._anchored = False
        self.starts = 0
        self.start_s = 0.0
        self.stuck = False

    @property
    def kind(self) -> str:
        """Kind of the current worker; empty if there is none."""
        return self._kind if self._client is not None else ""

    def measure_on(self, platform: str) -> None:
        """Set the platform once it is found; a worker with the wrong heap settings is ended."""
        if (platform == "cpu") != self._on_cpu:
            self._on_cpu = platform == "cpu"
            self.stop()

    @property
    def left_s(self) -> float:
        """Seconds until the end, at least a little."""
        return max(0.1, self._end - time.monotonic())

    def hello(self, kind: str) -> JsonObject:
        """The host as a worker of a kind sees it; the worker is kept for the next measurements.

        Raises:
            ProfileError: It does not start, or lacks its framework.
        """
        found: JsonObject = self._start(kind).ask("hello")["host"]
        return found

    def ready(self, kind: str, again: Sequence[str]) -> list[JsonObject]:
        """Start a worker of a kind if needed; returns its anchors if it is new.

        Args:
            kind: A key of :data:`WORKERS`.
            again: Keys that a different process must measure again.

        Raises:
            ProfileError: It does not start, or the device does not answer.
        """
        client = self._client
        if client is None or self._kind != kind or self.measured & {*again}:
            client = self._start(kind)
        if self._anchored:
            return []
        begin = time.monotonic()
        row = client.ask("anchors")["row"]
        self._anchored, self.start_s = True, time.monotonic() - begin
        return [{**row, "worker": kind, "key": f"anchors-{kind}"}]

    def _start(self, kind: str) -> WorkerClient:
        self.stop()
        self._client = WorkerClient(
            {"framework": WORKERS[kind]},
            min(START_S, self.left_s),
            module=self._module,
            variables=self._variables,
            heap=self._on_cpu,
        )
        self._kind, self._anchored = kind, False
        self.starts += 1
        return self._client

    def measure(self, block: Sequence[Case]) -> Found:
        """Measure a block with the current worker; if that dies, each case is tried alone."""
        found = Found()
        trouble = ""
        try:
            for reply in self._replies(block):
                if "rows" in reply:
                    found.rows += reply["rows"]
                    found.done.append(reply["key"])
                elif "failed" in reply:
                    found.failed[reply["key"]] = str(reply["failed"])
                trouble = str(reply.get("error", trouble))
                if _broken(found.failed.get(reply.get("key", ""), "")):
                    self.stop()  # later cases in this process would fail because of it
                    break
        except WorkerDied as death:
            trouble = death.what
            self.stop()
        known = {*found.done, *found.failed}
        left = [case for case in block if case.key not in known]
        if not left:
            if self._client is not None:
                self.measured.update(known)
            return found
        self.stop()
        if self.left_s < 1.0:
            found.unfinished += [case.key for case in left]
        elif len(block) == 1:
            found.failed[left[0].key] = trouble or "the measuring process gave no result"
        else:
            for case in left:
                self._alone(case, found)
        return found

    def _alone(self, case: Case, found: Found) -> None:
        """Try a single case of a block whose worker died."""
        if self.left_s < 1.0:
            found.unfinished.append(case.key)
            return
        try:
            found.rows += self.ready(case.worker, ())
        except ProfileError:
            found.unfinished.append(case.key)
            return
        own = self.measure([case])
        found.rows += own.rows
        found.done += own.done
        found.failed |= own.failed
        found.unfinished += own.unfinished

    def _replies(self, block: Sequence[Case]) -> Iterator[JsonObject]:
        assert self._client is not None
        limit = max(case.timeout_s for case in block)
        self._client.timeout_s = min(limit, self.left_s)
        cases = [{"key": case.key, "spec": dict(case.spec)} for case in block]
        self._client.send("run", kind=block[0].kind, cases=cases)
        for reply in self._client.replies():
            yield reply
            self._client.timeout_s = min(limit, self.left_s)

    def stop(self) -> None:
        """End the worker, without waiting for one that is blocked in a driver."""
        client, self._client = self._client, None
        self.measured = set()
        if client is None:
            return
        thread = threading.Thread(target=client.stop, daemon=True)
        thread.start()
        thread.join(_STOP_S)
        self.stuck = self.stuck or thread.is_alive()
