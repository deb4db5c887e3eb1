"""Read a program in any form that a user may have; the forms are told apart by content.

Text and bytecode of StableHLO, portable artifacts, ``jax.export`` files and objects, lowered,
compiled and jitted JAX functions, and HLO text all become a :class:`SourceProgram`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...common.errors import ProgramError
from .program import Program
from .trip_counts import apply_given
from .untrusted import check_bytecode, check_text

if TYPE_CHECKING:
    from jax import export
    from jaxlib.mlir import ir

Kind = Literal["stablehlo", "hlo"]
TripCounts = Mapping[str, int] | int | None

_HINT = "give StableHLO (text, bytecode, portable artifact or jax.export file) or HLO text"
#: As BYTECODE_MAGIC in jax_compat.py, which imports JAX.
_BYTECODE = b"ML\xefR"
# Comments of both languages before the program; ``#map = …`` is an alias of MLIR, no comment.
_COMMENT = re.compile(r"(?:\s*(?://|#(?!\w+\s*=))[^\n]*(?:\n|$))*\s*")
# A text without brackets and signs, and without the first word of a program.
_FILE_NAME = re.compile(r"(?!\s*(?:module|HloModule|//)\b)[^{}()=@%\s][^{}()=@%]*")


@dataclass
class SourceProgram:
    """A program as it was given; converted to the IR on first use.

    Attributes:
        kind: ``stablehlo`` or ``hlo``.
        origin: File that it came from, or what kind of object; empty for plain text.
        compile_input: Input for a compiler: StableHLO as text or bytecode, or HLO text.
        trip_counts: The user's trip counts for loops where none is inferred.
    """

    kind: Kind
    origin: str
    compile_input: str | bytes
    trip_counts: TripCounts = None
    _module: ir.Module | None = field(default=None, repr=False, compare=False)

    @cached_property
    def module(self) -> ir.Module:
        """Parsed MLIR module; of its own context, which ``module.context`` gives.

        Raises:
            ProgramError: The program is HLO text.
        """
        from .stablehlo_reader import parse

        if self.kind == "hlo":
            raise ProgramError("HLO text has no MLIR module", where=self.origin)
        return self._module if self._module is not None else parse(self.compile_input, self.origin)

    @cached_property
    def program(self) -> Program:
        """The IR.

        Raises:
            ProgramError: The program is malformed.
            DynamicShapeError: A dimension has no static size.
        """
        if self.kind == "stablehlo":
            from .stablehlo_reader import read_module

            return read_module(self.module, self.origin, trip_counts=self.trip_counts)
        from .hlo_reader import parse_hlo

        program = parse_hlo(_text(self.compile_input), self.origin)
        apply_given(program, self.trip_counts)
        return program

    def with_program(self, program: Program) -> SourceProgram:
        """Copy with the given IR instead of its own; a compiler still gets the original."""
        # The parsed module is shared: parsing twice would double the memory.
        copy = replace(self, _module=self.module if self.kind == "stablehlo" else None)
        copy.__dict__["program"] = program
        return copy

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the program without locations: the same for text and bytecode."""
        if self.kind == "hlo":
            return hashlib.sha256(_text(self.compile_input).encode()).hexdigest()
        text = str(self.module.operation.get_asm(enable_debug_info=False))
        return hashlib.sha256(text.encode()).hexdigest()


def read_program(source: object, *args: object, trip_counts: TripCounts = None) -> SourceProgram:
    """Read a program in any form.

    Args:
        source: Path, text or bytes of StableHLO or HLO; a ``jax.export.Exported``; a lowered or
            compiled JAX function; an MLIR module; or a (jitted) function with example arguments.
        args: Example arguments (arrays or ``jax.ShapeDtypeStruct``) if ``source`` is a function.
        trip_counts: Counts for loops where none is inferred: one for all, or by the loop's name or
            source line.

    Returns:
        The program; parsed, but turned into the IR only when ``program`` is read.

    Raises:
        ProgramError: The input is none of these, or it is empty, truncated or malformed.
    """
    if isinstance(source, SourceProgram):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        return _from_file(Path(source), trip_counts)
    if isinstance(source, str):
        return _from_text(source, "", trip_counts)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), "", trip_counts)
    return _from_object(source, args, trip_counts)


