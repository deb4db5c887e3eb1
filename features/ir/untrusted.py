"""Programs from files: a parser that crashes on a damaged one must not take the process with it.

MLIR's reader of bytecode trusts its input: a flipped byte can end the process. So bytecode is read
once in a process of its own (``mlir/worker.py``), and only what passes there is read here. Text is
safe but for nesting without end, which overflows the stack; only text that nests deep is tried so.
Files of other tools that users take for a program are told by content or suffix.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import InternalError, ProgramError
from ...common.files import own_data
from ...common.types import JsonObject
from ...common.worker_process import WorkerEnded, WorkerProcess, WorkerTimeout, module_command

if TYPE_CHECKING:
    from .reader import SourceProgram


#: Seconds that reading a module may take, and more for each megabyte.
#: Engineering estimates: reading takes about 0.2 s a megabyte on an idle machine.
TIMEOUT_S, TIMEOUT_S_PER_MB = 30.0, 5.0
#: Nesting of brackets up to which text is read at once. Programs nest less than 50.
PLAIN_DEPTH = 200
#: Nesting that no reader follows.
MAX_DEPTH = 2000
#: Private memory that reading a module may take.
MEMORY_BYTES = 8 * 2**30
#: What rules raise on attributes that do not fit shapes, and by faults of their own: ``_fault_of``
#: shows which it was.
_ILL_FORMED = (
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    MemoryError,
)
_PACKAGE = Path(__file__).parents[2]
#: Answers of the worker, as in ``mlir/worker.py``, which imports MLIR.
_READ, _REFUSED = b"read", b"refused"
#: Most digests of modules that passed which are kept.
_passed: set[bytes] = set()
_REMEMBERED = 4096
_HINT = "copy the file again, or export the program anew"


@contextlib.contextmanager
def well_formed(source: SourceProgram | None = None) -> Iterator[None]:
    """Tells faults of an ill-formed program from failures of rules on a well-formed one.

    Attributes that do not fit shapes, operands that are missing and figures beyond all range show
    where they are used, in any of the rules for costs, kernels and features.

    Args:
        source: The program that the block is about.

    Raises:
        ProgramError: Something in the block failed, and an op does not fit its operands.
        InternalError: Something in the block failed, and nothing is wrong with the program.
    """
    try:
        yield
    except _ILL_FORMED as error:
        origin = source.origin if source is not None else ""
        fault, op = _fault_of(source)
        if fault:
            raise ProgramError(
                f"the program is malformed: {fault}",
                where=": ".join(filter(None, (origin, op))),
                hint="export it anew; if a compiler takes the program, that is a fault of opcast",
            ) from error
        place, op = _raised_at(error)
        raise InternalError(
            f"opcast fails at {place}: {type(error).__name__}: {str(error)[:300]}",
            where=": ".join(filter(None, (origin, op))),
            hint="a fault of opcast, not of the program: please report it to the maintainers with "
            "this line and the program attached; another --lowering may work",
        ) from error


def _fault_of(source: SourceProgram | None) -> tuple[str, str]:
    """Find what is wrong with a program, and the op; empty if nothing is or it is unreadable."""
    from .program_check import program_fault

    if source is None:
        return "", ""
    try:
        return program_fault(source.program)
    except _ILL_FORMED:
        return "", ""


def _raised_at(error: BaseException) -> tuple[str, str]:
    """Find the file, line and function of opcast that raised an error, and the op concerned."""
    from ..lowering.fused.graph import Node
    from .program import Op

    place, name = "an unknown place", ""
    trace = error.__traceback__
    while trace is not None:
        frame, line, trace = trace.tb_frame, trace.tb_lineno, trace.tb_next
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parents:
            place = f"{path.relative_to(_PACKAGE)}:{line} ({frame.f_code.co_name})"
            values = frame.f_locals.values()
            name = next((v.name for v in values if isinstance(v, Op)), name)
            name = next((v.opcode for v in values if isinstance(v, Node)), name)
    return place, name


class Reader:
    """A worker that reads modules; it is started when it is needed, and anew after it has ended.

    Several threads may ask; one is answered at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._owner = 0

    def outcome(self, data: bytes) -> tuple[str, str]:
        """How a module made the worker end, and why the parser refuses it; empty if it does not."""
        with self._lock:
            used = self._worker is not None
            outcome = self._try(data)
            # An idle worker may have been killed for other reasons, or by what it refused before.
            return self._try(data) if outcome[0] and used else outcome

    def _try(self, data: bytes) -> tuple[str, str]:
        limit = TIMEOUT_S + TIMEOUT_S_PER_MB * len(data) / 1e6
        worker = self._started(limit)
        try:
            worker.send(data, limit)
            reply = worker.receive(limit)
            return "", reply.removeprefix(_REFUSED).decode() if reply != _READ else ""
        except WorkerTimeout:
            outcome = f"reading it did not end within {limit:.0f} s"
        except WorkerEnded:
            status, how = worker.ending()
            outcome = f"reading it {'crashes' if status < 0 else 'fails'}: {how}"
        self._stop()
        return outcome, ""

    def _started(self, limit: float) -> WorkerProcess:
        """Return the worker of this process; one that a fork inherited is its parent's."""
        if self._worker is not None and self._owner == os.getpid():
            return self._worker
        worker = WorkerProcess(_command(), memory_bytes=MEMORY_BYTES)
        self._worker, self._owner = worker, os.getpid()
        atexit.register(self.close)
        try:
            worker.receive(limit)
        except (WorkerEnded, WorkerTimeout):
            self._stop()
            raise ProgramError(
                "bytecode cannot be read: the process that checks it does not start",
                hint="is there memory for it? or give the program as StableHLO text",
            ) from None
        return worker

    def close(self) -> None:
        """End the worker, if it is this process's own."""
        if self._owner == os.getpid():
            self._stop()

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        atexit.unregister(self.close)
        if worker is not None:
            worker.stop()


