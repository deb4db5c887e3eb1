"""The worker's side of a worker process: end with the parent, limit memory, exchange messages.

The parent's side is :mod:`opcast.common.worker_process`, which passes the settings that a worker
needs first in the environment variable :data:`WORKER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

#: Environment variable of a worker: its parent's process id, and its memory limit in bytes.
WORKER = "OPCAST_WORKER"
#: Bytes of the length that precedes a message (little-endian).
LENGTH_BYTES = 8
#: From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
#: Seconds between checks of the parent on systems without a parent-death signal: a worker that
#: outlives it by half a second is harmless.
_LOOK_S = 0.5


def die_with_parent(parent: int) -> None:
    """End when the process that started this one ends, even if it is killed.

    Linux sends a parent-death signal, but when the *thread* that started this process ends, so
    long-lived processes have to be started by long-lived threads. Elsewhere a thread checks twice a
    second whether the parent still exists.

    Args:
        parent: Process id of the parent; if it no longer exists, this process ends at once.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # A parent that ended before the call above sends no signal. A wrapper program may be between
    # the two processes, so getppid() is not compared.
    if not _exists(parent):
        os._exit(1)


def limit_memory(limit_bytes: int) -> None:
    """Limit this process's private memory (``RLIMIT_DATA``), if the present limit is not lower.

    Args:
        limit_bytes: The limit; 0 for none.
    """
    if not limit_bytes:
        return
    import resource  # of POSIX alone

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if most == resource.RLIM_INFINITY else min(limit_bytes, most)
    # Linux accepts every lower limit; macOS refuses some and enforces none.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def begin_worker() -> None:
    """Initialize a worker: end with its parent, and limit its memory.

    No effect in a process that :mod:`opcast.common.worker_process` did not start.
    """
    parent, _, limit = os.environ.pop(WORKER, "").partition(" ")
    if parent:
        die_with_parent(int(parent))
        limit_memory(int(limit))


class Channel:
    """Messages of a worker: requests on standard input, replies on the original standard output.

    From then on, output of native code and libraries goes to standard error.
    """

    def __init__(self) -> None:
        begin_worker()
        # A copy of standard output for replies, before 1 is pointed at standard error.
        self._replies = os.fdopen(os.dup(1), "wb")
        # XLA and MLIR write to file descriptor 1 directly; one stray byte would break the framing.
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        """Yield requests until the parent closes the channel."""
        stream = sys.stdin.buffer
        while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
            yield stream.read(int.from_bytes(head, "little"))

    def send(self, message: bytes) -> None:
        """Send a reply, from any thread."""
        with self._lock:
            self._replies.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
            self._replies.flush()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists, and belongs to someone else
        pass
    return True


def _watch(parent: int) -> None:
    while _exists(parent):
        time.sleep(_LOOK_S)
    os._exit(1)
