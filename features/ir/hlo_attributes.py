"""Types, attribute values and the header of HLO text, with one function per notation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...common.types import JsonObject
from .mlir.locations import FRAMEWORK, STARTS
from .program import COLLECTIVES, DTYPE_BITS, Program, Source, TensorType, WindowDim, constant_value

#: A quoted string, as a regular expression.
QUOTED = r'"(?:[^"\\]++|\\.)*+"'


def _braces(depth: int) -> str:
    """Build a pattern for text in braces nested up to ``depth`` deep (``re`` has no recursion)."""
    inner = rf"|{_braces(depth - 1)}" if depth else ""
    return rf'\{{(?:[^{{}}"]++|{QUOTED}{inner})*+\}}'


#: Depth chosen by judgement: more than twice the deepest nesting in the test modules. Possessive
#: quantifiers keep the match linear.
_BRACES = _braces(12)
# A value without quotes or braces, which ends at a comma outside brackets.
_PLAIN = r'(?:[^,\[\](){}"]++|\[[^\]]*+\]|\([^)]*+\)|\{[^}]*+\})++'
# Replica groups written as axes of a mesh with reordered devices, which contain a comma outside
# brackets: ``mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}``.
_MESH = r"mesh\[[^\]]*+\],\s*device_ids=\((?:\[[\d,]*\](?:T\([\d,]*\))?|[\d,]*)\)\s*\{[^}]*+\}"
#: One attribute: ``, key=value``.
ATTRIBUTE = re.compile(rf",\s*([\w\-.]+)=({QUOTED}|{_BRACES}|{_MESH}|{_PLAIN})", re.DOTALL)
# One array type: ``bf16[8,128]{1,0:T(8,128)S(1)}``, with optional layout and tiles.
_LEAF = re.compile(r"([A-Za-z]\w*)\[([^\]]*)\](?:\{([\d,\s]*)([^}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_INTEGER = re.compile(r"-?\d+")
_INTEGER_TUPLE = re.compile(r"\{[\s\d,-]*\}")
# ``[start:limit:stride]`` with an optional stride.
_SLICE = re.compile(r"\[\s*(\d+)\s*:\s*(\d+)\s*(?::\s*(\d+))?\s*\]")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|-?inf|nan")
# A complex number in parentheses, or a plain number.
_NUMBER = re.compile(r"\(([^()]*)\)|([^\s,{}()]+)")
# An octal, hexadecimal or single-character escape of C++ strings.
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
#: Fields of a window in the order of :class:`WindowDim`, each with its default.
WINDOW = {
    "size": "", "stride": "1", "pad": "0_0",
    "lhs_dilate": "1", "rhs_dilate": "1", "rhs_reversal": "0",
}  # fmt: skip
_MODULE = re.compile(r"HloModule\s+([^\s,]+)")
# ``{0}: (2, {}, may-alias)``: output 0 shares the buffer of parameter 2.
_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+)")
# ``(2, {})``: any output may reuse the buffer of parameter 2.
_DONOR = re.compile(r"\((\d+),")
# ``op_name="jit(f)/add" source_line=3``.
_FIELD = re.compile(rf"(\w+)=({QUOTED}|\S+)")
#: Tables between the header and the first computation; each refers to earlier ones.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_GROUPS: dict[str, object] = {
    "replica_groups": (), "channel_id": None, "use_global_device_ids": False
}  # fmt: skip
#: Values of attributes that an instruction leaves out, by opcode.
DEFAULTS: dict[str, dict[str, object]] = {
    "dot": {
        "lhs_contracting_dims": (),
        "rhs_contracting_dims": (),
        "lhs_batch_dims": (),
        "rhs_batch_dims": (),
    },
    "convolution": {"window": (), "feature_group_count": 1, "batch_group_count": 1},
    **dict.fromkeys(COLLECTIVES, _GROUPS),
    **dict.fromkeys((f"{name}-start" for name in COLLECTIVES), _GROUPS),
}

Tables = dict[str, dict[int, str]]


@lru_cache(maxsize=65536)
def read_type(text: str) -> tuple[tuple[TensorType, ...], bool, str]:
    """Read an array or tuple type.

    Args:
        text: Such as ``f32[8,128]{1,0:T(8,128)S(1)}`` or ``(s32[], (f32[2]{0}))``.

    Returns:
        The leaf types, whether the type is a tuple, and the nesting (``(*(*))``) of a tuple of
        tuples, otherwise an empty string. Row-major layouts become ``None``; tiles are dropped.

    Raises:
        ValueError: The text is not a type, or a dimension has no static size.
    """
    leaves = tuple(_leaf(*m.groups(default="")) for m in _LEAF.finditer(text))
    skeleton = re.sub(r"[\s,]", "", _LEAF.sub("*", text))
    if skeleton == "*":
        return leaves, False, ""
    # The skeleton consists of the parentheses and a star for each leaf.
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
    # Checked here because a layout that is no permutation would fail much later.
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
    """Read ``{size=3x3 pad=1_1x1_1 stride=2x2}`` into one :class:`WindowDim` per dimension."""
    fields = dict(item.split("=", 1) for item in text.strip("{}").split())
    if "size" not in fields:
        return ()
    rank = len(fields["size"].split("x"))
    columns = []
    for key, default in WINDOW.items():
        columns.append(fields[key].split("x") if key in fields else [default] * rank)
        if len(columns[-1]) != rank:
            raise ValueError(f"{key} of the window {text} has a different rank than its size")
    dims = []
    for size, stride, pad, lhs, rhs, flip in zip(*columns, strict=True):
        low, high = map(int, pad.split("_"))
        dims.append(WindowDim(int(size), int(stride), low, high, int(lhs), int(rhs), flip == "1"))
    return tuple(dims)


def read_backend_config(text: str) -> JsonObject | str:
    """Return a dictionary if the (quoted or plain) text is a JSON object, otherwise the text."""
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
    """Read an attribute without its own notation: bool, number, tuple or string."""
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
    """Read the value of a constant.

    Args:
        text: The text inside the parentheses of ``constant(...)``.
        shape: The type of the constant.

    Returns:
        A scalar for scalars and splats, a flat row-major list for up to 64 elements, otherwise
        (and where the text is elided) ``None``.

    Raises:
        ValueError: An element is not a number.
    """
    # XLA elides large constants as {...}.
    if "..." in text:
        return None
    # Selected as text, so that long constants are not converted.
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
    # A shared NaN object lets programs compare equal: containers compare by identity first.
    return math.nan if "nan" in text else float(text)


def _complex(text: str) -> complex:
    real, _, imaginary = text.partition(",")
    return complex(_float(real), _float(imaginary) if imaginary else 0.0)


#: Readers of the attributes that have their own notation.
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
    """Read the value of attribute ``key``; results are cached and shared, hence immutable.

    Raises:
        ValueError: The text does not fit the attribute.
    """
    return READERS.get(key, read_value)(text)


class Frame(NamedTuple):
    """A line of user code."""

    file: str = ""
    line: int = 0


class Sources:
    """Reader of ``metadata={...}`` that caches equal texts."""

    def __init__(self, frames: Mapping[int, Frame]) -> None:
        self._frames = frames
        self._known: dict[str, Source | None] = {}

    def read(self, text: str) -> Source | None:
        """Return the source of an op, given the text between the braces."""
        if text not in self._known:
            self._known[text] = self._read(text)
        return self._known[text]

    def _read(self, text: str) -> Source | None:
        fields = dict(_FIELD.findall(text))
        name = unquote(fields.get("op_name", '""'))
        frame = self._frames.get(int(fields.get("stack_frame_id", 0)), Frame())
        # XLA versions before stack frames wrote file and line into each instruction.
        if "source_file" in fields:
            frame = Frame(unquote(fields["source_file"]), int(fields.get("source_line", 0)))
        return Source(name, frame.file, frame.line) if name or frame.file else None


def read_header(lines: Sequence[str], program: Program) -> tuple[int, Sources]:
    """Read everything before the first computation.

    Args:
        lines: All lines of the module.
        program: Receives the module's name and attributes.

    Returns:
        Index of the first computation's line, and a reader of metadata.

    Raises:
        ValueError: There is no ``HloModule`` line.
    """
    heads = (i for i, line in enumerate(lines) if line.lstrip().startswith("HloModule"))
    start = next(heads, -1)
    match = _MODULE.match(lines[start].strip()) if start >= 0 else None
    if match is None:
        raise ValueError("no HloModule line with a name")
    program.name = match[1]
    _module_attributes(dict(ATTRIBUTE.findall(match.string, match.end())), program)
    tables: Tables = {name: {} for name in _TABLES}
    table: dict[int, str] = {}
    for number in range(start + 1, len(lines)):
        text = lines[number].rstrip()
        if text.endswith("{"):
            return number, Sources(_frames(tables))
        head, _, rest = text.partition(" ")
        if text in tables:
            table = tables[text]
        # Table rows consist of a number and text.
        elif head.isdigit():
            table[int(head)] = rest
    return len(lines), Sources({})


def _module_attributes(attributes: Mapping[str, str], program: Program) -> None:
    program.is_scheduled = attributes.get("is_scheduled") == "true"
    program.num_replicas = int(attributes.get("replica_count", 1))
    program.num_partitions = int(attributes.get("num_partitions", 1))
    program.dialect = attributes.get("dialect", "hlo")
    aliases = _ALIAS.findall(attributes.get("input_output_alias", ""))
    program.aliases = tuple((int(o.split(",")[0] or 0), int(p)) for o, p in aliases)
    donors = _DONOR.findall(attributes.get("buffer_donor", ""))
    program.donors = tuple(int(number) for number in donors)
    meshes = read_backend_config(attributes.get("meshes", "{}"))
    program.meshes = meshes if isinstance(meshes, dict) else {}


def _frames(tables: Tables) -> dict[int, Frame]:
    """Return the innermost frame outside of frameworks, by stack frame number."""
    files = {key: unquote(value) for key, value in tables["FileNames"].items()}
    places = {}
    for key, value in tables["FileLocations"].items():
        fields = _int_fields(value)
        places[key] = Frame(files.get(fields.get("file_name_id", 0), ""), fields.get("line", 0))
    rows = {key: _int_fields(value) for key, value in tables["StackFrames"].items()}
    # XLA prints the parent's number plus one (1 means no parent). A zero occurs only in text that
    # prints the numbers unchanged.
    shift = 0 if any(row.get("parent_frame_id", 0) == 0 for row in rows.values()) else 1
    return {key: _user_frame(key, rows, places, shift) for key in rows}


def _user_frame(
    key: int, rows: Mapping[int, dict[str, int]], places: Mapping[int, Frame], shift: int
) -> Frame:
    innermost = places.get(rows[key].get("file_location_id", 0), Frame())
    frame, seen = innermost, {key}
    # Go outwards to user code; `seen` ends cycles in damaged tables.
    while FRAMEWORK.search(frame.file):
        key = rows[key].get("parent_frame_id", 0) - shift
        if key in seen or key not in rows:
            return Frame() if STARTS.search(innermost.file) else innermost
        seen.add(key)
        frame = places.get(rows[key].get("file_location_id", 0), Frame())
    return frame


def _int_fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
