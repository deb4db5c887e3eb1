"""Parse operators given as text or columns: ``linear m=4096 n=4096 k=4096 dtype=bf16``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ProgramError
from ...common.types import JsonObject
from ..cost.formats import TABLE_FORMATS, UNQUANTISED
from ..ir.program import NUMPY_NAMES
from .conv import DIRECTIONS
from .physics import BACKENDS
from .schema import DEFAULTS, FAMILIES, MAY_BE_ZERO, NAMES, OPTIONAL, PARAMETERS, SEVERAL, TRACED

if TYPE_CHECKING:
    import pandas as pd

#: Timing method by dtype for families named without a method: NeuSight's tables are fp32 and eager,
#: Vidur's fp16 and by kernel, all other dtypes come as replayed graphs.
_METHOD_OF = {"fp32": "eager", "fp16": "kernel"}
#: Methods in order of preference: kernels of a replayed graph are closest to a compiled program.
_METHODS = ("graph", "kernel", "eager")
#: Table names of formats by their HLO and NumPy names.
TABLE_NAMES = {
    alias: name
    for name, kind in ((name, TABLE_FORMATS[name].weights) for name in UNQUANTISED)
    for alias in (kind, NUMPY_NAMES[kind])
}
#: Vendors whose operators, without a method, run on other libraries than NVIDIA's.
OTHER_LIBRARIES = frozenset(("AMD",))
#: Methods of these libraries' products by family and dtype, where any was measured: XLA's, and for
#: formats of at most 8 bits those of tuned kernels.
_OTHER_METHODS = {
    "linear": {
        **dict.fromkeys(("bf16", "fp16"), "xla"),
        **dict.fromkeys(("fp8", "fp8_block", "int8", "mxfp8", "mxfp4"), "tuned"),
    },
    "bmm": dict.fromkeys(("bf16", "fp16", "fp8"), "xla"),
}
#: Values used in the examples of error messages; other parameters are long dimensions (4096).
_EXAMPLES: Mapping[str, int | str] = {
    "batch": 8,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "v_head_dim": 128,
    "topk": 2,
    "experts": 8,
    "b": 1,
    "dtype": "bf16",
}
#: Largest parameter: beyond it, sizes overflow.
_LARGEST = 2**40


def parse_op(text: str, vendor: str = "") -> JsonObject:
    """Parse an operator given as its family and ``name=value`` pairs.

    Args:
        text: A family, or ``method/family`` as in :data:`FAMILIES`, then parameters. The default
            method is eager for fp32, kernel for fp16 and graph for others; for products on AMD's
            chips it is xla, or tuned in at most 8 bits, as measured there.
        vendor: Vendor of the target device.

    Returns:
        A row as in operator tables: ``key``, ``method``, ``family``, ``op`` and the family's
        parameters.

    Raises:
        ProgramError: The family or a parameter is unknown, missing, given twice or not a positive
            whole number.
    """
    # An empty text has no family; the error below lists the known ones.
    head, *pairs = text.split() or [""]
    given: dict[str, object] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not value:
            raise _wrong(f"operator {text!r}"[:200], f"{pair!r} is not name=value")
        if name in given:
            raise _wrong(f"operator {text!r}"[:200], f"{name} is given twice")
        given[name] = value
    return _completed(head, given, f"operator {text!r}"[:200], vendor)


def parse_op_columns(
    operator: str, given: Mapping[str, str | int | Sequence[int]], vendor: str = ""
) -> JsonObject:
    """Parse many operators of one family, given by column.

    Args:
        operator: A family, or ``method/family``.
        given: Parameters by name: one number for all rows, or one per row, shape ``(n,)``; texts
            such as the dtype apply to all rows.
        vendor: As for :func:`parse_op`.

    Returns:
        As :func:`parse_op`, with an int64 array of shape ``(n,)`` where numbers differ by row.

    Raises:
        ProgramError: As :func:`parse_op`, or columns are empty or differ in length.
    """
    where = f"columns of {operator!r}"[:200]
    values: dict[str, object] = {}
    for name, value in given.items():
        values[name] = value if isinstance(value, str | int) else _column(name, value, where)
    lengths = {len(v) for v in values.values() if isinstance(v, np.ndarray)}
    if len(lengths) > 1 or 0 in lengths:
        hint = "give all columns the same length, at least 1"
        raise _wrong(where, f"columns have {sorted(lengths)} rows", hint)
    return _completed(operator, values, where, vendor)


def _column(name: str, values: Sequence[int], where: str) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except (OverflowError, ValueError, TypeError):
        raise _wrong(where, f"{name} must contain whole numbers") from None


def _completed(head: str, given: JsonObject, where: str, vendor: str = "") -> dict[str, object]:
    """Return an operator's row, or a table of columns, with all parameters of its family."""
    given["dtype"] = TABLE_NAMES.get(str(given.get("dtype")), given.get("dtype"))
    # TensorRT-LLM runs on NVIDIA's chips only: without the vendor, its absence is reported.
    named = given.get("backend") == "trtllm"
    key = _key(head, given["dtype"], where, "" if named else vendor)
    group = FAMILIES[key]
    known = (*PARAMETERS[group], *(n for n in (*NAMES, "version") if n != "family"))
    for name, value in given.items():
        if name not in known:
            raise _wrong(where, f"{key} has no parameter {name!r}", "it has: " + ", ".join(known))
        if name in (*NAMES, "version") and not isinstance(value, str | None):
            raise _wrong(where, f"{name} is a name, not a number")
    row = _numbered(given, PARAMETERS[group], where)
    _fill(row, key, group)
    missing = [c for c in PARAMETERS[group] if c not in row and c not in OPTIONAL]
    if (key in SEVERAL or group == "conv_nd") and "op" not in given:
        missing.append("op")
    if row["dtype"] is None:
        missing.append("dtype")
    if missing:
        wanted = [c for c in (*PARAMETERS[group], "op", "dtype") if c in missing or c in given]
        kind = DIRECTIONS[0] if group == "conv_nd" else "rmsnorm" if "norm" in key else "add"
        likely = {**_EXAMPLES, "op": kind}
        shown = [f"{c}={likely.get(c, 4096) if c in missing else row[c]}" for c in wanted]
        example = f"such as: {' '.join((head, *shown))}"
        raise _wrong(where, f"{key} needs " + ", ".join(missing), example)
    if row["dtype"] not in TABLE_FORMATS:
        raise _wrong(where, f"no dtype {row['dtype']!r}", "dtypes: " + ", ".join(TABLE_FORMATS))
    # A misspelt backend would silently have no flag and look like an unknown library.
    if row.get("backend", BACKENDS[0]) not in BACKENDS:
        raise _wrong(where, f"no backend {row['backend']!r}", "backends: " + ", ".join(BACKENDS))
    if "version" in row and "backend" not in row:
        raise _wrong(where, "a version requires a backend", "add backend=…")
    if group == "conv_nd" and row["op"] not in DIRECTIONS:
        raise _wrong(where, f"no direction {row['op']!r}", "op is one of: " + ", ".join(DIRECTIONS))
    method, family = key.split("/")
    return {"op": family, **row, "key": key, "method": method, "family": family}


