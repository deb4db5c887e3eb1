"""The process that compiles and measures. If it dies, the profiler starts another one.

Requests and replies are JSON messages (:class:`opcast.common.child_process.Channel`). The process
ends together with its parent, since an orphan would disturb the measurements of the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.child_process import Channel, limit_memory
from ...common.types import JsonObject
from .runner import DEFAULT_CACHE_BYTES

if TYPE_CHECKING:
    from .measure import Prepared
    from .runner import Pulse

#: Fraction of the free memory that a program may need; the rest is for XLA, a second batch that is
#: compiled concurrently, and other processes (engineering choice).
_MEMORY_PART = 0.7
#: Heap that is faulted in before anything is measured: at most this fraction of the free memory,
#: and this many bytes.
_PREFAULT_PART, _PREFAULT_BYTES = 0.25, 4e9
#: Linux's advice to map all pages of a range at once (``MADV_POPULATE_WRITE`` of madvise(2), since
#: 5.14), which takes half the time of touching them one by one.
_POPULATE_WRITE = 23
#: XLA's flag with an empty list: no kind of command is recorded into CUDA graphs.
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


class Worker:
    """Answers requests until its input ends.

    Args:
        settings: ``memory`` (bytes that a program may need; 0 for a fraction of the free memory),
            ``overlap`` (compile the next batch during a measurement), ``pulse_s`` (the best
            readings of an earlier worker's pulse) and ``wall_s`` (seconds of whole executions).
        reply: Sends one reply.
    """

    def __init__(self, settings: JsonObject, reply: Callable[[dict[str, object]], None]) -> None:
        from . import host
        from .measure import Limits
        from .runner import WALL_SECONDS

        memory = float(settings.get("memory", 0)) or _MEMORY_PART * host.free_memory_bytes()
        cache = host.last_cache_bytes() or DEFAULT_CACHE_BYTES
        wall_s = float(settings.get("wall_s", WALL_SECONDS))
        self._limits = Limits(memory or math.inf, cache, wall_s)
        self._overlap = bool(settings.get("overlap"))
        self._reply = reply
        self._anchors: list[Prepared] = []
        self._best_pulse_s: dict[str, float] = settings.get("pulse_s", {})
        self._pool = ThreadPoolExecutor(1)

    @cached_property
    def _pulse(self) -> Pulse | None:
        from .runner import local_pulse

        return local_pulse(self._best_pulse_s)

    def serve(self, requests: Iterator[JsonObject]) -> None:
        """Answer every request; waiting batches are compiled ahead if ``overlap`` is set."""
        for request, prepared in self._ahead(requests):
            self._answer(request, prepared)

    def _ahead(
        self, requests: Iterator[JsonObject]
    ) -> Iterator[tuple[dict[str, object], Future[list[Prepared]] | None]]:
        if not self._overlap:
            yield from ((request, None) for request in requests)
            return
        waiting: queue.Queue[Any] = queue.Queue()

        def read() -> None:
            for request in requests:
                batch = request["do"] == "measure"
                future = self._pool.submit(self._prepare, request["items"]) if batch else None
                waiting.put((request, future))
            waiting.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(waiting.get, None)

    def _answer(self, request: JsonObject, prepared: Future[list[Prepared]] | None) -> None:
        from . import device_probe, host
        from .measure import reason_of
        from .plan import zoo_suite

        memory = {"memory_limit_bytes": self._limits.memory}
        answers: dict[str, Callable[[], dict[str, object]]] = {
            "hello": lambda: {"host": host.describe_host() | memory},
            "probe": lambda: {"device": asdict(device_probe.probe_device(request["seconds"]))},
            "ceilings": lambda: {"device": asdict(device_probe.probe_ceilings())},
            "suite": lambda: {"size": len(zoo_suite(request["name"]))},
            "anchors": self._measure_anchors,
            "measure": lambda: self._measure(request["items"], prepared),
        }
        try:
            reply = answers[request["do"]]()
        # Whatever a program causes must reach the parent as an answer, or it would wait.
        except Exception as error:
            reply = {"error": reason_of(error)}
        self._reply({"done": request["do"], **reply})

    def _measure_anchors(self) -> dict[str, object]:
        from .anchors import anchor_items, read_anchors
        from .measure import prepare

        # Compiled once per process, so that checks are cheap.
        if not self._anchors:
            self._anchors = [prepare(item, self._limits) for item in anchor_items()]
        values = read_anchors(self._anchors, self._limits, self._pulse)
        return {"values_us": values, "pulse_s": self._pulse.best_s if self._pulse else {}}

    def _prepare(self, items: list[JsonObject]) -> list[Prepared]:
        """Compile a batch; programs that fail are reported here and left out."""
        from .measure import prepare, reason_of
        from .plan import Item

        prepared = []
        for data in items:
            item = Item(**data)
            start = time.perf_counter()
            try:
                prepared.append(prepare(item, self._limits))
            except Exception as error:
                self._fail(item.key, reason_of(error), time.perf_counter() - start)
        return prepared

    def _measure(
        self, items: list[dict[str, object]], prepared: Future[list[Prepared]] | None
    ) -> dict[str, object]:
        from .measure import measure, reason_of, rows_of

        programs = prepared.result() if prepared else self._prepare(items)
        try:
            measure(programs, self._limits, pulse=self._pulse)
        except Exception as error:
            if len(items) > 1:
                return {"error": reason_of(error)}  # the profiler asks for each one alone
            for program in programs:
                self._fail(program.item.key, reason_of(error))
            return {}
        for program in programs:
            try:
                rows, missing = rows_of(program)
            except Exception as error:
                self._fail(program.item.key, reason_of(error))
                continue
            if rows:
                reply = {"key": program.item.key, "rows": rows, "missing": missing}
                self._reply(reply | {"disturbed": program.disturbed})
            else:
                self._fail(program.item.key, "no kernel of it appears in the trace")
        return {}

    def _fail(self, key: str, reason: str, seconds: float = 0.0) -> None:
        self._reply({"key": key, "failed": reason, "seconds": round(seconds, 3)})


def _be_first_out_of_memory(limit: float) -> None:
    """Let Linux kill this process rather than others, and limit its memory."""
    # 1000 is the highest score: the out-of-memory killer's first choice.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # The limit counts a program's own arrays; XLA's temporaries, code and heap come on top (half as
    # much again and 4 GB: engineering estimate).
    limit_memory(int(limit * 1.5 + 4e9) if limit else 0)


def _prefault_heap(limit: float) -> None:
    """Touch memory and free it again, so that later allocations find their pages mapped.

    With the allocator's settings (``ALLOCATOR_ENV``) freed memory stays with the process, in a
    single arena. A first touch costs about a microsecond per 4 KB, up to ten times the duration of
    the kernel that causes it; long-running programs have this behind them.
    """
    from .host import free_memory_bytes

    size = int(min(_PREFAULT_PART * free_memory_bytes(), _PREFAULT_BYTES, limit or math.inf))
    # Through malloc itself, the allocator behind XLA's buffers on a CPU.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        block = libc.malloc(size)
        if block:
            # In whole pages, as the call requires; less than one is left out at either end.
            begin, end = -(-block // PAGESIZE) * PAGESIZE, (block + size) // PAGESIZE * PAGESIZE
            libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            if end <= begin or libc.madvise(begin, end - begin, _POPULATE_WRITE):
                ctypes.memset(block, 1, size)
            libc.free(block)


def has_nvidia_gpu() -> bool:
    """Whether this host seems to have an NVIDIA GPU, without initialising JAX."""
    # JAX would initialise a client in the parent, which takes memory from the worker.
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def main() -> None:
    """Run as ``python -m opcast.datagen.profile.worker SETTINGS``."""
    channel = Channel()
    settings = json.loads(sys.argv[1])
    if has_nvidia_gpu():
        # CUDA graphs hide single kernels from the trace. XLA reads flags once, when it starts.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_COMMAND_BUFFERS}".strip()
    else:
        limit = float(settings.get("memory", 0))
        _be_first_out_of_memory(limit)
        _prefault_heap(limit)

    def reply(message: dict[str, object]) -> None:
        channel.send(json.dumps(message).encode())

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        Worker(settings, reply).serve(map(json.loads, channel))


if __name__ == "__main__":
    main()
