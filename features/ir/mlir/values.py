"""Python values of printed MLIR types and attributes."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..program import DTYPE_BITS, NUMPY_NAMES, PARTS, TensorType, constant_value

# Attributes as printed by MLIR: ``3 : i64``, ``1.0e-05 : f32``, ``array<i64: 1, 2>``,
# ``dense<[1, 2]> : tensor<2xi64>``, ``#stablehlo.gather<offset_dims = [1], …>``.
_NUMBER = re.compile(r"(-?\d+)(?: : \w+)?$")
_FLOAT = re.compile(r"(-?\d+\.\d*(?:[eE][-+]?\d+)?)(?: : \w+)?$")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)
_ARRAY = re.compile(r"array<(\w+)(?:: (.*))?>$", re.DOTALL)
_DENSE = re.compile(r"dense<(.*)> : \w+<((?:\d+x)*)(\w+)>$", re.DOTALL)
# Such as `#stablehlo<comparison_direction LT>`.
_ENUM = re.compile(r"#\w+<\w+ (\w+)>$")
_STRUCT = re.compile(r"#[\w.]+<(.*)>$", re.DOTALL)
_ELEMENT = re.compile(r"0x[0-9A-Fa-f]+|true|false|-?\d[\d.]*(?:[eE][-+]?\d+)?")
#: Element types of dense attributes that are read as tuples; others stay text.
_DTYPES = {"i64": "<i8", "i32": "<i4", "i8": "<i1", "i1": "?", "index": "<i8"}
# Strings and arrows are matched first, so that brackets within them do not count.
_SPLIT = re.compile(r'"(?:[^"\\]|\\.)*"|->|[\[\](){}<>,=]')
# ``tensor<8x128xf32>``: dimensions, then the element type and the rest.
_SHAPED = re.compile(r"(?:tensor|vector|memref)<((?:[?\d]+x)*)(.*)>$", re.DOTALL)
_QUANTIZED = re.compile(r"!quant\.\w+<([iu])(\d+)")
_INTEGER = re.compile(r"([su]?)i(\d+)$")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
#: Integer widths of XLA.
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class Symbol(str):
    """A reference to a symbol without the ``@``."""

    __slots__ = ()


class Raw(NamedTuple):
    """An attribute without a Python counterpart, as text."""

    text: str


def read_value(text: str) -> Any:
    """Read the Python value of an attribute.

    Integers, floats, booleans and strings keep their type. Arrays and dense integer elements become
    tuples (nested for several dimensions). Dictionaries and dialect structures
    (``#stablehlo.gather<offset_dims = [1], …>``) become dictionaries, enumerations
    (``#stablehlo<comparison_direction LT>``) the name of their value, references
    :class:`Symbol`, and anything else :class:`Raw`.
    """
    if match := _NUMBER.match(text):
        return int(match[1])
    head = text[:1]
    if head == '"':
        return _string(text)
    if head == "@":
        return Symbol(text.rsplit("@", 1)[-1].strip('"'))
    if head == "[":
        return tuple(read_value(part) for part in split_top(text[1:-1]))
    if head == "{":
        return _dictionary(text[1:-1])
    if head == "#":
        return _dialect_attribute(text)
    if text in ("true", "false", "unit"):
        return text != "false"
    if match := _FLOAT.match(text):
        return float(match[1])
    if match := _ARRAY.match(text):
        return tuple(read_value(part) for part in split_top(match[2] or ""))
    if text.startswith("dense<"):
        return _dense(text)
    return Raw(text)


def _string(text: str) -> str | Raw:
    match = _STRING.match(text)
    if match is None:
        return Raw(text)
    body = match[1]
    if "\\" not in body:
        return body
    data = _ESCAPE.sub(_unescape, body.encode())
    return data.decode("utf-8", "replace")


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 2:
        return bytes((int(code, 16),))
    return {b"n": b"\n", b"t": b"\t"}.get(code, code)


def _dictionary(body: str) -> dict[str, object]:
    entries: dict[str, object] = {}
    for entry in split_top(body):
        key, *value = split_top(entry, "=") if "=" in entry else [entry]
        # Only the first sign separates; values may contain more of them in brackets.
        entries[key.strip('"')] = read_value("=".join(value)) if value else True
    return entries


def _dialect_attribute(text: str) -> object:
    if match := _ENUM.match(text):
        return match[1]
    match = _STRUCT.match(text)
    # ir/replica_groups.py reads all notations of replica groups.
    if match is None or ".replica_group_mesh_axes<" in text:
        return Raw(text)
    entries = split_top(match[1])
    if entries and all(re.match(r"\w+\s*=[^=]", entry) for entry in entries):
        return _dictionary(match[1])
    return Raw(text)


def _dense(text: str) -> object:
    match = _DENSE.match(text)
    if match is None:
        return Raw(text)
    body, dims, element = match.groups()
    shape = tuple(map(int, dims.split("x")[:-1]))
    if element not in _DTYPES:
        return Raw(text)
    # MLIR prints large dense attributes as little-endian hexadecimal bytes.
    if body.startswith('"0x'):
        values = np.frombuffer(bytes.fromhex(body[3:-1]), dtype=_DTYPES[element])
    else:
        values = np.asarray(json.loads(body) if body else [], dtype=_DTYPES[element])
    size = math.prod(shape)
    # A splat is printed as a single element.
    if values.size == 1 and size != 1:
        values = np.full(size, values.reshape(-1)[0])
    return _nested(values.reshape(shape).tolist())


def _nested(value: object) -> object:
    return tuple(_nested(item) for item in value) if isinstance(value, list) else value


def read_literal(text: str, kind: TensorType) -> object:
    """Read the value of a constant from its ``dense<…>`` text.

    Returns:
        A scalar for scalars and splats, a flat row-major list for up to 64 elements, else ``None``.
    """
    if not text.startswith("dense<"):
        return None
    body = text[6 : text.rfind("> : ")]
    # Hexadecimal or elided: no rule needs the values of large constants.
    if '"' in body or "__elided__" in body:
        return None
    parts = [_element(item, kind.dtype) for item in _ELEMENT.findall(body)]
    elements: list[object] = list(parts)
    if kind.dtype in PARTS:
        elements = [complex(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return constant_value(elements)


def _element(text: str, dtype: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    if dtype[0] in "su" or dtype == "pred":
        return int(text, 0)
    if text.startswith("0x"):
        value = _from_bits(int(text, 16), dtype)
        # A shared NaN object lets programs compare equal: containers compare by identity first.
        return math.nan if math.isnan(value) else value
    return float(text)


def _from_bits(bits: int, dtype: str) -> float:
    """Decode a float that MLIR prints as bits: infinities, NaN and small formats."""
    import ml_dtypes

    name = NUMPY_NAMES[PARTS.get(dtype, dtype)]
    kind = getattr(ml_dtypes, name, None) or getattr(np, name, None)
    if kind is None:
        return math.nan
    return float(np.array([bits], f"u{np.dtype(kind).itemsize}").view(kind)[0])


class DynamicDimensionError(ValueError):
    """A type has a dimension without a static size, or no rank."""


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside of brackets and string literals, and strip the parts.

    The arrow of function types and convolution labels is not a bracket.
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


@lru_cache(maxsize=65536)
def read_types(text: str) -> tuple[tuple[TensorType, ...], bool]:
    """Read the leaf types of an MLIR type and whether it is a tuple.

    Args:
        text: Such as ``tensor<8x128xf32>``, ``!stablehlo.token`` or ``tuple<tensor<f32>>``.

    Raises:
        DynamicDimensionError: A dimension is ``?``, or the rank is unknown.
    """
    # Asynchronous values are read like tuples of their future contents.
    if text.startswith(("tuple<", "!stablehlo.future<", "!mhlo.async_bundle<")):
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
    """Return the HLO name of an element type; for quantised types, the storage integer's."""
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
    # MLIR's index type is as wide as a pointer.
    if text == "index":
        return "s64"
    # TF32 is stored in 32 bits.
    if text == "tf32":
        return "f32"
    if text.endswith(".token") or text in ("none", "token"):
        return "token"
    lower = text.lower()
    return lower if lower in DTYPE_BITS else "opaque"
