"""Programs from files: a parser that crashes on a damaged one must not take the process with it.

MLIR's reader of bytecode trusts its input: a flipped byte can end the process. So bytecode is read
once in a process of its own (``_mlir_worker.py``), and only what passes there is read here. Text is
safe but for nesting without end, which overflows the stack; only text that nests deep is tried so.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .errors import ProgramError

#: Seconds that reading a module may take, and more for each megabyte.
TIMEOUT_S, TIMEOUT_S_PER_MB = 30.0, 5.0
#: Nesting of brackets up to which text is read at once. Programs nest less than 50.
PLAIN_DEPTH = 200
#: Nesting that no reader follows.
MAX_DEPTH = 2000
_COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("_mlir_worker.py"))]
_ILL_FORMED = (
    IndexError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError,
    RecursionError, MemoryError,
)  # fmt: skip
#: Digests of modules that passed; so many are kept.
_passed: set[bytes] = set()
_REMEMBERED = 4096
_HINT = "copy the file again, or export the program anew"


@contextlib.contextmanager
def well_formed(origin: str = "") -> Iterator[None]:
    """Turns what an ill-formed program makes of rules that expect a well-formed one into one error.

    Attributes that do not fit shapes, operands that are missing and figures beyond all range show
    where they are used, in any of the rules for costs, kernels and features.

    Raises:
        ProgramError: Something in the block failed so; the error below says where.
    """
    try:
        yield
    except _ILL_FORMED as error:
        raise ProgramError(
            f"the program is malformed: {type(error).__name__}: {str(error)[:300]}",
            where=origin,
            hint="an attribute does not fit its operands; if a compiler takes the program, that is "
            "a fault of opcast",
        ) from error


class Reader:
    """A process that reads modules; another one is started where it ends.

    Several threads may ask; one is answered at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def outcome(self, data: bytes) -> str:
        """How a module made the process end; empty if it was read or refused in order."""
        with self._lock:
            used = self._process is not None
            found = self._try(data)
            # A process that waited may have been killed for reasons of its own.
            return self._try(data) if found and used else found

    def _try(self, data: bytes) -> str:
        limit = TIMEOUT_S + TIMEOUT_S_PER_MB * len(data) / 1e6
        process = self._started(limit)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(len(data).to_bytes(8, "little") + data)
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], limit)
            if ready and process.stdout.read(1):
                return ""
            ended = bool(ready)
        except OSError:  # it ended while it was written to
            ended = True
        if not ended:
            self._stop()
            return f"reading it did not end within {limit:.0f} s"
        try:
            code = process.wait(10)
        except subprocess.TimeoutExpired:  # it closed its end and stays
            code = -signal.SIGKILL
        self._stop()
        if code < 0:
            return f"reading it crashes: {signal.Signals(-code).name}"
        return f"reading it fails with status {code}"

    def _started(self, limit: float) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        self._owner = os.getpid()
        atexit.register(self.close)
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], limit)
        if not ready or not out.read(1):
            self._stop()
            raise ProgramError(
                "bytecode cannot be read: the process that checks it does not start",
                hint="is there memory for it? or give the program as StableHLO text",
            )
        return self._process

    def close(self) -> None:
        """End the process, if it is this process's own."""
        if self._owner == os.getpid():
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()


reader = Reader()


def check_bytecode(data: bytes, origin: str = "") -> None:
    """Read MLIR bytecode in a process of its own.

    What the parser refuses passes: it is refused again where the message is made. The first takes a
    third of a second, more of them milliseconds; what passed once passes again at once.

    Args:
        data: The bytecode.
        origin: File that it came from, for messages.

    Raises:
        ProgramError: Reading it crashes, takes too much memory, or does not end.
    """
    if outcome := _outcome(data):
        raise ProgramError(
            f"cannot parse the program: the bytecode is damaged ({outcome})",
            where=origin,
            hint=_HINT,
        )


def check_text(text: str, origin: str = "") -> None:
    """Refuse a program's text that nests so deep that reading it would overflow the stack.

    Raises:
        ProgramError: It nests too deep.
    """
    depth = nesting(text)
    if depth <= PLAIN_DEPTH:
        return
    if depth > MAX_DEPTH or _outcome(text.encode()):
        raise ProgramError(
            f"cannot parse the program: it nests {depth} brackets deep", where=origin, hint=_HINT
        )


def nesting(text: str) -> int:
    """How deep brackets of one kind nest at most, strings and comments included."""
    codes = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    arrow = np.zeros(len(codes), bool)
    arrow[1:] = (codes[1:] == ord(">")) & (codes[:-1] == ord("-"))
    deepest = 0
    for opening, closing in ("()", "[]", "{}", "<>"):
        step = (codes == ord(opening)).astype(np.int8)
        step -= (codes == ord(closing)) & ~arrow
        level = np.cumsum(step, dtype=np.int64)
        if len(level):
            # Closing brackets without an opening one, as in comparisons, do not make up for others.
            deepest = max(deepest, int((level - np.minimum.accumulate(np.minimum(level, 0))).max()))
    return deepest


def _outcome(data: bytes) -> str:
    """How a module made its reader end; empty if it was read or refused in order."""
    digest = hashlib.sha256(data).digest()
    if digest in _passed:
        return ""
    found = reader.outcome(data)
    if not found:
        if len(_passed) >= _REMEMBERED:
            _passed.clear()
        _passed.add(digest)
    return found
