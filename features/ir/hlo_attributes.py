"""Types and attribute values of HLO text: one function per notation, with cached results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .dtypes import DTYPE_BITS
from .program import TensorType, WindowDim, constant_value

#: A quoted string, as a regular expression.
QUOTED = r'"(?:[^"\\]++|\\.)*+"'


def _braces(depth: int) -> str:
    """Build a pattern for text in braces up to ``depth`` deep; ``re`` has no recursion."""
    inner = rf"|{_braces(depth - 1)}" if depth else ""
    return rf'\{{(?:[^{{}}"]++|{QUOTED}{inner})*+\}}'


#: Depth by judgement: more than twice as deep as the modules in the tests. Possessive quantifiers
#: keep the match linear.
_BRACES = _braces(12)
# A value without quotes or braces ends at a comma outside brackets.
_PLAIN = r'(?:[^,\[\](){}"]++|\[[^\]]*+\]|\([^)]*+\)|\{[^}]*+\})++'
# Replica groups by the axes of a mesh whose devices are in another order, which has a comma outside
# brackets: ``mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}``.
_MESH = r"mesh\[[^\]]*+\],\s*device_ids=\((?:\[[\d,]*\](?:T\([\d,]*\))?|[\d,]*)\)\s*\{[^}]*+\}"
#: One attribute: ``, key=value``.
ATTRIBUTE = re.compile(rf",\s*([\w\-.]+)=({QUOTED}|{_BRACES}|{_MESH}|{_PLAIN})", re.DOTALL)
# One array type: ``bf16[8,128]{1,0:T(8,128)S(1)}``, layout and tiles optional.
_LEAF = re.compile(r"([A-Za-z]\w*)\[([^\]]*)\](?:\{([\d,\s]*)([^}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_INTEGER = re.compile(r"-?\d+")
_INTEGER_TUPLE = re.compile(r"\{[\s\d,-]*\}")
# ``[start:limit:stride]``, the stride optional.
_SLICE = re.compile(r"\[\s*(\d+)\s*:\s*(\d+)\s*(?::\s*(\d+))?\s*\]")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|-?inf|nan")
# A complex number in parentheses, or a bare one.
_NUMBER = re.compile(r"\(([^()]*)\)|([^\s,{}()]+)")
# Octal, hexadecimal, or a single character, as C++ escapes strings.
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


@lru_cache(maxsize=65536)
def read_type(text: str) -> tuple[tuple[TensorType, ...], bool, str]:
    """Read an array or tuple type.

    Args:
        text: For example ``f32[8,128]{1,0:T(8,128)S(1)}`` or ``(s32[], (f32[2]{0}))``.

    Returns:
        Leaf types, whether it is a tuple, and the nesting (``(*(*))``) if it is a tuple of
        tuples, otherwise an empty string. Row-major layouts become ``None``; tiles are left out.

    Raises:
        ValueError: The text is not a type, or a dimension has no static size.
    """
    leaves = tuple(_leaf(*m.groups(default="")) for m in _LEAF.finditer(text))
    skeleton = re.sub(r"[\s,]", "", _LEAF.sub("*", text))
    if skeleton == "*":
        return leaves, False, ""
    # The skeleton keeps the parentheses and a star for each leaf.
    if not re.fullmatch(r"\([*()]*\)", skeleton) or skeleton.count("(") != skeleton.count(")"):
        raise ValueError(f"cannot read the type {text!r}")
    flat = skeleton == "(" + "*" * len(leaves) + ")"
    return leaves, True, "" if flat else skeleton


def _leaf(dtype: str, dims: str, layout: str, tiles: str) -> TensorType:
    if dtype not in DTYPE_BITS:
        raise ValueError(f"unknown element type {dtype!r}")
    if "?" in dims:
        raise ValueError(f"dimension without a static size in {dtype}[{dims}]")
    shape = tuple(map(int, _INTEGER.findall(dims)))
    order = tuple(map(int, _INTEGER.findall(layout)))
    # A layout that is no permutation would fail far from here.
    if order and sorted(order) != list(range(len(shape))):
        raise ValueError(f"layout {{{layout}}} does not order the dimensions of {dtype}[{dims}]")
    row_major = order == tuple(range(len(shape) - 1, -1, -1))
    space = _MEMORY_SPACE.search(tiles)
    return TensorType(
        dtype, shape, None if row_major or not order else order, int(space[1]) if space else 0
    )


def unquote(text: str) -> str:
    """Return the value of a quoted string with C escapes."""
    body = text[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    octal, hexadecimal, char = match.groups()
    if octal:
        return chr(int(octal, 8))
    return chr(int(hexadecimal, 16)) if hexadecimal else _ESCAPED.get(char, char)


def read_int_tuple(text: str) -> tuple[int, ...]:
    """Read ``{1,2}`` as ``(1, 2)``."""
    return tuple(map(int, _INTEGER.findall(text)))


def read_int_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read ``{{0,1},{2,3}}`` as ``((0, 1), (2, 3))``."""
    return tuple(read_int_tuple(group) for group in re.findall(r"\{([^{}]*)\}", text[1:-1]))


