"""Reader of MLIR modules: StableHLO with func, chlo, sdy and mhlo, as text or bytecode."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _jax_compat
from ._mlir_quantised import is_quantised, with_storage_types
from ._mlir_reader import ModuleReader
from .errors import ProgramError
from .ir import Program
from .trip_count import set_trip_counts


def walk_ops(module: Any) -> list[Any]:
    """All operations of a module, itself included, in the order that ``Source.index`` counts.

    Args:
        module: MLIR module, as :func:`opcast.features._jax_compat.parse_module` returns it.
    """
    return _jax_compat.walk_ops(module)


def read_mlir(
    data: str | bytes, origin: str = "", *, trip_counts: Mapping[str, int] | int | None = None
) -> Program:
    """Read a StableHLO program.

    Args:
        data: MLIR text, MLIR bytecode, or a StableHLO portable artifact.
        origin: File that it came from, for messages and for ops without a location.
        trip_counts: Counts for loops where none is found: one for all, or by loop.

    Returns:
        The program: each function and each region is a computation.

    Raises:
        ProgramError: The data is no such module.
        DynamicShapeError: An op has a dimension without a static size.
    """
    return read_module(parse(data, origin), origin, trip_counts=trip_counts)


def parse(data: str | bytes, origin: str = "") -> Any:
    """Parse into an MLIR module.

    Raises:
        ProgramError: The data is no such module; the message gives the parser's line.
    """
    if not data.strip():
        raise ProgramError(
            "the program is empty", where=origin, hint="give StableHLO or HLO, text or bytecode"
        )
    if isinstance(data, str) and is_quantised(data):
        data = with_storage_types(data)
    try:
        return _jax_compat.parse_module(data)
    except ValueError as error:
        raise _parse_error(str(error), origin) from None


def _parse_error(message: str, origin: str) -> ProgramError:
    found = re.search(r'"-":(\d+):(\d+)\)?:\s*(?:error:\s*)?([^\n]*)', message)
    what = found[3] if found else (message.splitlines() or ["unknown error"])[-1]
    line = f":{found[1]}:{found[2]}" if found and found[1] != "0" else ""
    return ProgramError(
        f"cannot parse the program: {what}",
        where=f"{origin or 'program'}{line}",
        hint="expects StableHLO as text, MLIR bytecode or a portable artifact; is it complete?",
    )


def read_module(
    module: Any, origin: str = "", *, trip_counts: Mapping[str, int] | int | None = None
) -> Program:
    """As :func:`read_mlir`, for a parsed MLIR module."""
    try:
        with module.context, _paused_collection():
            program = ModuleReader(module, origin).read()
    except (UnicodeDecodeError, RuntimeError) as error:
        # Damaged bytecode can hold names that are no text, or regions nested without end.
        what = f"the program is damaged: {type(error).__name__}: {error}"
        raise ProgramError(what, where=origin) from error
    set_trip_counts(program, trip_counts)
    return program


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Without garbage collection: a large program makes many objects and no garbage (15 %)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
