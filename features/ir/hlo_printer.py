"""Canonical HLO text of a program: minimal, deterministic, and readable by ``parse_hlo``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any

from .hlo_attributes import DEFAULTS, WINDOW
from .program import Computation, Op, Program, TensorType, WindowDim

# Text that needs no quotes; read_value() would read the excluded words as other types.
_BARE = re.compile(r"(?!true$|false$|nan$|inf$)[A-Za-z_][\w.\-]*")
#: Attributes by which HLO names called computations; all other ops use ``to_apply``.
_CALLED = {
    "fusion": ("calls",),
    "async-start": ("calls",),
    "while": ("condition", "body"),
    "select-and-scatter": ("select", "scatter"),
}
#: Attribute values that ``parse_hlo`` restores if the text leaves them out.
_IMPLIED = {key: value for own in DEFAULTS.values() for key, value in own.items()}
# Printed elsewhere in the line, or implied by it.
_HIDDEN = frozenset(("backend_config", "index", "nesting", "number", "value"))


def print_hlo(program: Program) -> str:
    """Print HLO text that ``parse_hlo`` reads back to an equal program.

    Layouts are printed only if they are not row-major or name a memory space, and attributes, in
    alphabetical order, only if they differ from their defaults. Sources and ``origin`` are left
    out. Equal programs give equal text. Ops that HLO lacks keep the name of their dialect
    (``chlo.erf_inv``).

    Args:
        program: A program, including one read from StableHLO.

    Returns:
        The module text with one instruction per line.
    """
    lines = ["HloModule " + ", ".join([program.name or "module", *_module_attributes(program)])]
    for name, computation in program.computations.items():
        lines.append("")
        lines.append(f"ENTRY {name} {{" if name == program.entry else f"{name} {{")
        lines.extend(_instructions(computation))
        lines.append("}")
    return "\n".join(lines) + "\n"


def _module_attributes(program: Program) -> Iterable[str]:
    if program.dialect != "hlo":
        yield f"dialect={program.dialect}"
    if program.is_scheduled:
        yield "is_scheduled=true"
    if program.aliases:
        pairs = ", ".join(f"{{{o}}}: ({p}, {{}}, may-alias)" for o, p in program.aliases)
        yield f"input_output_alias={{ {pairs} }}"
    if program.num_replicas != 1:
        yield f"replica_count={program.num_replicas}"
    if program.num_partitions != 1:
        yield f"num_partitions={program.num_partitions}"
    if program.meshes:
        yield f"meshes={_json(program.meshes)}"


def _instructions(computation: Computation) -> Iterable[str]:
    ops = computation.ops
    root = computation.root % len(ops) if ops else 0
    names = [op.name for op in ops]
    for i, op in enumerate(ops):
        attrs = op.attrs
        if op.opcode == "parameter":
            inside = str(attrs["index"])
        elif op.opcode == "constant":
            inside = _literal(attrs.get("value"), op.results[0]) if op.results else ""
        else:
            inside = ", ".join([names[j] for j in op.operands])
        head = "  ROOT " if i == root else "  "
        text = f"{head}{op.name} = {_result(op)} {op.opcode}({inside})"
        if op.called:
            text += _called(op)
        if attrs:
            text += _attributes(op)
        yield text


@lru_cache(maxsize=65536)
def _type(leaf: TensorType) -> str:
    dims = ",".join(map(str, leaf.shape))
    row_major = tuple(range(len(leaf.shape) - 1, -1, -1))
    layout = row_major if leaf.layout is None else leaf.layout
    space = f":S({leaf.memory_space})" if leaf.memory_space else ""
    if layout == row_major and not space:
        return f"{leaf.dtype}[{dims}]"
    return f"{leaf.dtype}[{dims}]{{{','.join(map(str, layout))}{space}}}"


def _result(op: Op) -> str:
    if not op.is_tuple:
        return _type(op.results[0])
    nesting = op.attrs.get("nesting")
    if not nesting:
        return f"({', '.join([_type(leaf) for leaf in op.results])})"
    # The nesting "(*(*))" with each star replaced by a type and commas between neighbours.
    leaves = iter(op.results)
    text = re.sub(r"\*", lambda _: _type(next(leaves)) + ",", nesting)
    return re.sub(r",(?=\))", "", re.sub(r"\)(?=[^)])", "),", text)).replace(",,", ",")


def _called(op: Op) -> str:
    keys = _CALLED.get(op.opcode)
    if op.opcode == "conditional":
        return f", branch_computations={{{', '.join(op.called)}}}"
    if op.opcode == "custom-call" or (keys is None and len(op.called) > 1):
        return f", called_computations={{{', '.join(op.called)}}}"
    return "".join(f", {k}={n}" for k, n in zip(keys or ("to_apply",), op.called, strict=True))


def _attributes(op: Op) -> str:
    text = ""
    attrs = op.attrs
    for key in sorted(attrs):
        value = attrs[key]
        if key in _HIDDEN or value is None:
            if key == "index" and op.opcode == "get-tuple-element":
                text += f", index={value}"
            continue
        if key in _IMPLIED and value == _IMPLIED[key]:
            continue
        # Printed inside the backend configuration, where XLA keeps it.
        if key == "trip_count" and op.opcode == "while":
            continue
        if key == "dimension" and op.opcode != "custom-call":
            text += f", dimensions={{{value}}}"
        elif key == "dimensions" and op.opcode == "iota":
            text += f", iota_dimension={value[0]}"
        elif key in _WRITERS:
            text += f", {_PRINTED.get(key, key)}={_WRITERS[key](value)}"
        else:
            text += f", {key}={_value(value)}"
    return text + _backend_config(op)


def _backend_config(op: Op) -> str:
    config = op.attrs.get("backend_config")
    trips = op.attrs.get("trip_count") if op.opcode == "while" else None
    if trips is not None:
        # XLA writes the 64-bit integers of protocol buffers as JSON strings.
        known = {"known_trip_count": {"n": str(trips)}}
        config = {**config, **known} if isinstance(config, dict) else known
    if not config:
        return ""
    text = _json(config) if isinstance(config, dict) else json.dumps(config)
    return f", backend_config={text}"


def _json(value: object) -> str:
    # Sorted so that equal configurations give equal text; the text is hashed.
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _literal(value: object, leaf: TensorType) -> str:
    if value is None:
        return "{...}"
    if not isinstance(value, list):
        return _scalar(value)
    shape = leaf.shape or (len(value),)
    return _nested([_scalar(item) for item in value], shape)


def _nested(items: list[str], shape: tuple[int, ...]) -> str:
    if len(shape) <= 1 or not items:
        return "{" + ", ".join(items) + "}"
    step = prod(shape[1:])
    rows = [_nested(items[i : i + step], shape[1:]) for i in range(0, len(items), step)]
    return "{ " + ", ".join(rows) + " }"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, complex):
        return f"({value.real!r}, {value.imag!r})"
    return repr(value)


def _value(value: object) -> str:
    """Print an attribute without its own notation so that ``read_value`` can read it back."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    if isinstance(value, (tuple, list)):
        return "{" + ",".join([_value(item) for item in value]) + "}"
    return _json(value) if isinstance(value, dict) else _scalar(value)


