"""Run tasks in processes that may crash without harm: the counterpart of ``fork_server.py``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import socket
from collections.abc import AsyncIterator, Mapping

from ..common.errors import OpcastError
from ..common.types import JsonObject
from ..common.worker_process import THREAD_VARIABLES, WorkerProcess, module_command
from .cache import LruCache
from .errors import RequestError
from .fork_server import READY, REPLY, TASK, Reply, ended
from .metrics import REQUEST_ID
from .settings import ServeError, ServerSettings

#: Seconds that loading the models may take on a busy machine with cold disks. Engineering estimate.
_START_S = 300.0
#: Share of a request's time limit that its process gets; the rest is for sending the answer.
#: Engineering estimate.
_TIME_SHARE = 0.95
#: Bytes of answers that are remembered: a program's has some 100 kB. Engineering estimate.
_REMEMBERED = 256 * 2**20
#: Weight of the latest task in the mean time of a task, from which ``Retry-After`` follows.
#: Engineering estimate.
_LATEST = 0.2


class _Died(Exception):
    """The process of a task ended without an answer."""

    def __init__(self, reason: OpcastError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class Sandbox:
    """Runs each task in a process of its own, a few at a time, and remembers the answers.

    Args:
        settings: Models and limits.

    Attributes:
        cache: Answers by digest of the task and its payload.
        crashes: Tasks whose process died.
        starts: Number of times that the fork server was started.
        waiting: Tasks that wait for a worker.
        running: Tasks at work.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        # Where no kernel is remembered, no program is either.
        self.cache = LruCache(_REMEMBERED if settings.cache_entries else 0)
        self.crashes = 0
        self.starts = 0
        self.waiting = 0
        self.running = 0
        # Of a task, in seconds; the first guess is that of a small program.
        self._mean_s = 1.0
        self._free = asyncio.Semaphore(settings.workers)
        # Two requests that both find the fork server dead must not both start one.
        self._starting = asyncio.Lock()
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Start the fork server, unless it runs.

        Raises:
            ServeError: The fork server does not start; its standard error has the reason.
        """
        async with self._starting:
            if self._process is not None and self._process.status() is None:
                return
            self.close()
            ours, theirs = socket.socketpair()
            # Our copy of their end is closed after the start; else the death of the child would go
            # unnoticed.
            with theirs:
                self._process = self._spawn(theirs)
            ours.setblocking(False)
            self._control = ours
            self.starts += 1
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_START_S):
                    if await loop.sock_recv(ours, len(READY)) == READY:
                        # ``send_fds`` is a blocking call without an asyncio form; it sends one
                        # byte.
                        ours.setblocking(True)
                        return
            self.close()
            raise ServeError("the process for programs does not start", hint="see the log")

    def _spawn(self, control: socket.socket) -> WorkerProcess:
        memory_bytes = str(self.settings.memory_bytes)
        # The limit applies to the children: the fork server itself holds every model.
        return WorkerProcess(
            module_command(
                f"{__package__}.fork_server",
                str(control.fileno()),
                memory_bytes,
                *self.settings.models,
            ),
            variables=dict.fromkeys(THREAD_VARIABLES, "1"),
            messages=False,
            keep_errors=False,
            pass_fds=[control.fileno()],
        )

    async def run(self, task: Mapping[str, object], payload: bytes) -> Reply:
        """Status and JSON of a task.

        Args:
            task: Task for :func:`~opcast.server.fork_server.answer`, without its limits.
            payload: The program, or JSON.

        Raises:
            RequestError: Too many wait already, or it ran out of time.
            OpcastError: The task's process died.
        """
        head = json.dumps(task, sort_keys=True).encode()
        key = hashlib.sha256(len(head).to_bytes(8) + head + payload).digest()
        (known,) = self.cache.get_many([key])
        if isinstance(known, bytes):
            return 200, known
        async with self._worker():
            status, body = await self._twice(dict(task), payload)
        if status == 200:
            self.cache.put(key, body, len(body))
        return status, body

    @property
    def full(self) -> bool:
        """Whether a task would be refused now."""
        return self._free.locked() and self.waiting >= self.settings.waiting

    def busy(self) -> RequestError:
        """Make the refusal of a task; ``Retry-After`` is when those that wait will be done."""
        rounds = (self.waiting + 1) / self.settings.workers
        retry_s = math.ceil(min(rounds * self._mean_s, self.settings.timeout_s))
        what = "too many programs are waiting"
        return RequestError(503, what, hint="come again", retry_s=retry_s)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[None]:
        """One of the workers, once it is free.

        Raises:
            RequestError: Too many wait already.
        """
        # Refused at once: a queue that cannot be served within the time limit only wastes memory.
        if self.full:
            raise self.busy()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        clock = asyncio.get_running_loop().time
        started = clock()
        self.running += 1
        try:
            yield
            # Of tasks that ended: one that was cancelled says nothing about the next.
            self._mean_s += _LATEST * (clock() - started - self._mean_s)
        finally:
            self.running -= 1
            self._free.release()

    async def _twice(self, task: JsonObject, payload: bytes) -> Reply:
        """The reply of a task, which is tried again if its process died.

        A process may have been ended for another's fault: with the fork server, or by the system
        that was short of memory. One that dies twice does so by its own.
        """
        try:
            return await self._one(task, payload)
        except _Died:
            self.crashes += 1
        try:
            return await self._one(task, payload)
        except _Died as death:
            self.crashes += 1
            raise death.reason from None

    async def _one(self, task: JsonObject, payload: bytes) -> Reply:
        await self.start()
        # Set after waiting for a worker: the guard's limit counts from the request's arrival, this
        # from here.
        task["timeout_s"] = _TIME_SHARE * self.settings.timeout_s
        task["memory_bytes"] = self.settings.memory_bytes
        task["allow_compile"] = self.settings.allow_compile
        task["allow_torch"] = self.settings.allow_torch
        task["request"] = REQUEST_ID.get()
        ours, theirs = socket.socketpair()
        # Closed when the request is cancelled, too, which ends the child.
        with ours:
            with theirs:
                self._hand_over(theirs)
            loop = asyncio.get_running_loop()
            started = loop.time()
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                head = json.dumps(task).encode()
                writer.write(TASK.pack(len(head), len(payload)) + head + payload)
                await writer.drain()
                status, length = REPLY.unpack(await reader.readexactly(REPLY.size))
                return status, await reader.readexactly(length)
            except (OSError, EOFError):
                # The timer's signal and a crash look alike from here, an end of file; the clock
                # tells them apart (with 50 ms of tolerance for scheduling).
                if loop.time() - started >= task["timeout_s"] - 0.05:
                    raise out_of_time(self.settings.timeout_s) from None
                raise _Died(self._reason(task)) from None
            finally:
                writer.transport.abort()

    def _reason(self, task: JsonObject) -> OpcastError:
        """Why a task has no answer: by its own process, or because all of them ended."""
        if self._process is not None and self._process.status() is None:
            return ended(task)
        return _gone()

    def _hand_over(self, task: socket.socket) -> None:
        assert self._control is not None
        try:
            # The byte carries the descriptor: ancillary data needs at least one byte of payload.
            socket.send_fds(self._control, [b"1"], [task.fileno()])
        except OSError:
            raise _Died(_gone()) from None

    def close(self) -> None:
        """End the fork server and all the tasks that it forked."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.stop()
            self._process = None


def _gone() -> RequestError:
    return RequestError(503, "the process for programs died", hint="come again")


def out_of_time(limit_s: float) -> RequestError:
    """Make the error of a request that took too long."""
    return RequestError(
        504,
        f"it takes longer than {limit_s:g} s",
        hint="ask for less, or start the server with more time: opcast serve --timeout",
    )
