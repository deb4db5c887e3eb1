"""HLO opcodes for ops of MLIR dialects, and quantised programs for a parser without them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ..op_table import OPS, named

#: HLO opcodes that differ from the StableHLO name with dashes.
_RENAMED = {short: name for name, spec in OPS.items() for short in spec.stablehlo.split()}
#: Calls in other dialects. A manual computation is a call whose body has the shapes of one device.
_CALLS = frozenset(
    ("func.call", "call", "sdy.manual_computation", "sdy.named_computation", "mhlo.fusion")
)
#: Ops without an HLO opcode.
_NOT_IN_HLO = named("not_in_hlo")
#: Ops whose result shape is known only at run time.
_DYNAMIC = named("dynamic")
#: Ops that end a region, and those that jump between blocks, which HLO cannot express.
_TERMINATORS = frozenset(("func.return", "stablehlo.return", "mhlo.return", "sdy.return", "return"))
_UNSTRUCTURED = frozenset(("cf.br", "cf.cond_br", "cf.switch"))
_HLO_DIALECTS = frozenset(("stablehlo", "mhlo"))
# Quantised programs need a parser without the ``quant`` dialect, as JAX does not include it and its
# verifier rejects what it cannot interpret. FLOPs and bytes only depend on the storage type, so
# quantised types are replaced by their storage integers, and the two conversion ops are moved to a
# dialect without a verifier. Line numbers do not change.
# ``!quant.uniform<i8:f32, 0.1:-3>`` with one level of nested brackets (axes, scales).
_TYPE = re.compile(r"!quant\.\w+<\s*([iu]\d+)(?:[^<>]|<[^<>]*>)*>")
# The pretty form (`stablehlo.uniform_quantize %x : …`) and the generic one in quotes.
_CONVERSION = re.compile(
    r'"?stablehlo\.(uniform_(?:de)?quantize)"?(?:\s+(%[\w#$.\-]+)|(?=\s*\())(?:\s*:)?'
)
#: Replaces ``stablehlo.`` in the names of the conversions.
STORAGE = "quantised_storage."


class OpKind(NamedTuple):
    """Properties of an op that follow from its name.

    Attributes:
        name: Name in the user's program.
        opcode: HLO opcode; the full name if HLO has none (``chlo.erfc``).
        is_terminator: Whether it ends a region and returns its results.
        is_unstructured: Whether it jumps between blocks.
        is_dynamic: Whether its result shape is known only at run time.
        may_call: Whether its attributes may name called functions.
    """

    name: str
    opcode: str
    is_terminator: bool
    is_unstructured: bool
    is_dynamic: bool
    may_call: bool


@lru_cache(maxsize=4096)
def op_kind(name: str) -> OpKind:
    """Classify an op by its name."""
    name = original_name(name)
    dialect, _, short = name.partition(".")
    opcode = hlo_opcode(name)
    known = dialect in _HLO_DIALECTS
    return OpKind(
        name=name,
        opcode=opcode,
        is_terminator=name in _TERMINATORS,
        is_unstructured=name in _UNSTRUCTURED,
        is_dynamic=known and short in _DYNAMIC,
        may_call=not known or opcode in ("call", "custom-call"),
    )


def hlo_opcode(name: str) -> str:
    """Return the HLO opcode of an MLIR op; its full name if HLO has none (``chlo.erfc``)."""
    dialect, _, short = name.partition(".")
    if name in _CALLS:
        return "call"
    if dialect in _HLO_DIALECTS and short not in _NOT_IN_HLO:
        return _RENAMED.get(short) or short.replace("_", "-")
    return _RENAMED.get(name, name)


def is_quantised(text: str) -> bool:
    """Return whether a text uses quantised types."""
    return "!quant." in text


def with_storage_types(text: str) -> str:
    """Replace quantised types by their storage integers, and rename the conversions."""
    text = _TYPE.sub(_storage, text)
    return _CONVERSION.sub(_conversion, text)


def _storage(match: re.Match[str]) -> str:
    kind = match[1]
    return f"u{kind.replace('u', 'i')}" if kind.startswith("u") else kind


def _conversion(match: re.Match[str]) -> str:
    name = f'"{STORAGE}{match[1]}"'
    return f"{name}({match[2]}) :" if match[2] else name


def original_name(name: str) -> str:
    """Return the name of an op in the user's program."""
    return name.replace(STORAGE, "stablehlo.", 1) if name.startswith(STORAGE) else name
