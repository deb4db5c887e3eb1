"""Runs a tool's jobs in a worker process, each within a time limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType

from ...common.worker_process import WorkerEnded, WorkerProcess, WorkerTimeout, module_command

#: Seconds that a tool may take to be imported, on top of the limit of its first job. Engineering
#: estimate for a cold disk.
START_S = 60.0
#: JAX must not load compilers of absent devices there, nor Matplotlib look for a display.
_SET = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "2"}


class ToolProcess:
    """A tool's process, started on the first job and again after it hung or died.

    Args:
        tool: Module of this package with a function ``run(job) -> reply``.
        limit_s: Seconds of one job.
    """

    def __init__(self, tool: str, limit_s: float) -> None:
        self._tool = tool
        self._limit_s = limit_s
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> ToolProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
