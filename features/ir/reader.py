"""Read a program from any form that a user may have, recognised by its content.

StableHLO text and bytecode, portable artifacts, ``jax.export`` files and objects, lowered, compiled
and jitted JAX functions, and HLO text all become a :class:`SourceProgram`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...common.errors import ProgramError
from ...common.types import JaxObject
from .jax_function import FunctionCall
from .platforms import Platform, known_platform, marked_platforms
from .program import Program
from .torch.program import TorchProgram, as_torch_program
from .trip_counts import apply_given
from .untrusted import check_bytecode, check_text, foreign_file

if TYPE_CHECKING:
    from jax import export
    from jaxlib.mlir import ir

Kind = Literal["stablehlo", "hlo"]
TripCounts = Mapping[str, int] | int | None

_HINT = "give StableHLO (text, bytecode, portable artifact or jax.export file) or HLO text"
#: Note of predictions for translated programs.
TORCH_NOTE = (
    "a PyTorch program as XLA would run it, translated to JAX: the kernels are XLA's; for "
    "those of PyTorch itself: --framework torch-eager or torch-compiled (in Python framework=…)"
)
#: Equals BYTECODE_MAGIC of mlir/bindings.py, which would import jaxlib.
_BYTECODE = b"ML\xefR"
# Comments of both languages before the program; ``#map = …`` is an alias of MLIR, not a comment.
_COMMENT = re.compile(r"(?:\s*(?://|#(?!\w+\s*=))[^\n]*(?:\n|$))*\s*")
# Text without brackets and signs that does not start with the first word of a program.
_FILE_NAME = re.compile(r"(?!\s*(?:module|HloModule|//)\b)[^{}()=@%\s][^{}()=@%]*")


@dataclass
class SourceProgram:
    """A program as given by the user, converted to the IR on first use.

    Attributes:
        kind: ``stablehlo`` or ``hlo``.
        origin: Its file or kind of object, for messages; empty for plain text.
        compile_input: Input for a compiler: StableHLO as text or bytecode, or HLO text.
        trip_counts: The user's trip counts for loops where none is inferred.
        platforms: Platforms that it was lowered for, by JAX's names; empty if unknown.
        note: A conversion that predictions should mention; empty if there is none.
    """

    kind: Kind
    origin: str
    compile_input: str | bytes
    trip_counts: TripCounts = None
    _module: ir.Module | None = field(default=None, repr=False, compare=False)
    platforms: tuple[str, ...] = ()
    note: str = ""
    # Makes the program for another platform, if it came from a function or a file for several.
    _remake: Callable[[Platform], SourceProgram] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def raw(self) -> bytes:
        """``compile_input`` as bytes; even bytecode contains the names of ops and attributes."""
        data = self.compile_input
        return data.encode() if isinstance(data, str) else data

    @property
    def is_compiled(self) -> bool:
        """Whether it is HLO that a compiler has optimised and scheduled."""
        return self.kind == "hlo" and self.program.is_scheduled

    @cached_property
    def module(self) -> ir.Module:
        """Parsed MLIR module in a context of its own, ``module.context``.

        Raises:
            ProgramError: The program is HLO text.
        """
        from .stablehlo_reader import parse

        if self.kind == "hlo":
            raise ProgramError("HLO text has no MLIR module", where=self.origin)
        return self._module if self._module is not None else parse(self.compile_input, self.origin)

    @cached_property
    def program(self) -> Program:
        """The program in the IR.

        Raises:
            ProgramError: The program is malformed.
            DynamicShapeError: A dimension has no static size.
        """
        if self.kind == "stablehlo":
            from .stablehlo_reader import read_module

            return read_module(self.module, self.origin, trip_counts=self.trip_counts)
        from .hlo_reader import parse_hlo

        program = parse_hlo(self.raw.decode(), self.origin)
        apply_given(program, self.trip_counts)
        return program

    def with_program(self, program: Program) -> SourceProgram:
        """Copy with another IR; compilers still receive the original program."""
        # The parsed module is shared, since parsing twice would double the memory.
        copy = replace(self, _module=self.module if self.kind == "stablehlo" else None)
        copy.__dict__["program"] = program
        return copy

    def for_platform(self, platform: Platform) -> SourceProgram:
        """Return the program as lowered for a platform; itself if it cannot be lowered again."""
        if self._remake is None or self.platforms == (platform.name,):
            return self
        made = self._remake(platform)
        made.trip_counts = self.trip_counts
        return made

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the program without locations; equal for text and bytecode."""
        if self.kind == "hlo":
            return hashlib.sha256(self.raw).hexdigest()
        text = str(self.module.operation.get_asm(enable_debug_info=False))
        return hashlib.sha256(text.encode()).hexdigest()


