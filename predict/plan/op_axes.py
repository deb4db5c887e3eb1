"""The loop nest of each op: which dimensions of operands and results correspond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...features.ir.mlir.attention_calls import attention_axes
from ...features.ir.op_table import by_op, ops_with
from ...features.ir.program import Op, TensorType

#: A dimension of an operand or result: number of the operand or result, number of the dimension.
At = tuple[int, int]
Shapes = Sequence[tuple[int, ...]]


class Axis(NamedTuple):
    """One dimension of an op's loop nest.

    Attributes:
        results: Dimensions of the results along it.
        operands: Dimensions of the operands along it.
        summed: Whether the op sums along it, so that sharding leaves partial sums.
    """

    results: tuple[At, ...]
    operands: tuple[At, ...]
    summed: bool = False


def op_axes(op: Op, kinds: Sequence[TensorType]) -> list[Axis]:
    """Return the dimensions of an op's loop nest.

    Args:
        op: An op except loops, branches and calls.
        kinds: Types of its operands.
    """
    rule = _RULES.get(op.opcode)
    if rule is not None:
        return [a for a in rule(op, [k.shape for k in kinds]) if a.results or a.operands]
    if is_attention(op):
        return _attention(op, kinds)
    if op.opcode in OPAQUE and op.attrs.get("target") != "Sharding":
        return []
    return _elementwise(op, kinds)


def is_attention(op: Op) -> bool:
    """Return whether an op is a call of a library's attention."""
    return op.opcode == "custom-call" and "fmha" in str(op.attrs.get("target", ""))


def _attention(op: Op, kinds: Sequence[TensorType]) -> list[Axis]:
    target, config = str(op.attrs["target"]), op.config()
    found = attention_axes(target, config, [k.shape for k in kinds], [k.shape for k in op.results])
    return [Axis(*axis) for axis in found]


def _elementwise(op: Op, kinds: Sequence[TensorType]) -> list[Axis]:
    if not op.results:
        return []
    shape = op.results[0].shape
    same = [k for k, kind in enumerate(kinds) if kind.shape == shape]
    leaves = [n for n, kind in enumerate(op.results) if kind.shape == shape]
    return [
        Axis(tuple((n, d) for n in leaves), tuple((k, d) for k in same)) for d in range(len(shape))
    ]


def _one(result: int | None, *operands: At, summed: bool = False) -> Axis:
    return Axis(() if result is None else ((0, result),), operands, summed)


def _dot(op: Op, shapes: Shapes) -> list[Axis]:
    a = op.attrs
    batch = list(zip(a["lhs_batch_dims"], a["rhs_batch_dims"], strict=True))
    summed = list(zip(a["lhs_contracting_dims"], a["rhs_contracting_dims"], strict=True))
    axes = [_one(n, (0, i), (1, j)) for n, (i, j) in enumerate(batch)]
    for side in (0, 1):
        taken = {pair[side] for pair in batch + summed}
        for d in range(len(shapes[side])):
            if d not in taken:
                axes.append(_one(len(axes), (side, d)))
    return axes + [_one(None, (0, i), (1, j), summed=True) for i, j in summed]


def _convolution(op: Op, shapes: Shapes) -> list[Axis]:
    left, _, rest = op.attrs["dim_labels"].partition("_")
    right, _, out = rest.partition("->")
    axes = []
    # Groups tie channels or batch to the kernel's outputs in blocks, so these are not sharded.
    if int(op.attrs.get("batch_group_count", 1)) == 1:
        axes.append(_one(out.index("b"), (0, left.index("b"))))
        if int(op.attrs.get("feature_group_count", 1)) == 1:
            axes.append(_one(out.index("f"), (1, right.index("o"))))
            axes.append(_one(None, (0, left.index("f")), (1, right.index("i")), summed=True))
    return axes


def _reduce(op: Op, shapes: Shapes) -> list[Axis]:
    gone = set(op.attrs["dimensions"])
    inputs = range(len(op.results))
    kept = [d for d in range(len(shapes[0])) if d not in gone]
    axes = [
        Axis(tuple((k, n) for k in inputs), tuple((k, d) for k in inputs))
        for n, d in enumerate(kept)
    ]
    return axes + [Axis((), tuple((k, d) for k in inputs), True) for d in sorted(gone)]


def _windowed(op: Op, shapes: Shapes) -> list[Axis]:
    """Return window reductions and their gradients: the dimensions with windows of one element."""
    whole = [d for d, w in enumerate(op.attrs["window"]) if w.size == 1 and w.stride == 1]
    count = 2 if op.opcode == "select-and-scatter" else len(op.results)
    results = range(len(op.results))
    return [
        Axis(tuple((n, d) for n in results), tuple((k, d) for k in range(count))) for d in whole
    ]


def _broadcast(op: Op, shapes: Shapes) -> list[Axis]:
    shape = op.type.shape
    known = {to: d for d, to in enumerate(op.attrs["dimensions"]) if shapes[0][d] == shape[to]}
    return [_one(n, *([(0, known[n])] if n in known else [])) for n in range(len(shape))]


