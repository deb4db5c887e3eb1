"""MLIR types in text form to the IR's :class:`TensorType`."""

from __future__ import annotations

import re
from functools import lru_cache

from ..dtypes import DTYPE_BITS
from ..program import TensorType

# ``tensor<8x128xf32>``: dimensions, then the element type with what follows it.
_SHAPED = re.compile(r"(?:tensor|vector|memref)<((?:[?\d]+x)*)(.*)>$", re.DOTALL)
_QUANTIZED = re.compile(r"!quant\.\w+<([iu])(\d+)")
_INTEGER = re.compile(r"([su]?)i(\d+)$")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
#: Widths of integers that XLA has.
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class DynamicDimensionError(ValueError):
    """A type has a dimension without a static size, or no rank."""


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that are outside brackets and string literals, and strip.

    The arrow of function types and convolution labels does not count as a bracket.
    """
    parts: list[str] = []
    depth = start = 0
    for token in _SPLIT.finditer(text):
        char = token[0]
        if char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


# Strings and arrows are matched first, so that brackets within them do not count.
_SPLIT = re.compile(r'"(?:[^"\\]|\\.)*"|->|[\[\](){}<>,=]')


@lru_cache(maxsize=65536)
def read_types(text: str) -> tuple[tuple[TensorType, ...], bool]:
    """Read the leaf types of one MLIR type and whether it is a tuple.

    Args:
        text: For example ``tensor<8x128xf32>``, ``!stablehlo.token`` or ``tuple<tensor<f32>>``.

    Raises:
        DynamicDimensionError: A dimension is ``?``, or the rank is unknown.
    """
    if text.startswith("tuple<"):
        parts = [read_types(part)[0] for part in split_top(text[6:-1])]
        return tuple(leaf for part in parts for leaf in part), True
    # Asynchronous values are read like tuples of what they will hold.
    if text.startswith(("!stablehlo.future<", "!mhlo.async_bundle<")):
        parts = [read_types(part)[0] for part in split_top(text[text.index("<") + 1 : -1])]
        return tuple(leaf for part in parts for leaf in part), True
    match = _SHAPED.match(text)
    if match is None:
        return (TensorType(_dtype(text)),), False
    dims, rest = match.groups()
    if "?" in dims or rest.startswith("*"):
        raise DynamicDimensionError(text)
    element = split_top(rest)[0]
    return (TensorType(_dtype(element), tuple(map(int, dims.split("x")[:-1]))),), False


@lru_cache(maxsize=1024)
def _dtype(text: str) -> str:
    """Return the HLO name of an element type; a quantised type is stored as its integer type."""
    if text in _COMPLEX:
        return _COMPLEX[text]
    if match := _QUANTIZED.match(text):
        sign, bits = match.groups()
        return f"{'u' if sign == 'u' else 's'}{bits}"
    if match := _INTEGER.match(text):
        if text == "i1":
            return "pred"
        # Odd widths (i3, i17) are stored in the next wider type.
        width = next((w for w in _WIDTHS if w >= int(match[2])), 64)
        return f"{'u' if match[1] == 'u' else 's'}{width}"
    # MLIR's index type has the width of a pointer.
    if text == "index":
        return "s64"
    # TF32 is stored in 32 bits.
    if text == "tf32":
        return "f32"
    if text.endswith(".token") or text in ("none", "token"):
        return "token"
    lower = text.lower()
    return lower if lower in DTYPE_BITS else "opaque"