def read_program(
    source: object,
    *args: object,
    trip_counts: TripCounts = None,
    platform: Platform | None = None,
    **kwargs: object,
) -> SourceProgram:
    """Read a program in any form.

    Args:
        source: Path, text or bytes of StableHLO or HLO; a ``jax.export.Exported``; a lowered or
            compiled JAX function; an MLIR module; a function, jitted or not, followed by its
            example arguments, or a ``FunctionCall`` with them; or a PyTorch program: a module
            followed by its inputs, an exported program, a ``.pt2`` file, or a ``TorchProgram``.
        args: Example arguments (arrays or ``jax.ShapeDtypeStruct``) if ``source`` is a function.
        trip_counts: Counts for loops where none is inferred: one for all, or by the loop's name or
            source line.
        platform: Platform to lower a function for, or to select from an export for several
            platforms; by default JAX's own backend, and all branches.
        kwargs: Keyword arguments of the function.

    Returns:
        The program, parsed but converted to the IR only when ``program`` is read.

    Raises:
        ProgramError: The input has none of these forms, or is empty, truncated or malformed.
    """
    own_torch = as_torch_program(source, args, kwargs)
    if own_torch is not None:
        return _from_torch(own_torch, trip_counts, platform)
    check_arguments(source, args, kwargs)
    if isinstance(source, SourceProgram):
        return source if platform is None else source.for_platform(platform)
    if isinstance(source, FunctionCall):
        own = source
        named = as_torch_program(own.function, own.args, own.kwargs, origin=own.origin)
        if named is not None:
            return _from_torch(named, trip_counts, platform)
        return _from_object(own.function, own.args, own.kwargs, trip_counts, platform, own.origin)
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        return _from_file(Path(source), trip_counts, platform)
    if isinstance(source, str):
        return _from_text(source, "", trip_counts)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), "", trip_counts, platform)
    return _from_object(source, args, kwargs, trip_counts, platform)


