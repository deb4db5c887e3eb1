"""Protection from program files that would crash the parser.

MLIR's bytecode reader trusts its input, and a single wrong byte can end the process. Bytecode is
therefore first read in a separate process (``mlir/worker.py``), and here only if that succeeds.
Text is safe except for very deep nesting, which overflows the stack, so only deeply nested text is
tried in the same way. Files of other tools are recognised by content or suffix.
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

#: Seconds allowed for reading a module, and additional seconds per megabyte. Engineering estimates:
#: reading takes about 0.2 s per megabyte on an idle machine.
TIMEOUT_S, TIMEOUT_S_PER_MB = 30.0, 5.0
#: Depth of nested brackets up to which text is read directly. Programs nest less than 50 deep.
PLAIN_DEPTH = 200
#: Depth that is always rejected.
MAX_DEPTH = 2000
#: Private memory allowed for reading a module.
MEMORY_BYTES = 8 * 2**30
#: Exceptions of rules on attributes that do not fit shapes, but also of faulty rules;
#: ``_fault_of`` distinguishes the two.
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
#: Answers of the worker; equal to those in ``mlir/worker.py``, which would import MLIR.
_READ, _REFUSED = b"read", b"refused"
#: Digests of modules that were read successfully, and their largest number.
_passed: set[bytes] = set()
_REMEMBERED = 4096
#: First bytes of a zip archive, and longest end of one: 22 bytes and a comment.
_ZIP, _ZIP_END = b"PK\x03\x04", 22 + 65535
#: Start of StableHLO, HLO or an export, whatever the name of the file.
_PROGRAM = re.compile(rb"\s*(?:(?://|#)[^\n]*\n\s*)*(?:module\b|HloModule\b|ML\xefR)")
_HINT = "copy the file again, or export the program anew"


@contextlib.contextmanager
def well_formed(source: SourceProgram | None = None) -> Iterator[None]:
    """Turn exceptions of rules into errors that tell faults of the program from those of opcast.

    Attributes that do not fit shapes, missing operands and excessive numbers only show where they
    are used, in any rule for costs, kernels or features.

    Args:
        source: Program that the block works on.

    Raises:
        ProgramError: The block failed, and an op does not match its operands.
        InternalError: The block failed, but the program is well-formed.
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
    """Return the fault of a program and the op; empty if there is none or it is unreadable."""
    from .program_check import program_fault

    if source is None:
        return "", ""
    try:
        return program_fault(source.program)
    except _ILL_FORMED:
        return "", ""


def _raised_at(error: BaseException) -> tuple[str, str]:
    """Return the file, line and function of opcast that raised an error, and the op concerned."""
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
    """A worker that reads modules, started on first use and restarted after it has ended.

    Safe for several threads; requests are handled one at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._owner = 0

    def outcome(self, data: bytes) -> tuple[str, str]:
        """Return how a module ended the worker and why the parser rejects it; empty if neither."""
        with self._lock:
            used = self._worker is not None
            outcome = self._try(data)
            # A running worker may have been killed for other reasons or damaged by earlier input.
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
        """Return the worker of this process; an inherited one belongs to the parent process."""
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
        """End the worker if it belongs to this process."""
        if self._owner == os.getpid():
            self._stop()

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        atexit.unregister(self.close)
        if worker is not None:
            worker.stop()


#: Reader of this process; its worker starts with the first bytecode.
reader = Reader()


def _command() -> list[str]:
    return module_command(f"{__package__}.mlir.worker")


def check_bytecode(data: bytes, origin: str = "") -> None:
    """Read MLIR bytecode in a separate process.

    The first call takes a third of a second and later ones milliseconds; known modules pass at
    once. Bytecode that the parser rejects is not read here, since rejecting may corrupt memory.

    Args:
        data: The bytecode.
        origin: Its file, for messages.

    Raises:
        ProgramError: The parser rejects the bytecode, or reading it crashes, takes too much memory
            or does not end.
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
    """Reject text that is nested so deeply that reading it would overflow the stack.

    Raises:
        ProgramError: The text is nested too deeply.
    """
    depth = nesting(text)
    if depth <= PLAIN_DEPTH:
        return
    if depth > MAX_DEPTH or _outcome(text.encode())[0]:
        raise ProgramError(
            f"cannot parse the program: it nests {depth} brackets deep", where=origin, hint=_HINT
        )


def nesting(text: str) -> int:
    """Return the depth of nested brackets of one kind, including strings and comments."""
    codes = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    # Arrows and the sign in HLO's iota device lists, such as [1,8]<=[8], are not brackets.
    # NumPy counts the brackets because programs have megabytes of text.
    sign = np.zeros(len(codes), bool)
    sign[1:] = (codes[1:] == ord(">")) & (codes[:-1] == ord("-"))
    sign[:-1] |= (codes[:-1] == ord("<")) & (codes[1:] == ord("="))
    deepest = 0
    for opening, closing in ("()", "[]", "{}", "<>"):
        step = ((codes == ord(opening)) & ~sign).astype(np.int8)
        step -= (codes == ord(closing)) & ~sign
        level = np.cumsum(step, dtype=np.int64)
        if len(level):
            # Unmatched closing brackets, as in comparisons, do not offset opening ones.
            deepest = max(deepest, int((level - np.minimum.accumulate(np.minimum(level, 0))).max()))
    return deepest


def _outcome(data: bytes) -> tuple[str, str]:
    """Return :meth:`Reader.outcome`, remembering modules that were read."""
    digest = hashlib.sha256(data).digest()
    if digest in _passed:
        return "", ""
    outcome = reader.outcome(data)
    if outcome == ("", ""):
        # Bounds the memory of long-running servers; a forgotten module is tried again.
        if len(_passed) >= _REMEMBERED:
            _passed.clear()
        _passed.add(digest)
    return outcome


class Foreign(NamedTuple):
    """A file of another tool.

    Attributes:
        what: Description of the file.
        hint: What to do instead.
    """

    what: str
    hint: str


@cache
def _files() -> Mapping[str, JsonObject]:
    """Return the kinds of files by name, with ``what``, ``hint``, ``suffixes`` and ``content``."""
    read = own_data("features/ir/foreign_files.yaml")
    hints = read["hints"]
    return {
        name: own | {"hint": hints.get(own["hint"], own["hint"])}
        for name, own in read["files"].items()
    }


def foreign_file(name: str, data: bytes) -> Foreign | None:
    """Recognise a file without a program; ``None`` if it may contain one.

    Args:
        name: Name of the file; its content takes precedence over the suffix.
        data: Content of the file.
    """
    # Bytecode may lie anywhere inside an export.
    if _PROGRAM.match(data) or b"ML\xefR" in data:
        return None
    kind = _by_content(data)
    if not kind and data.startswith(_ZIP):
        # PyTorch saves everything as zip archives.
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
    # The length of a JSON header, followed by the header.
    if data[8:10] == b'{"' and 0 < int.from_bytes(data[:8], "little") <= len(data):
        return "safetensors"
    # A pickle of protocol 2 or later, as saved by older versions of PyTorch.
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "checkpoint"
    return "configuration" if data.lstrip()[:1] == b"{" and b'"model_type"' in data else ""


def _by_members(data: bytes) -> str:
    """Classify a zip archive by its members."""
    if b"archive_format" in data[:4096] or b"/models/model.json" in data:
        # An archive ends with its list of files, which is needed to read it.
        return "program_of_torch" if b"PK\x05\x06" in data[-_ZIP_END:] else "damaged"
    # TorchScript stores code and constants.
    return "torchscript" if b"/code/__torch__" in data or b"/constants.pkl" in data else ""