def _is_path(text: str) -> bool:
    """Tell whether a string names a file: it exists, or looks like a name rather than a program."""
    # 4096 is Linux's PATH_MAX; no program fits on one line without brackets.
    if "\n" in text or len(text) > 4096:
        return False
    try:
        return Path(text).expanduser().exists() or bool(_FILE_NAME.fullmatch(text))
    except (OSError, ValueError, RuntimeError):
        return False


def _from_file(path: Path, trip_counts: TripCounts) -> SourceProgram:
    try:
        data = path.expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProgramError(f"cannot read the program: {reason}", where=str(path)) from None
    return _from_bytes(data, str(path), trip_counts)


def _from_bytes(data: bytes, origin: str, trip_counts: TripCounts) -> SourceProgram:
    if data.startswith(_BYTECODE):
        check_bytecode(data, origin)
        return _stablehlo(data, origin, trip_counts)
    # A jax.export file is a flatbuffer around bytecode, which therefore does not stand at its
    # start.
    if _BYTECODE in data:
        exported = _exported(data, origin)
        check_bytecode(bytes(exported.mlir_module_serialized), origin)
        return _from_object(exported, (), trip_counts, origin)
    try:
        # Editors on Windows put a byte-order mark in front.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ProgramError(
            f"{len(data)} bytes are in no known format", where=origin, hint=_HINT
        ) from None
    return _from_text(text, origin, trip_counts)


def _from_text(text: str, origin: str, trip_counts: TripCounts) -> SourceProgram:
    # Test files begin with comments and RUN lines.
    start = _COMMENT.match(text)
    body = text[start.end() if start else 0 :]
    if not body:
        raise ProgramError("the program is empty", where=origin, hint=_HINT)
    check_text(text, origin)
    if body.startswith("HloModule"):
        source = SourceProgram("hlo", origin, text, trip_counts)
        # Read at once, so that malformed HLO is refused here rather than on first use.
        _ = source.program
        return source
    return _stablehlo(text, origin, trip_counts)


def _stablehlo(data: str | bytes, origin: str, trip_counts: TripCounts) -> SourceProgram:
    from .stablehlo_reader import parse

    return SourceProgram("stablehlo", origin, data, trip_counts, parse(data, origin))


def _exported(data: bytes, origin: str) -> export.Exported:
    """Deserialise a ``jax.export`` file: a flatbuffer that holds a portable artifact."""
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except Exception as error:  # flatbuffers raises struct.error, TypeError, AssertionError …
        raise ProgramError(
            f"not a jax.export file, or a damaged one: {type(error).__name__}: {error}",
            where=origin,
            hint=_HINT,
        ) from None


def _from_object(
    source: object, args: tuple[object, ...], trip_counts: TripCounts, origin: str = ""
) -> SourceProgram:
    """Read JAX's objects, told apart by what they can do: JAX is imported only if needed."""
    name = origin or str(getattr(source, "fun_name", "") or getattr(source, "__name__", ""))
    # By what they can do, most specific first: Exported, Lowered, Compiled, MLIR module, function.
    if hasattr(source, "mlir_module_serialized"):
        return _stablehlo(bytes(source.mlir_module_serialized), name, trip_counts)
    if hasattr(source, "compiler_ir") and hasattr(source, "compile"):
        return _from_module(source.compiler_ir("stablehlo"), name, trip_counts)
    if hasattr(source, "memory_analysis") and hasattr(source, "as_text"):
        return _from_text(source.as_text(), name, trip_counts)
    if hasattr(source, "operation") and hasattr(source, "context"):
        return _from_module(source, name, trip_counts)
    if callable(source):
        return _from_object(_lower(source, args, name), (), trip_counts, name)
    raise ProgramError(f"cannot read a program from a {type(source).__name__}", hint=_HINT)


def _from_module(module: Any, origin: str, trip_counts: TripCounts) -> SourceProgram:
    from .jax_compat import write_bytecode

    return _stablehlo(write_bytecode(module), origin, trip_counts)


def _lower(function: Any, args: tuple[object, ...], name: str) -> object:
    import jax

    jitted = function if hasattr(function, "lower") else jax.jit(function)
    try:
        return jitted.lower(*args)
    except Exception as error:
        raise ProgramError(
            f"the function cannot be lowered: {type(error).__name__}: {error}",
            where=name,
            hint="pass example arguments: read_program(function, *arguments)",
        ) from error


def _text(data: str | bytes) -> str:
    return data if isinstance(data, str) else data.decode()
