"""The part of MLIR's Python bindings that the readers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Operation(Protocol):
    """An operation, as ``jaxlib.mlir.ir`` has it; values, types and locations print as MLIR text.

    Attributes:
        name: Dialect and name, such as ``stablehlo.add``.
        attributes: Mapping by name.
        operands: Values, which compare and hash by identity.
        results: Values.
        regions: Regions with blocks of operations.
        location: Where it came from.
        parent: Enclosing operation; ``None`` for the module.
    """

    name: str
    attributes: Any
    operands: Sequence[Any]
    results: Sequence[Any]
    regions: Sequence[Any]
    location: Any
    parent: Any
