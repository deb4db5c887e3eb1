"""cuDNN's fused attention, split along batch and heads.

A partitioner cannot split a library call: it gathers the operands, and every device computes the
whole result. JAX splits its own calls by a callback (``custom_partitioning``), which is missing in
programs lowered for one device. Such calls are therefore put into a section written for each
device, as by ``shard_map``: each device calls the library for its own sequences and heads, which
are independent of each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from ....common.types import JsonMapping, MlirObject

#: A value of a module, whose type is known where it is used.
Value = ir.Value[Any]
#: Sharding of values that are already local to a device.
_MANUAL = "{manual}"
_CONFIG = "cudnn_fmha_backend_config"
#: The product of queries (backward: the result's gradient) with keys or values, whose batch
#: dimensions reveal the position of the heads: ``BTNH`` or ``BNTH``.
_PRODUCTS = ("bmm1_dot_dimension_numbers", "bmm2_grad_gemm2_dot_dimension_numbers")

#: Number of an operand or a result, and number of a dimension.
At = tuple[int, int]
Shape = Sequence[int]


class CallAxis(NamedTuple):
    """A dimension along which a call can be split.

    Attributes:
        results: Its positions in the results.
        operands: Its positions in the operands.
    """

    results: tuple[At, ...]
    operands: tuple[At, ...]


class CallSplit(NamedTuple):
    """How a call is split.

    Attributes:
        operands: Sharding of each operand.
        results: Sharding of each result.
        parts: Numbers of parts of batch and heads.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    parts: tuple[int, int]


def attention_axes(
    target: str, config: JsonMapping, operands: Sequence[Shape], results: Sequence[Shape]
) -> tuple[CallAxis, ...]:
    """Find the batch and head dimensions of a call of cuDNN's attention.

    Operands and results are in JAX's order (``jax._src.cudnn.fused_attention_stablehlo``): queries,
    keys, values, bias, lengths; backward queries, keys, values, statistics, gradient, bias, result,
    lengths. Results are ``(batch, heads, positions, size)`` in either layout.

    Args:
        target: Name of the called function.
        config: Its backend configuration.
        operands: Shapes of its operands.
        results: Shapes of its results.

    Returns:
        Two axes. An axis over which a bias is shared is empty if the bias's gradient is a result,
        since that is a sum over the axis. No axes for other calls, for paged and 8-bit attention,
        and for configurations that JAX did not write.
    """
    own = config.get(_CONFIG, {})
    heads = _heads_at(own)
    if "__cudnn$fmha" not in target or target.endswith("F8") or heads is None or len(operands) < 3:
        return ()
    if own.get("is_paged_attention") or any(len(shape) != 4 for shape in operands[:3]):
        return ()
    backward, bias = "Backward" in target, "Bias" in target
    like = [0, 1, 2, 4, 6 if bias else 5] if backward else [0, 1, 2]
    # A device needs the queries and keys of its heads, including grouped ones: both are split into
    # the same number of parts, in order.
    found = [[(k, 0) for k in like], [(k, heads) for k in like]]
    at_bias = (5 if backward else 3) if bias else -1
    for k, shape in enumerate(operands):
        if k == at_bias:
            for axis, d in zip(found, (0, 1), strict=True):
                axis += [(k, d)] if shape[d] > 1 else []
        elif backward and k == 3:
            found[0].append((k, 0))
            found[1].append((k, 1))
        elif k not in like:
            found[0].append((k, 0))
    made = [[(n, d) for n, shape in enumerate(results) if len(shape) > 2] for d in (0, 1)]
    for d in (0, 1):
        if any(results[n][d] == 1 for n, _ in made[d]) and operands[0][(0, heads)[d]] > 1:
            made[d], found[d] = [], []
    return tuple(CallAxis(tuple(r), tuple(o)) for r, o in zip(made, found, strict=True))


def _heads_at(own: MlirObject) -> int | None:
    """Return the head dimension of queries and keys: 1 or 2."""
    try:
        numbers = next(own[key] for key in _PRODUCTS if key in own)
        heads = int(numbers["lhs_batch_dimensions"][1])
        shape = own["intermediate_tensor_shape"]["dimensions"]
    except (IndexError, KeyError, StopIteration, TypeError, ValueError):
        return None
    return heads if heads in (1, 2) and len(shape) == 4 else None


def call_axes(op: ir.Operation) -> tuple[CallAxis, ...]:
    """Return :func:`attention_axes` for an op of a module."""
    if op.name != "stablehlo.custom_call" or "backend_config" not in op.attributes:
        return ()
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if "fmha" not in target:
        return ()
    try:
        config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    except ValueError:
        return ()
    return attention_axes(
        target, config, [_shape(v) for v in op.operands], [_shape(v) for v in op.results]
    )


def draws_numbers(config: JsonMapping) -> bool:
    """Return whether a call of cuDNN's attention applies random dropout."""
    return float(config.get(_CONFIG, {}).get("dropout_rate", 0.0)) > 0.0


def divided_call(op: ir.Operation, parts: Sequence[int]) -> ir.Attribute:
    """Return the configuration of a call with :func:`call_axes` for divided batch and heads."""
    config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    dimensions = config[_CONFIG]["intermediate_tensor_shape"]["dimensions"]
    for n, own in enumerate(parts):
        dimensions[n] = str(int(dimensions[n]) // own)
    return ir.StringAttr.get(json.dumps(config))


def split_call(op: ir.Operation, split: CallSplit) -> None:
    """Let each device call the library for its part; requires the op's context.

    Args:
        op: A call with :func:`call_axes`, which is removed.
        split: How to split it; the parts must divide all sizes along their axes.
    """
    axes = call_axes(op)

    def local(value: Value, number: int, side: int) -> ir.Type:
        shape = _shape(value)
        for axis, parts in zip(axes, split.parts, strict=True):
            for k, d in axis[side]:
                if k == number:
                    shape[d] //= parts
        return ir.RankedTensorType.get(shape, value.type.element_type)

    with ir.InsertionPoint(op), op.location:
        given = []
        for number, (value, text) in enumerate(zip(op.operands, split.operands, strict=True)):
            whole, kind = sharded(value, text), local(value, number, 1)
            given.append(sharded(whole, _MANUAL, "SPMDFullToShardShape", kind))
        attributes = {name: op.attributes[name] for name in op.attributes}
        attributes["backend_config"] = divided_call(op, split.parts)
        manual = ", ".join([_MANUAL] * len(op.results))
        attributes["mhlo.sharding"] = ir.StringAttr.get(f"{{{manual}}}")
        kinds = [local(value, number, 0) for number, value in enumerate(op.results)]
        call = ir.Operation.create(op.name, results=kinds, operands=given, attributes=attributes)
        for old, new, text in zip(op.results, call.results, split.results, strict=True):
            part = sharded(new, _MANUAL)
            back = sharded(part, text, "SPMDShardToFullShape", old.type)
            old.replace_all_uses_with(back)
    op.erase()


def sharded(
    value: Value, sharding: str, call: str = "Sharding", kind: ir.Type | None = None
) -> Value:
    """Annotate a value with a sharding, at the current insertion point and location.

    Args:
        value: A value of a module.
        sharding: Sharding in GSPMD's notation.
        call: Custom call that the partitioner recognises.
        kind: Type of the result; by default that of the value.
    """
    made: ir.OpView = hlo.CustomCallOp([kind or value.type], [value], call)
    made.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    result: Value = made.results[0]
    return result


def _shape(value: Value) -> list[int]:
    return list(value.type.shape)