def _slice(value: Iterable[tuple[int, int, int]]) -> str:
    items = [f"[{a}:{b}]" if s == 1 else f"[{a}:{b}:{s}]" for a, b, s in value]
    return "{" + ", ".join(items) + "}"


def _padding(value: Iterable[tuple[int, int, int]]) -> str:
    return "x".join([f"{a}_{b}_{i}" if i else f"{a}_{b}" for a, b, i in value])


@lru_cache(maxsize=4096)
def _window(value: tuple[WindowDim, ...]) -> str:
    if not value:
        return "{}"
    dims = [
        [str(number) for number in (size, stride, f"{low}_{high}", *map(int, others))]
        for size, stride, low, high, *others in value
    ]
    parts = [
        f"{key}={'x'.join(column)}"
        for (key, default), column in zip(WINDOW.items(), zip(*dims, strict=True), strict=True)
        if any(text != default for text in column)
    ]
    return "{" + " ".join(parts) + "}"


#: Writers of the attributes with their own notation; hlo_attributes.READERS reads them.
_WRITERS: dict[str, Callable[[Any], str]] = {
    "slice": _slice,
    "padding": _padding,
    "window": lambda value: _window(tuple(value)),
    "dim_labels": str,
    "sharding": str,
    "frontend_attributes": str,
    "target": json.dumps,
}
_PRINTED = {"target": "custom_call_target"}
