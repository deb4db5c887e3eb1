"""Run tasks in processes that may crash; the server's side of ``fork_server.py``."""

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

#: Time limit in seconds for loading the models, on a busy machine with cold disks. Engineering
#: estimate.
_START_S = 300.0
#: Fraction of a request's time limit for its process; the rest is for sending the answer.
#: Engineering estimate.
_TIME_SHARE = 0.95
#: Size of the answer cache in bytes; the answer for a program has about 100 kB. Engineering
#: estimate.
_REMEMBERED = 256 * 2**20
#: Weight of the latest task in the exponential mean of task times, used for ``Retry-After``.
#: Engineering estimate.
_LATEST = 0.2


class _Died(Exception):
    """The process of a task died without an answer."""

    def __init__(self, reason: OpcastError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class Sandbox:
    """Runs each task in a separate process, a few at a time, and caches the answers.

    Args:
        settings: Models and limits.

    Attributes:
        cache: Answers by digest of the task and its payload.
        crashes: Number of processes that died.
        starts: Number of times that the fork server was started.
        waiting: Number of tasks that wait for a worker.
        running: Number of running tasks.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        # ``--cache 0`` disables both this cache and that of kernels.
        self.cache = LruCache(_REMEMBERED if settings.cache_entries else 0)
        self.crashes = 0
        self.starts = 0
        self.waiting = 0
        self.running = 0
        # Mean time of a task in seconds, initially that of a small program.
        self._mean_s = 1.0
        self._free = asyncio.Semaphore(settings.workers)
        # Prevents two requests from both restarting a dead fork server.
        self._starting = asyncio.Lock()
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Start the fork server unless it is running.

        Raises:
            ServeError: The fork server does not start; the reason is on its standard error.
        """
        async with self._starting:
            if self._process is not None and self._process.status() is None:
                return
            self.close()
            ours, theirs = socket.socketpair()
            # Close our copy of the child's end, so that the child's death closes the connection.
            with theirs:
                self._process = self._spawn(theirs)
            ours.setblocking(False)
            self._control = ours
            self.starts += 1
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_START_S):
                    if await loop.sock_recv(ours, len(READY)) == READY:
                        # For ``send_fds``, which is synchronous and sends only one byte.
                        ours.setblocking(True)
                        return
            self.close()
            raise ServeError("the process for programs does not start", hint="see the log")

    def _spawn(self, control: socket.socket) -> WorkerProcess:
        memory_bytes = str(self.settings.memory_bytes)
        # The limit applies to the children, not to the fork server, which holds every model.
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
        """Run a task, or look up its answer; return its status and JSON.

        Args:
            task: Task for :func:`~opcast.server.fork_server.answer`, without its limits.
            payload: The program, or JSON.

        Raises:
            RequestError: Too many tasks are waiting, or the task ran out of time.
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
        """Whether a new task would be refused."""
        return self._free.locked() and self.waiting >= self.settings.waiting

    def busy(self) -> RequestError:
        """Make the refusal of a task; ``Retry-After`` is the estimated wait of the queue."""
        rounds = (self.waiting + 1) / self.settings.workers
        retry_s = math.ceil(min(rounds * self._mean_s, self.settings.timeout_s))
        what = "too many programs are waiting"
        return RequestError(503, what, hint="try again later", retry_s=retry_s)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[None]:
        """Wait for a worker and occupy it.

        Raises:
            RequestError: Too many tasks are waiting.
        """
        # Refused at once, because a task that cannot finish in time only wastes memory.
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
            # Only after completion: the time of a cancelled task is meaningless.
            self._mean_s += _LATEST * (clock() - started - self._mean_s)
        finally:
            self.running -= 1
            self._free.release()

    async def _twice(self, task: JsonObject, payload: bytes) -> Reply:
        """Run a task, and run it again if its process died.

        The first process may have died for external reasons: with the fork server, or because the
        system was short of memory.
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
        # From here on; the guard's limit includes the time of waiting for a worker.
        task["timeout_s"] = _TIME_SHARE * self.settings.timeout_s
        task["memory_bytes"] = self.settings.memory_bytes
        task["allow_compile"] = self.settings.allow_compile
        task["allow_torch"] = self.settings.allow_torch
        task["request"] = REQUEST_ID.get()
        ours, theirs = socket.socketpair()
        # Closing it, also when the request is cancelled, ends the child.
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
                # A timeout and a crash both close the connection; the clock distinguishes them
                # (with 50 ms of tolerance for scheduling).
                if loop.time() - started >= task["timeout_s"] - 0.05:
                    raise out_of_time(self.settings.timeout_s) from None
                raise _Died(self._reason(task)) from None
            finally:
                writer.transport.abort()

    def _reason(self, task: JsonObject) -> OpcastError:
        """Reason for a missing answer: the task's process died, or the fork server did."""
        if self._process is not None and self._process.status() is None:
            return ended(task)
        return _gone()

    def _hand_over(self, task: socket.socket) -> None:
        assert self._control is not None
        try:
            # Ancillary data, here the descriptor, needs at least one byte of payload.
            socket.send_fds(self._control, [b"1"], [task.fileno()])
        except OSError:
            raise _Died(_gone()) from None

    def close(self) -> None:
        """Stop the fork server and all its tasks."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.stop()
            self._process = None


def _gone() -> RequestError:
    return RequestError(503, "the process for programs died", hint="try again later")


def out_of_time(limit_s: float) -> RequestError:
    """Make the error for a request that took too long."""
    return RequestError(
        504,
        f"it takes longer than {limit_s:g} s",
        hint="send a smaller request, or start the server with more time: opcast serve --timeout",
    )