#: The process's reader; its worker starts with the first bytecode.
reader = Reader()


def _command() -> list[str]:
    return module_command(f"{__package__}.mlir.worker")


def check_bytecode(data: bytes, origin: str = "") -> None:
    """Read MLIR bytecode in a separate process.

    The first takes a third of a second, more of them milliseconds; what passed once passes again at
    once. What the parser refuses is not read here: it may leave memory damaged while it refuses.

    Args:
        data: The bytecode.
        origin: File that it came from, for messages.

    Raises:
        ProgramError: The parser refuses it; or reading it crashes, takes too much memory, or does
            not end.
    """
    outcome, refusal = _outcome(data)
    if refusal:
        from .stablehlo_reader import parse_error

        raise parse_error(refusal, origin)
    if outcome:
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
    if depth > MAX_DEPTH or _outcome(text.encode())[0]:
        raise ProgramError(
            f"cannot parse the program: it nests {depth} brackets deep", where=origin, hint=_HINT
        )


def nesting(text: str) -> int:
    """Measure how deep brackets of one kind nest, strings and comments included."""
    codes = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    # Neither arrows nor the sign in HLO's iota device lists, as in [1,8]<=[8], are brackets.
    # Brackets are counted with NumPy, since programs have megabytes of text.
    sign = np.zeros(len(codes), bool)
    sign[1:] = (codes[1:] == ord(">")) & (codes[:-1] == ord("-"))
    sign[:-1] |= (codes[:-1] == ord("<")) & (codes[1:] == ord("="))
    deepest = 0
    for opening, closing in ("()", "[]", "{}", "<>"):
        step = ((codes == ord(opening)) & ~sign).astype(np.int8)
        step -= (codes == ord(closing)) & ~sign
        level = np.cumsum(step, dtype=np.int64)
        if len(level):
            # Closing brackets without an opening one, as in comparisons, do not make up for others.
            deepest = max(deepest, int((level - np.minimum.accumulate(np.minimum(level, 0))).max()))
    return deepest


def _outcome(data: bytes) -> tuple[str, str]:
    """As :meth:`Reader.outcome`; modules that were read are not tried again."""
    digest = hashlib.sha256(data).digest()
    if digest in _passed:
        return "", ""
    outcome = reader.outcome(data)
    if outcome == ("", ""):
        # A long-lived server must not grow without end; a module that is forgotten is tried again.
        if len(_passed) >= _REMEMBERED:
            _passed.clear()
        _passed.add(digest)
    return outcome


#: How a zip archive begins.
_ZIP = b"PK\x03\x04"


class Foreign(NamedTuple):
    """A file of another tool.

    Attributes:
        what: What it is.
        hint: What to do instead.
    """

    what: str
    hint: str


@cache
def _files() -> Mapping[str, JsonObject]:
    """Kinds of files by name, with ``what``, ``hint``, ``suffixes`` and ``content``."""
    read = own_data("features/ir/foreign_files.yaml")
    hints = read["hints"]
    return {
        name: own | {"hint": hints.get(own["hint"], own["hint"])}
        for name, own in read["files"].items()
    }


#: Most bytes of the end of a zip archive: 22, and a comment.
_ZIP_END = 22 + 65535
#: How StableHLO, HLO or an export begins, whatever the file is called.
_PROGRAM = re.compile(rb"\s*(?:(?://|#)[^\n]*\n\s*)*(?:module\b|HloModule\b|ML\xefR)")


def foreign_file(name: str, data: bytes) -> Foreign | None:
    """Recognise a file that holds no program; ``None`` if it may hold one.

    Args:
        name: Its name; content takes precedence over the suffix.
        data: Its content.
    """
    # Bytecode may stand inside an export, so it is looked for everywhere.
    if _PROGRAM.match(data) or b"ML\xefR" in data:
        return None
    kind = _by_content(data)
    if not kind and data.startswith(_ZIP):
        # PyTorch packs whatever it saves.
        kind = _by_members(data) or _by_suffix(name) or "checkpoint"
    kind = kind or _by_suffix(name)
    return Foreign(_files()[kind]["what"], _files()[kind]["hint"]) if kind else None


def _by_suffix(name: str) -> str:
    suffix = PurePath(name).suffix.lower()
    return next((kind for kind, own in _files().items() if suffix in own.get("suffixes", ())), "")


def _by_content(data: bytes) -> str:
    for kind, own in _files().items():
        at = own.get("content", {}).get("at", 0)
        if "content" in own and data[at:].startswith(own["content"]["bytes"].encode("latin-1")):
            return kind
    # The length of a JSON header, then the header.
    if data[8:10] == b'{"' and 0 < int.from_bytes(data[:8], "little") <= len(data):
        return "safetensors"
    # A pickle of protocol 2 or later, as older versions of PyTorch save.
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "checkpoint"
    return "configuration" if data.lstrip()[:1] == b"{" and b'"model_type"' in data else ""


def _by_members(data: bytes) -> str:
    """What a zip archive is by the files in it."""
    if b"archive_format" in data[:4096] or b"/models/model.json" in data:
        # An archive ends with the list of its files, through which it is read.
        return "program_of_torch" if b"PK\x05\x06" in data[-_ZIP_END:] else "damaged"
    # Code of TorchScript stands beside its constants.
    return "torchscript" if b"/code/__torch__" in data or b"/constants.pkl" in data else ""
