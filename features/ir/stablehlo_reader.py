"""Reader of MLIR modules: StableHLO with func, chlo, sdy and mhlo, as text or bytecode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...common.collection import paused_collection
from ...common.errors import ProgramError
from .mlir.bindings import parse_module
from .mlir.opcodes import is_quantised, with_storage_types
from .mlir.reader import ModuleReader
from .program import Program
from .trip_counts import set_trip_counts

if TYPE_CHECKING:
    from jaxlib.mlir import ir


def parse(data: str | bytes, origin: str = "") -> ir.Module:
    """Parse an MLIR module.

    Args:
        data: MLIR text, MLIR bytecode, or a StableHLO portable artifact.
        origin: Its file, for messages.

    Raises:
        ProgramError: The data are not such a module; the message gives the parser's line.
    """
    if not data.strip():
        raise ProgramError(
            "the program is empty", where=origin, hint="give StableHLO or HLO, text or bytecode"
        )
    # Only text can be rewritten; the parser rejects bytecode with the quant dialect.
    if isinstance(data, str) and is_quantised(data):
        data = with_storage_types(data)
    try:
        return parse_module(data)
    except ValueError as error:
        raise parse_error(str(error), origin) from None


def parse_error(message: str, origin: str) -> ProgramError:
    """Make the error for a message of MLIR's parser."""
    # MLIR calls text without a file "-" and may print positions inside loc(…).
    match = re.search(r'"-":(\d+):(\d+)\)?:\s*(?:error:\s*)?([^\n]*)', message)
    what = match[3] if match else (message.splitlines() or ["unknown error"])[-1]
    line = f":{match[1]}:{match[2]}" if match and match[1] != "0" else ""
    return ProgramError(
        f"cannot parse the program: {what}",
        where=f"{origin or 'program'}{line}",
        hint="expects StableHLO as text, MLIR bytecode or a portable artifact; is it complete?",
    )


def read_module(
    module: ir.Module, origin: str = "", *, trip_counts: Mapping[str, int] | int | None = None
) -> Program:
    """Read a parsed MLIR module.

    Args:
        module: StableHLO.
        origin: Its file, for messages and for ops without a location.
        trip_counts: Counts for loops where none is inferred: one for all, or by loop.

    Returns:
        The program, with one computation for each function and each region.

    Raises:
        ProgramError: The module is damaged.
        DynamicShapeError: An op has a dimension without a static size.
    """
    try:
        with module.context, paused_collection():
            program = ModuleReader(module, origin).read()
    except (UnicodeDecodeError, RuntimeError) as error:
        # Damaged bytecode may have names that are not UTF-8, or endlessly nested regions. It may
        # parse and fail only when it is walked.
        what = f"the program is damaged: {type(error).__name__}: {error}"
        raise ProgramError(what, where=origin) from error
    set_trip_counts(program, trip_counts)
    return program
