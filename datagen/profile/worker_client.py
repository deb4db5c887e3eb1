"""The profiler's side of the worker process: starts it, queries it, and replaces it if it dies."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...common.errors import ProfileError
from ...common.types import JsonObject
from ...common.worker_process import WorkerEnded, WorkerProcess, WorkerTimeout, module_command

if TYPE_CHECKING:
    from .plan import Item

#: Seconds without any reply after which a worker counts as stuck: the slowest compilations of large
#: training steps take minutes (engineering choice).
REPLY_TIMEOUT = 600.0
#: Settings of glibc's allocator (mallopt(3)) under which freed memory stays with the process, in
#: one arena: no mmap for large blocks, no trimming below 100 GB, growth by 64 MiB. With the
#: defaults results are often in fresh pages, whose faults take up to ten times as long as the
#: kernel itself, depending on earlier allocations of the process. The worker maps the pages of its
#: heap before it measures.
ALLOCATOR_ENV = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


class WorkerDied(ProfileError):
    """The worker process ended or got stuck; the reason states how."""


class WorkerClient:
    """One worker process.

    Args:
        settings: See :class:`opcast.datagen.profile.worker.Worker`.
        timeout_s: Seconds without any reply after which the worker counts as stuck.
        module: The worker's module, which takes the settings as its argument.
        variables: Environment variables to set.
        heap: Whether it measures this host's processors, whose times depend on the allocator.

    Attributes:
        timeout_s: As above; may be changed between requests.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        timeout_s: float = REPLY_TIMEOUT,
        *,
        module: str = f"{__package__}.worker",
        variables: Mapping[str, str] | None = None,
        heap: bool = True,
    ) -> None:
        self.timeout_s = timeout_s
        # Settings of the user take precedence. One arena for all threads would slow compilers down.
        allocator = {k: v for k, v in ALLOCATOR_ENV.items() if heap and k not in os.environ}
        self._worker = WorkerProcess(
            module_command(module, json.dumps(settings)),
            variables=allocator | dict(variables or {}),
        )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    def send(self, do: str, **values: object) -> None:
        """Send a request; its replies come from :meth:`replies`.

        Raises:
            WorkerDied: The process is gone, or does not read the request.
        """
        with self._told():
            self._worker.send(json.dumps({"do": do, **values}).encode(), self.timeout_s)

    def replies(self) -> Iterator[JsonObject]:
        """Yield the replies to the oldest open request; the last one has ``done``.

        Raises:
            WorkerDied: The process ended or gave no reply for too long.
        """
        while True:
            with self._told():
                reply: dict[str, object] = json.loads(self._worker.receive(self.timeout_s))
            yield reply
            if "done" in reply:
                return

    def ask(self, do: str, **values: object) -> JsonObject:
        """Send a request and return its last reply.

        Raises:
            ProfileError: The worker reports an error.
            WorkerDied: The process ended or gave no reply for too long.
        """
        self.send(do, **values)
        *_, last = self.replies()
        if "error" in last:
            raise ProfileError(f"the measuring process cannot answer {do!r}: {last['error']}")
        return last

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Convert the end or hang of a worker to :class:`WorkerDied`, with its last line."""
        try:
            yield
        except WorkerTimeout:
            self.stop()
            raise WorkerDied(f"no reply for {self.timeout_s:.0f} s") from None
        except WorkerEnded:
            _, how = self._worker.ending()
            last = self._worker.last_error()
            why = f": {last}" if last else ""
            raise WorkerDied(f"the measuring process died ({how}){why}") from None

    def stop(self) -> None:
        """End the process."""
        self._worker.stop()


class Measurer:
    """A worker that is replaced when it dies, and the programs that killed it.

    Args:
        settings: See :class:`WorkerClient`.
        timeout_s: See :class:`WorkerClient`.
    """

    def __init__(self, settings: JsonObject, timeout_s: float = REPLY_TIMEOUT) -> None:
        self.settings = settings
        self.starts = 0
        self._timeout = timeout_s
        self._client: WorkerClient | None = None
        self._early: dict[str, JsonObject] = {}
        self._sent: list[str] = []

    @property
    def client(self) -> WorkerClient:
        """The worker, started if none is running."""
        if self._client is None:
            self._client = WorkerClient(self.settings, timeout_s=self._timeout)
            self.starts += 1
        return self._client

    def measure(self, batch: list[Item], upcoming: list[Item] | None = None) -> list[JsonObject]:
        """Measure a batch; if the worker dies or fails, each program is tried alone.

        Args:
            batch: Programs to measure.
            upcoming: The batch of the next call, for the worker to compile meanwhile. It must then
                actually be the next request.

        Returns:
            One reply per program: with ``rows`` and ``missing``, or with ``failed``.
        """
        keys = [item.key for item in batch]
        trouble = ""
        try:
            if self._sent != keys:
                self._send(batch)
            self._sent = []
            if upcoming:
                self._send(upcoming)
                self._sent = [item.key for item in upcoming]
            for reply in self.client.replies():
                if "key" in reply:  # of the next batch too, if it does not compile
                    self._early[reply["key"]] = reply
                trouble = str(reply.get("error", trouble))
        except WorkerDied as death:
            trouble = death.what
            self.restart()
        # A batch that died or failed is measured program by program, to find the one at fault; a
        # single program without a reply is that one.
        left = [item for item in batch if item.key not in self._early]
        if left and len(batch) == 1:
            reason = trouble or "the measuring process gave no result"
            return [{"key": keys[0], "failed": reason}]
        if left:
            self.restart()  # whatever was sent ahead must not answer in between
        for item in left:
            self._early[item.key] = self.measure([item])[0]
        return [self._early.pop(key) for key in keys]

    def _send(self, batch: list[Item]) -> None:
        self.client.send("measure", items=[item.to_dict() for item in batch])

    def restart(self) -> None:
        """End the worker; the next use starts another one."""
        if self._client is not None:
            self._client.stop()
            self._client = None
            self._sent = []