def _reshape(op: Op, shapes: Shapes) -> list[Axis]:
    """Match the outermost dimensions of parts of equal size; inner dimensions are not sharded."""
    axes: list[Axis] = []
    before, after = shapes[0], op.type.shape
    i = j = 0
    while i < len(before) and j < len(after):
        first, last = (i, j), (before[i], after[j])
        left, right = last
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif right < left and j < len(after):
                right, j = right * after[j], j + 1
            else:
                return axes
        outer_in = next((n for n in range(first[0], i) if before[n] > 1), None)
        outer_out = next((n for n in range(first[1], j) if after[n] > 1), None)
        if outer_in is not None and outer_out is not None:
            axes.append(_one(outer_out, (0, outer_in)))
    return axes


def _transpose(op: Op, shapes: Shapes) -> list[Axis]:
    return [_one(n, (0, d)) for n, d in enumerate(op.attrs["dimensions"])]


def _all_but(op: Op, shapes: Shapes, apart: Iterable[int]) -> list[Axis]:
    left = set(apart)
    results, operands = range(len(op.results)), range(len(shapes))
    return [
        Axis(tuple((n, d) for n in results), tuple((k, d) for k in operands))
        for d in range(len(op.type.shape))
        if d not in left
    ]


def _slice(op: Op, shapes: Shapes) -> list[Axis]:
    shape = op.type.shape
    return [_one(d, (0, d)) for d in range(len(shape)) if shape[d] == shapes[0][d]]


def _pad(op: Op, shapes: Shapes) -> list[Axis]:
    return [_one(d, (0, d)) for d, edge in enumerate(op.attrs["padding"]) if not any(edge)]


def _update(op: Op, shapes: Shapes) -> list[Axis]:
    """Return an update in place; the result keeps the operand's shardings in all dimensions."""
    old, new = shapes[0], shapes[1]
    return [_one(d, (0, d), *([(1, d)] if old[d] == new[d] else [])) for d in range(len(old))]


def _gather(op: Op, shapes: Shapes) -> list[Axis]:
    a = op.attrs
    values, indices = shapes[0], shapes[1]
    offset, batching = a["offset_dims"], a["operand_batching_dims"]
    gone = {*a["collapsed_slice_dims"], *batching}
    axes = []
    kept = [d for d in range(len(values)) if d not in gone]
    for to, d in zip(offset, kept, strict=True):
        if a["slice_sizes"][d] == values[d]:
            axes.append(_one(to, (0, d)))
    places = [d for d in range(len(op.type.shape)) if d not in offset]
    rows = [d for d in range(len(indices)) if d != a["index_vector_dim"]]
    tied = dict(zip(a["start_indices_batching_dims"], batching, strict=True))
    for to, d in zip(places, rows, strict=True):
        axes.append(_one(to, (1, d), *([(0, tied[d])] if d in tied else [])))
    # In a sharded table each device looks up its own rows, and the results are summed.
    axes += [_one(None, (0, d), summed=True) for d in a["collapsed_slice_dims"]]
    return axes


def _scatter(op: Op, shapes: Shapes) -> list[Axis]:
    a = op.attrs
    count = len(op.results)
    values, indices, updates = shapes[0], shapes[count], shapes[count + 1]
    gone = {*a["inserted_window_dims"], *a["input_batching_dims"]}
    kept = [d for d in range(len(values)) if d not in gone]
    windows = dict(zip(kept, a["update_window_dims"], strict=True))
    outer = [d for d in range(len(updates)) if d not in a["update_window_dims"]]
    rows = [d for d in range(len(indices)) if d != a["index_vector_dim"]]
    tied = dict(zip(a["scatter_indices_batching_dims"], a["input_batching_dims"], strict=True))
    axes = []
    for d in range(len(values)):
        if d in tied.values():
            continue
        met = [(0, d)]
        if d in windows and updates[windows[d]] == values[d]:
            met.append((count + 1, windows[d]))
        axes.append(Axis(((0, d),), tuple(met)))
    for to, d in zip(outer, rows, strict=True):
        met = [(count, d), (count + 1, to)]
        if d in tied:
            axes.append(Axis(((0, tied[d]),), (*met, (0, tied[d]))))
        else:
            axes.append(Axis((), tuple(met), True))
    return axes


_RULES: dict[str, Callable[[Op, Shapes], list[Axis]]] = by_op(
    {
        "dot": _dot,
        "convolution": _convolution,
        "reduce": _reduce,
        "reduce-window": _windowed,
        "broadcast": _broadcast,
        "reshape": _reshape,
        "transpose": _transpose,
        "concatenate": lambda op, shapes: _all_but(op, shapes, op.attrs["dimensions"]),
        "reverse": lambda op, shapes: _all_but(op, shapes, op.attrs["dimensions"]),
        "sort": lambda op, shapes: _all_but(op, shapes, [op.attrs["dimension"]]),
        "topk": lambda op, shapes: _all_but(op, shapes, [len(op.type.shape) - 1]),
        "slice": _slice,
        "dynamic-slice": _slice,
        "dynamic-update-slice": _update,
        "pad": _pad,
        "gather": _gather,
        "scatter": _scatter,
    }
)
#: Ops that mix all elements along dimensions that their types do not show. XLA's partitioner does
#: not shard library calls either, with few exceptions; attention is sharded here.
OPAQUE = ops_with(lambda spec: spec.reads == "all" and not spec.elementwise) - {*_RULES}