def check_arguments(source: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise an error for arguments of a program that is not a function.

    Raises:
        ProgramError: There are arguments, such as a misspelt option.
    """
    if (args or kwargs) and not callable(source):
        given = ", ".join([*(type(a).__name__ for a in args), *kwargs])
        raise ProgramError(
            f"only a function takes arguments, but a {type(source).__name__} was given some: "
            f"{given}",
            hint="is an option misspelt?",
        )


def _is_path(text: str) -> bool:
    """Return whether a string is a file name: the file exists, or the text is no program."""
    # 4096 is Linux's PATH_MAX; programs of one line contain brackets.
    if "\n" in text or len(text) > 4096:
        return False
    try:
        return Path(text).expanduser().exists() or bool(_FILE_NAME.fullmatch(text))
    except (OSError, ValueError, RuntimeError):
        return False


def _from_file(path: Path, trip_counts: TripCounts, platform: Platform | None) -> SourceProgram:
    try:
        data = path.expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProgramError(f"cannot read the program: {reason}", where=str(path)) from None
    foreign = foreign_file(path.name, data)
    if foreign is not None:
        raise ProgramError(f"this is {foreign.what}", where=str(path), hint=foreign.hint)
    return _from_bytes(data, str(path), trip_counts, platform)


def _from_bytes(
    data: bytes, origin: str, trip_counts: TripCounts, platform: Platform | None
) -> SourceProgram:
    if data.startswith(_BYTECODE):
        check_bytecode(data, origin)
        return _stablehlo(data, origin, trip_counts)
    # A jax.export file is a flatbuffer that contains bytecode, but not at its start.
    if _BYTECODE in data:
        exported = _exported(data, origin)
        check_bytecode(bytes(exported.mlir_module_serialized), origin)
        return _from_export(exported, origin, trip_counts, platform)
    try:
        # Editors on Windows insert a byte-order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ProgramError(
            f"{len(data)} bytes are in no known format", where=origin, hint=_HINT
        ) from None
    return _from_text(text, origin, trip_counts)


def _from_text(text: str, origin: str, trip_counts: TripCounts) -> SourceProgram:
    # Test files start with comments and RUN lines.
    start = _COMMENT.match(text)
    body = text[start.end() if start else 0 :]
    if not body:
        raise ProgramError("the program is empty", where=origin, hint=_HINT)
    check_text(text, origin)
    if body.startswith("HloModule"):
        source = SourceProgram("hlo", origin, text, trip_counts)
        # Read immediately, so that malformed HLO is rejected here and not on first use.
        _ = source.program
        return source
    return _stablehlo(text, origin, trip_counts)


def _stablehlo(data: str | bytes, origin: str, trip_counts: TripCounts) -> SourceProgram:
    from .mlir.bindings import module_counts, with_partitions, write_bytecode
    from .mlir.shardings import manual_devices
    from .stablehlo_reader import parse

    module, note = parse(data, origin), ""
    # A search in the data avoids walking most modules.
    word = "manual_computation"
    if (word in data if isinstance(data, str) else word.encode() in data) and (
        module_counts(module) == (1, 1) and (count := manual_devices(module)) > 1
    ):
        module = with_partitions(write_bytecode(module), count)
        data = write_bytecode(module)
        note = f"its shard_map is over {count} devices: its header was given as many partitions"
    platforms = marked_platforms(module)
    return SourceProgram("stablehlo", origin, data, trip_counts, module, platforms, note)


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
    source: object,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    trip_counts: TripCounts,
    platform: Platform | None,
    origin: str = "",
) -> SourceProgram:
    """Read JAX objects, recognised by their attributes so that JAX is imported only if needed."""
    name = origin or str(getattr(source, "fun_name", "") or getattr(source, "__name__", ""))
    # Wrappers of other packages (equinox, flax) contain JAX's own object.
    for inner in ("lowered", "compiled"):
        source = getattr(source, inner, None) or source
    # Most specific first: Exported, Lowered, Compiled, MLIR module, function.
    if hasattr(source, "mlir_module_serialized"):
        return _from_export(source, name, trip_counts, platform)
    if hasattr(source, "compiler_ir") and hasattr(source, "compile"):
        return _from_lowered(source, name, trip_counts)
    if hasattr(source, "memory_analysis") and hasattr(source, "as_text"):
        compiled = _from_text(source.as_text(), name, trip_counts)
        compiled.platforms = _compiled_platforms(source)
        return compiled
    if hasattr(source, "operation") and hasattr(source, "context"):
        return _from_module(source, name, trip_counts)
    # A traced function can be lowered but not called.
    if callable(source) or (hasattr(source, "jaxpr") and hasattr(source, "lower")):
        call = FunctionCall(source, args, kwargs, name)
        return _from_call(call, trip_counts, platform)
    raise ProgramError(f"cannot read a program from a {type(source).__name__}", hint=_HINT)


def _from_call(
    call: FunctionCall, trip_counts: TripCounts, platform: Platform | None
) -> SourceProgram:
    source = _from_lowered(call.lower(platform), call.origin, trip_counts)
    # Unlike a file, a function can be lowered again for another platform.
    source._remake = lambda other: _from_call(call, trip_counts, other)
    return source


def _from_torch(
    program: TorchProgram, trip_counts: TripCounts, platform: Platform | None
) -> SourceProgram:
    """Translate a PyTorch program to JAX and lower it."""
    from .torch.training import Translated

    translated = Translated(program)

    def made(other: Platform | None) -> SourceProgram:
        source = _from_call(translated.call(), trip_counts, other)
        source.note = TORCH_NOTE
        source._remake = made
        return source

    return made(platform)


def _from_lowered(lowered: JaxObject, origin: str, trip_counts: TripCounts) -> SourceProgram:
    from .jax_compat import lowered_platforms

    source = _from_module(lowered.compiler_ir("stablehlo"), origin, trip_counts)
    source.platforms = tuple(map(known_platform, lowered_platforms(lowered)))
    return source


def _from_export(
    exported: JaxObject, origin: str, trip_counts: TripCounts, platform: Platform | None
) -> SourceProgram:
    """Read an export; if it is for several platforms, select the branches of the given one."""
    source = _stablehlo(bytes(exported.mlir_module_serialized), origin, trip_counts)
    names = tuple(map(known_platform, exported.platforms))
    source.platforms = names
    if len(names) < 2:
        return source

    def taken(other: Platform) -> SourceProgram:
        from .platforms import for_platform

        # For a GPU, code for the other kind of GPU is closer than code for a CPU.
        twin = {"cuda": "rocm", "rocm": "cuda"}.get(other.name, "")
        chosen = next((n for n in (other.name, twin) if n in names), names[0])
        one = _from_module(for_platform(source.module, names.index(chosen)), origin, trip_counts)
        one.platforms = (chosen,)
        one._remake = taken
        return one

    if platform is not None:
        return taken(platform)
    source._remake = taken
    return source


def _compiled_platforms(compiled: JaxObject) -> tuple[str, ...]:
    """Return the platforms of the devices that a ``jax.stages.Compiled`` runs on."""
    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in shardings for device in sharding.device_set}
    return tuple(sorted({known_platform(device.platform) for device in devices}))


def _from_module(module: JaxObject, origin: str, trip_counts: TripCounts) -> SourceProgram:
    from .mlir.bindings import write_bytecode

    return _stablehlo(write_bytecode(module), origin, trip_counts)
