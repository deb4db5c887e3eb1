"""Operators written by hand: ``linear m=4096 n=4096 k=4096 dtype=bf16``."""

from __future__ import annotations

from typing import Any

from ..errors import ProgramError
from .physics import BACKENDS
from .schema import FAMILIES, NAMES, PARAMETERS
from .table import WEIGHT_BITS

#: How the rows of a dtype were timed, where a family is named without it.
_METHOD_OF = {"fp32": "eager", "fp16": "kernel"}
_METHODS = ("graph", "kernel", "eager")
_DTYPES = {"f32": "fp32", "float32": "fp32", "f16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
#: What a parameter is when it is not given; a name stands for that parameter's value.
_DEFAULTS: dict[str, dict[str, int | str]] = {
    "gemm": {"b": 1},
    "conv": {"stride": 1, "pad": 0},
    "pointwise": {},
    "attention": {
        "window": 0, "kv_heads": "q_heads", "v_head_dim": "head_dim", "kv_dtype": "dtype",
    },
    "moe": {"tp": 1, "ep": 1, "distribution": "balanced"},
}  # fmt: skip
#: Families of several operators, of which one has to be named.
_SEVERAL = {"eager/elementwise", "kernel/elementwise", "kernel/norm"}
_OPTIONAL = frozenset(("n_in",))


def parse_op(text: str) -> dict[str, Any]:
    """Parameters of an operator given as its family and ``name=value`` pairs.

    Args:
        text: A family, or ``method/family`` as in :data:`FAMILIES`, then parameters. Without a
            method, fp32 is taken as called one by one, fp16 as kernels, others as a graph.

    Returns:
        A row as tables of operators have it: ``key``, ``method``, ``family``, ``op`` and the
        family's parameters.

    Raises:
        ProgramError: The family or a parameter is unknown, missing or no positive whole number.
    """
    head, *pairs = text.split() or [""]
    given: dict[str, Any] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not value:
            raise _wrong(text, f"{pair!r} is not name=value")
        given[name] = value
    given["dtype"] = _DTYPES.get(str(given.get("dtype")), given.get("dtype"))
    key = _key(head, given["dtype"], text)
    group = FAMILIES[key]
    known = (*PARAMETERS[group], *(n for n in NAMES if n != "family"))
    for name in given:
        if name not in known:
            raise _wrong(text, f"{key} has no parameter {name!r}", "it has: " + ", ".join(known))
    row = _numbered(given, PARAMETERS[group], text)
    _fill(row, key, group)
    missing = [c for c in PARAMETERS[group] if c not in row and c not in _OPTIONAL]
    if key in _SEVERAL and "op" not in given:
        missing.append("op")
    if row["dtype"] is None:
        missing.append("dtype")
    if missing:
        raise _wrong(text, f"{key} needs " + ", ".join(missing))
    if row["dtype"] not in WEIGHT_BITS:
        raise _wrong(text, f"no dtype {row['dtype']!r}", "dtypes: " + ", ".join(WEIGHT_BITS))
    if row.get("backend", BACKENDS[0]) not in BACKENDS:
        raise _wrong(text, f"no backend {row['backend']!r}", "backends: " + ", ".join(BACKENDS))
    method, family = key.split("/")
    return {"op": family, **row, "key": key, "method": method, "family": family}


def _key(head: str, dtype: str | None, text: str) -> str:
    if head in FAMILIES:
        return head
    wanted = _METHOD_OF.get(str(dtype), "graph")
    for method in (wanted, *_METHODS):
        if f"{method}/{head}" in FAMILIES:
            return f"{method}/{head}"
    names = dict.fromkeys(key.split("/")[1] for key in FAMILIES)
    raise _wrong(text, f"no operator {head!r}", "operators: " + ", ".join(names))


def _numbered(given: dict[str, Any], numbers: tuple[str, ...], text: str) -> dict[str, Any]:
    row = dict(given)
    for name in numbers:
        if name in row:
            try:
                row[name] = int(row[name])
            except ValueError:
                raise _wrong(text, f"{name}={row[name]} is not a whole number") from None
    return row


def _fill(row: dict[str, Any], key: str, group: str) -> None:
    """Add the parameters that follow from others."""
    for name, value in _DEFAULTS[group].items():
        if name not in row and (value in row or not isinstance(value, str) or group == "moe"):
            row[name] = row.get(value, value) if isinstance(value, str) else value
    if group != "attention":
        return
    row.setdefault("causal", int("encoder" not in key))
    if "generation" in key:
        row.setdefault("q_len", 1)
        return
    for name, other in (("q_len", "kv_len"), ("kv_len", "q_len")):
        if other in row:
            row.setdefault(name, row[other])


def _wrong(text: str, what: str, hint: str = "") -> ProgramError:
    example = "such as: linear m=4096 n=4096 k=4096 dtype=bf16 backend=trtllm"
    return ProgramError(what, where=f"operator {text!r}", hint=hint or example)
