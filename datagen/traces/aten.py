"""PyTorch operators in a trace, as rows of operator tables, with the time of their kernels.

An operator's label is the sum of the kernels that its call launched: method ``kernel`` of
:mod:`opcast.features.operators.schema`, as for any source without a separate method.
Arguments follow ATen's native functions
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...common.files import own_data
from ..profile.executions import Event
from .trace import Collective, Operator, TraceKernel

Row = dict[str, str | int]
_Make = Callable[[Operator, str], Row | None]
#: Operators of PyTorch that have a row or a class.
_DATA: Any = own_data("datagen/traces/operators.toml")


def _product(left: Sequence[int], right: Sequence[int], dtype: str) -> Row | None:
    if len(left) != len(right) or left[-1:] != right[-2:-1]:
        return None
    if len(left) == 2:
        family, b = "linear", 1
    elif len(left) == 3 and dtype in ("bf16", "fp16", "fp32"):
        family, b = "bmm", left[0]
    else:
        return None
    sizes: Row = {"b": b, "m": left[-2], "n": right[-1], "k": left[-1]}
    return {"family": family, "op": family, "dtype": dtype, **sizes}


def _mm(at: int) -> _Make:
    """A product whose matrices are the arguments from ``at`` on."""

    def make(call: Operator, dtype: str) -> Row | None:
        left, right = call.shapes[at : at + 2]
        return _product(left, right, dtype)

    return make


def _rows_of(shape: Sequence[int], columns: int) -> dict[str, str | int]:
    return {"rows": prod(shape) // columns, "cols": columns}


def _pointwise(op: str) -> _Make:
    """An element-wise operator of two tensors, or of a tensor and a number."""

    def make(call: Operator, dtype: str) -> Row | None:
        shapes = [s for s in call.shapes[:2] if s]
        if not shapes:
            return None
        largest = max(shapes, key=prod)
        two = len(call.shapes) > 1 and call.shapes[0] == call.shapes[1]
        # Broadcast operands hardly add traffic unless they are as large.
        name = op if two or op in _DATA["unary"] else f"{op}u"
        return {
            "family": "elementwise",
            "op": name,
            "dtype": dtype,
            **_rows_of(largest, largest[-1]),
            "n_in": 2 if two else 1,
        }

    return make


def _norm(op: str) -> _Make:
    def make(call: Operator, dtype: str) -> Row | None:
        shape = call.shapes[0]
        # The weight has the normalised dimensions; the last one if there is no weight.
        weights = [s for s in call.shapes[1:] if s and shape[-len(s) :] == s]
        columns = prod(weights[0]) if weights else shape[-1]
        return {"family": "norm", "op": op, "dtype": dtype, **_rows_of(shape, columns), "n_in": 1}

    return make


def _softmax(call: Operator, dtype: str) -> Row | None:
    shape = call.shapes[0]
    dim = call.values[1] if len(call.values) > 1 else ""
    # Along another dimension than the last a different kernel runs.
    if dim not in ("", "-1", str(len(shape) - 1)):
        return None
    sizes = _rows_of(shape, shape[-1])
    return {"family": "softmax", "op": "softmax", "dtype": dtype, **sizes, "n_in": 1}


def _attention(call: Operator, dtype: str) -> Row | None:
    query, key, value = call.shapes[:3]
    if not len(query) == len(key) == len(value) == 4 or dtype not in ("bf16", "fp16"):
        return None
    if "scaled_dot_product" in call.name:
        batch, heads, q_len, dim = query
        kv_heads, kv_len = key[1:3]
    else:  # _flash_attention_forward and its like have the heads last but one
        batch, q_len, heads, dim = query
        kv_len, kv_heads = key[1:3]
    causal = "True" in call.values
    sizes: Row = {"batch": batch, "q_heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    sizes |= {"v_head_dim": value[-1], "q_len": q_len, "kv_len": kv_len, "window": 0}
    own: Row = {"family": "context_attention", "op": "context_attention", "dtype": dtype}
    return {**own, "kv_dtype": dtype, **sizes, "causal": int(causal)}


def _numbers(text: str) -> list[int]:
    found = [part.strip() for part in text.strip("[]() ").split(",")]
    return [int(part) for part in found if part.lstrip("-").isdigit()]


def _convolution(call: Operator, dtype: str) -> Row | None:
    """``aten::convolution``; the number of groups is the last argument."""
    given, weight = call.shapes[:2]
    rank = len(given) - 2
    if rank not in (1, 2, 3) or len(call.values) < 9 or call.values[6] == "True":
        return None
    stride, pad, dilation = ((_numbers(call.values[i]) * rank)[:rank] for i in (3, 4, 5))
    if len(stride) < rank or len(pad) < rank or len(dilation) < rank:
        return None
    groups = _numbers(call.values[8])
    names = ("d", "h", "w")[-rank:]
    row: Row = {"family": "conv", "op": "fwd", "dtype": dtype, "ndim": rank, "n": given[0]}
    row |= {"c": given[1], "k": weight[0], "groups": groups[0] if groups else 1}
    row |= {"d": 1, "h": 1, "w": 1, "kd": 1, "kh": 1, "kw": 1, "channels_last": 0}
    for axis in ("d", "h", "w"):
        row |= {f"stride_{axis}": 1, f"pad_{axis}": 0, f"dil_{axis}": 1}
    for i, axis in enumerate(names):
        row |= {axis: given[2 + i], f"k{axis}": weight[2 + i], f"stride_{axis}": stride[i]}
        row |= {f"pad_{axis}": pad[i], f"dil_{axis}": dilation[i]}
    return row


#: Converters from a call to a row, by the family named in the data file.
_MAKERS: Mapping[str, Callable[..., _Make]] = {
    "product": _mm,
    "pointwise": _pointwise,
    "norm": _norm,
    "softmax": lambda _: _softmax,
    "attention": lambda _: _attention,
    "convolution": lambda _: _convolution,
}
#: Converter of each operator, and the class that its time belongs to.
_OPERATORS: Mapping[str, tuple[str, _Make]] = {
    f"aten::{name}": (kind, _MAKERS[maker](argument))
    for name, (kind, maker, argument) in _DATA["operators"].items()
}


@dataclass
class TracedOperator:
    """An operator of one size, with its calls.

    Attributes:
        row: Columns of an operator table; empty if the operator has no family.
        name: Operator, such as ``aten::addmm``; the kernel's name for kernels without an operator.
        kind: Class of its time: ``products``, ``attention``, ``convolutions``, ``norms``,
            ``passes``, ``communication``, ``copies`` or ``other``.
        seconds: Total kernel time of each call.
        kernels: Names of its kernels.
        collective: The collective, if it is one.
    """

    row: Row
    name: str
    kind: str
    seconds: list[float] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    collective: Collective | None = None

    @property
    def total(self) -> float:
        """Seconds of all calls."""
        return sum(self.seconds)


def traced_operators(events: Iterable[Event]) -> list[TracedOperator]:
    """Sum the kernels of each call and pool calls of one size, largest total time first."""
    found: dict[tuple[object, ...], TracedOperator] = {}
    calls: dict[tuple[object, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for number, event in enumerate(events):
        if not isinstance(event, TraceKernel):
            continue
        row, name, kind, call = _identified(event)
        key: tuple[object, ...] = (name, kind, event.collective, *sorted(row.items()))
        own = found.setdefault(key, TracedOperator(row, name, kind, collective=event.collective))
        own.kernels.add(event.name)
        calls[key][call if call >= 0 else -number - 2] += (event.end - event.start) * 1e-9
    for key, own in found.items():
        own.seconds = list(calls[key].values())
    return sorted(found.values(), key=lambda o: -o.total)


def _identified(kernel: TraceKernel) -> tuple[Row, str, str, int]:
    """Row, name, class and call of a kernel."""
    if kernel.collective is not None:
        return {}, kernel.collective.op, "communication", -1
    if kernel.copy:
        return {}, kernel.name, "copies", -1
    for operator in kernel.operators:
        kind, make = _OPERATORS.get(operator.name, ("", None))
        if make is None:
            continue
        row = _row(operator, make)
        if row:
            return row, operator.name, kind, operator.call
    own = next((o for o in kernel.operators if o.name.startswith("aten::")), None)
    name = own.name if own else kernel.name
    kind = next((k for word, k in _DATA["classes"].items() if word in name), "other")
    return {}, name, kind if own else "other", own.call if own else -1


def _row(call: Operator, make: _Make) -> Row | None:
    tensors = [d for d, s in zip(call.dtypes, call.shapes, strict=False) if s]
    dtype = _DATA["dtypes"].get(tensors[0]) if tensors else None
    if dtype is None:
        return None
    try:
        row = make(call, dtype)
    except (ValueError, IndexError, ZeroDivisionError):
        # Fewer arguments, or other ranks, than the operator has in the supported version.
        return None
    # Empty tensors launch nothing that could be predicted.
    sizes = [v for n, v in (row or {}).items() if isinstance(v, int) and n in _DATA["positive"]]
    return row if row and min(sizes, default=1) > 0 else None
