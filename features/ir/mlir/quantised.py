"""Quantised programs as text, for a parser without the ``quant`` dialect.

JAX's MLIR leaves the dialect out and its verifier refuses what it cannot interpret. FLOPs and bytes
depend on the storage type alone, so quantised types become their storage integers, and the two
conversion ops get a dialect that nothing verifies. Lines stay where they are.
"""

from __future__ import annotations

import re

# ``!quant.uniform<i8:f32, 0.1:-3>``; one level of nested brackets (axes, scales).
_TYPE = re.compile(r"!quant\.\w+<\s*([iu]\d+)(?:[^<>]|<[^<>]*>)*>")
# Both the pretty form (`stablehlo.uniform_quantize %x : …`) and the generic one in quotes.
_CONVERSION = re.compile(
    r'"?stablehlo\.(uniform_(?:de)?quantize)"?(?:\s+(%[\w#$.\-]+)|(?=\s*\())(?:\s*:)?'
)
#: Dialect that stands in for ``stablehlo`` in names of the conversions.
STORAGE = "quantised_storage."


def is_quantised(text: str) -> bool:
    """Return whether a text uses quantised types."""
    return "!quant." in text


def with_storage_types(text: str) -> str:
    """Replace quantised types by their storage integers and set the conversions aside."""
    text = _TYPE.sub(_storage, text)
    return _CONVERSION.sub(_conversion, text)


def _storage(match: re.Match[str]) -> str:
    kind = match[1]
    return f"u{kind.replace('u', 'i')}" if kind.startswith("u") else kind


def _conversion(match: re.Match[str]) -> str:
    name = f'"{STORAGE}{match[1]}"'
    return f"{name}({match[2]}) :" if match[2] else name


def original_name(name: str) -> str:
    """Name of an op as the user wrote it."""
    return name.replace(STORAGE, "stablehlo.", 1) if name.startswith(STORAGE) else name