def read_slice(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read ``{[0:8:2], [1:4]}`` as ``((0, 8, 2), (1, 4, 1))``."""
    return tuple((int(a), int(b), int(s or 1)) for a, b, s in _SLICE.findall(text))


def read_padding(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read ``0_0x1_2_3`` as ``((0, 0, 0), (1, 2, 3))``."""
    padding = []
    for item in text.split("x"):
        low, high, *interior = map(int, item.split("_"))
        padding.append((low, high, interior[0] if interior else 0))
    return tuple(padding)


def read_window(text: str) -> tuple[WindowDim, ...]:
    """Read ``{size=3x3 pad=1_1x1_1 stride=2x2}`` as a :class:`WindowDim` for each dimension."""
    fields = dict(item.split("=", 1) for item in text.strip("{}").split())
    if "size" not in fields:
        return ()
    sizes = fields["size"].split("x")

    def values(key: str, default: str) -> list[str]:
        given = fields[key].split("x") if key in fields else [default] * len(sizes)
        if len(given) != len(sizes):
            raise ValueError(f"{key} of the window {text} has a different rank than its size")
        return given

    columns = zip(
        sizes,
        values("stride", "1"),
        values("pad", "0_0"),
        values("lhs_dilate", "1"),
        values("rhs_dilate", "1"),
        values("rhs_reversal", "0"),
        strict=True,
    )
    dims = []
    for size, stride, pad, lhs, rhs, flip in columns:
        low, high = pad.split("_")
        dim = WindowDim(
            int(size), int(stride), int(low), int(high), int(lhs), int(rhs), flip == "1"
        )
        dims.append(dim)
    return tuple(dims)


def read_backend_config(text: str) -> dict[str, Any] | str:
    """Read a dictionary if the (quoted or plain) text is a JSON object, otherwise the text."""
    plain = unquote(text) if text.startswith('"') else text
    if plain.startswith("{"):
        try:
            config = json.loads(plain)
        except ValueError:
            return plain
        if isinstance(config, dict):
            return config
    return plain


def read_value(text: str) -> object:
    """Read an attribute without a special notation: bool, number, tuple or string."""
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"'):
        return unquote(text)
    if _INTEGER.fullmatch(text):
        return int(text)
    if _INTEGER_TUPLE.fullmatch(text):
        return read_int_tuple(text)
    if re.fullmatch(r"\{(?:\{[\d,\s-]*\},?\s*)+\}", text):
        return read_int_groups(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def read_literal(text: str, shape: TensorType) -> object:
    """Value of a constant.

    Args:
        text: The text between the parentheses of ``constant(...)``.
        shape: Its type.

    Returns:
        A scalar for scalars and splats, a flat row-major list up to 64 elements, otherwise
        (also where the text is elided) ``None``.

    Raises:
        ValueError: An element is not a number.
    """
    # XLA elides large constants as {...}.
    if "..." in text:
        return None
    # Chosen as text, so that long constants are not converted.
    kept = constant_value([a or b for a, b in _NUMBER.findall(text)])
    if kept is None:
        return None
    convert = _complex if shape.dtype[0] == "c" else _number(shape.dtype)
    return [convert(item) for item in kept] if isinstance(kept, list) else convert(kept)


def _number(dtype: str) -> Callable[[str], bool | int | float]:
    if dtype == "pred":
        return lambda text: text in ("true", "1")
    return int if dtype[0] in "su" else _float


def _float(text: str) -> float:
    # One NaN object, so that programs compare equal: containers compare by identity first.
    return math.nan if "nan" in text else float(text)


def _complex(text: str) -> complex:
    real, _, imaginary = text.partition(",")
    return complex(_float(real), _float(imaginary) if imaginary else 0.0)


#: Reader of an attribute's text, for the attributes that have a notation of their own.
READERS: dict[str, Callable[[str], object]] = {
    "slice": read_slice,
    "padding": read_padding,
    "window": read_window,
    "source_target_pairs": read_int_groups,
    "dim_labels": str,
    "sharding": str,
    "frontend_attributes": str,
    "custom_call_target": unquote,
}


@lru_cache(maxsize=65536)
def read_attribute(key: str, text: str) -> object:
    """Value of attribute ``key``; the result is shared, hence immutable.

    Raises:
        ValueError: The text does not fit the attribute.
    """
    return READERS.get(key, read_value)(text)