def _key(head: str, dtype: str | None, where: str, vendor: str) -> str:
    if head in FAMILIES:
        return head
    wanted = _METHOD_OF.get(str(dtype), "graph")
    # The other methods' products are from NVIDIA's libraries, up to twice as fast as AMD's.
    if vendor in OTHER_LIBRARIES:
        wanted = _OTHER_METHODS.get(head, {}).get(str(dtype), wanted)
    # The dtype's usual method first, then the others for families not timed that way.
    for method in (wanted, *_METHODS):
        if (key := f"{method}/{head}") in FAMILIES and key not in TRACED:
            return key
    names = dict.fromkeys(key.split("/")[1] for key in FAMILIES)
    near = get_close_matches(head, names, 3)
    close = f"close to it: {', '.join(near)}; all: " if near else "operators: "
    raise _wrong(where, f"no operator {head!r}", close + ", ".join(names))


def _numbered(given: JsonObject, numbers: tuple[str, ...], where: str) -> dict[str, object]:
    row = dict(given)
    for name in (n for n in numbers if n in row):
        if not isinstance(row[name], np.ndarray):
            try:
                row[name] = int(row[name])
            except ValueError:
                raise _wrong(where, f"{name}={row[name]} is not a whole number") from None
        least, value = 0 if name in MAY_BE_ZERO else 1, row[name]
        many = isinstance(value, np.ndarray)
        low, high = (value.min(), value.max()) if many else (value, value)
        if low < least or high > _LARGEST:
            shown = low if low < least else high
            raise _wrong(where, f"{name}={shown} is not from {least} to 2^40")
    return row


def _fill(row: dict[str, object], key: str, group: str) -> None:
    """Add the parameters that follow from others."""
    for name, value in DEFAULTS[group].items():
        # A name refers to another parameter's value, if given; only the experts' "balanced" is a
        # literal.
        if name not in row and (value in row or not isinstance(value, str) or group == "moe"):
            row[name] = row.get(value, value) if isinstance(value, str) else value
    if group != "attention":
        return
    # Encoders attend to all positions; in prefill and decode the queries are the last positions.
    row.setdefault("causal", int("encoder" not in key))
    if "generation" in key:
        row.setdefault("q_len", 1)
        return
    for name, other in (("q_len", "kv_len"), ("kv_len", "q_len")):
        if other in row:
            row.setdefault(name, row[other])


def with_defaults(rows: pd.DataFrame, keys: pd.Series) -> pd.DataFrame:
    """Fill in the missing parameters of an operator table, as :func:`parse_op` does.

    Args:
        rows: ``n`` operators, with the columns of measurement tables.
        keys: ``method/family`` of each.
    """
    made = rows
    for key in (k for k in keys.unique() if k in FAMILIES):
        at = np.flatnonzero(keys == key)
        part = rows.iloc[at]
        # Defaults depend only on these columns; converting others would be wasted.
        named = [c for c in (*PARAMETERS[FAMILIES[key]], *NAMES) if c in part]
        given = {c: part[c].to_numpy(object) for c in named if part[c].notna().all()}
        row: dict[str, object] = {**given}
        _fill(row, key, FAMILIES[key])
        for name in row.keys() - given.keys():
            old = made[name] if name in made else [None] * len(made)
            values = np.array(old, object)
            lacking = at[[v is None or v != v for v in values[at]]]
            values[lacking] = np.broadcast_to(np.array(row[name], object), len(at))[
                np.isin(at, lacking)
            ]
            made = made.assign(**{name: values})
    return made.infer_objects()


def _wrong(where: str, what: str, hint: str = "") -> ProgramError:
    example = "such as: linear m=4096 n=4096 k=4096 dtype=bf16 backend=trtllm"
    return ProgramError(what, where=where, hint=hint or example)
