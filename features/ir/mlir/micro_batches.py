"""Gradient accumulation: a training step that processes its batch in parts.

Ops that depend on the batch become the body of a loop over micro-batches, like a ``lax.scan``
around the gradient. Sums over the batch, such as gradients, are added up over the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from .attention_calls import Value, call_axes, divided_call
from .bindings import copy_module, functions_of, walk_ops
from .shardings import substitute


@dataclass(frozen=True)
class Accumulation:
    """Parts of a step that run for each micro-batch; ops are numbered as in ``walk_ops``.

    Attributes:
        body: Ops of ``main`` that run for each micro-batch, in order.
        batch: Batch dimensions of each result, by numbers of op and result.
        arguments: Batch dimension by number of the argument.
        sums: Results of the body that are summed over the micro-batches.
        free: Ops of the body that do not depend on the batch; other ops may also read them.
    """

    body: Sequence[int]
    batch: Mapping[tuple[int, int], Sequence[int]]
    arguments: Mapping[int, int]
    sums: Sequence[tuple[int, int]]
    free: frozenset[int]


def in_micro_batches(module: ir.Module, plan: Accumulation, parts: int) -> ir.Module:
    """Copy a step so that it processes its batch in equal parts.

    Part ``k`` consists of rows ``k``, ``k + parts`` and so on, so that a batch split over devices
    needs no exchange.

    Args:
        module: StableHLO with inlined calls.
        plan: The ops that run for each part.
        parts: Number of micro-batches, which must divide all batch dimensions.

    Raises:
        ValueError: An op does not fit a part of the batch.
    """
    return _rewritten(module, plan, parts, _Writer.write)


def one_micro_batch(module: ir.Module, plan: Accumulation, parts: int) -> ir.Module:
    """Copy a step for a single micro-batch, including the optimiser; ops keep their numbers.

    Rows are numbered from 0, so random numbers are those of a smaller batch. Arguments and errors
    are those of :func:`in_micro_batches`.
    """
    return _rewritten(module, plan, parts, _Writer.shrink)


def _rewritten(
    module: ir.Module, plan: Accumulation, parts: int, rewrite: Callable[[_Writer], None]
) -> ir.Module:
    copy = copy_module(module)
    with copy.context, ir.Location.unknown():
        rewrite(_Writer(copy, plan, parts))
        if not copy.operation.verify():
            raise ValueError("an op of the step does not fit a part of the batch")
    return copy


class _Writer:
    """State of writing the loop, inside the module's context and a location."""

    def __init__(self, module: ir.Module, plan: Accumulation, parts: int) -> None:
        self.plan, self.parts = plan, parts
        self.ops = walk_ops(module)
        self.main = functions_of(module)["main"]
        self.block = self.main.regions[0].blocks[0]
        self.numbers = {op: number for number, op in enumerate(self.ops)}
        #: Number of the micro-batch inside the loop's body.
        self.counter: Value | None = None

    def write(self) -> None:
        body = [self.ops[n] for n in self.plan.body]
        arguments = list(self.block.arguments)
        places = {value: n for n, value in enumerate(arguments)}
        read = sorted(
            {
                places[value]
                for op in body
                for inner in walk_ops(op)
                for value in inner.operands
                if value in places
            }
        )
        sums = [self.ops[op].results[result] for op, result in self.plan.sums]
        counter = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        with ir.InsertionPoint.at_block_begin(self.block):
            inits = [_splat(counter, 0), *(_splat(v.type, 0) for v in sums)]
            inits += [self._interleaved(arguments[n], n) for n in read]
            kinds = [value.type for value in inits]
            loop = hlo.WhileOp(kinds, inits)
        places_of = [ir.Location.unknown()] * len(kinds)
        condition = loop.regions[0].blocks.append(*kinds, arg_locs=places_of)
        step = loop.regions[1].blocks.append(*kinds, arg_locs=places_of)
        self.counter, *state = step.arguments
        totals, given = state[: len(sums)], state[len(sums) :]
        with ir.InsertionPoint(condition):
            direction = hlo.ComparisonDirectionAttr.get("LT")
            signed = hlo.ComparisonTypeAttr.get("SIGNED")
            number = condition.arguments[0]
            most = _splat(counter, self.parts)
            hlo.return_([hlo.compare(number, most, direction, compare_type=signed)])
        with ir.InsertionPoint(step):
            parts = zip(read, given, strict=True)
            known = {arguments[n]: self._part(value, n) for n, value in parts}
            for op in body:
                self._clone(op, known)
            after = [hlo.add(self.counter, _splat(counter, 1))]
            after += [hlo.add(total, known[v]) for v, total in zip(sums, totals, strict=True)]
            hlo.return_([*after, *given])
        for value, total in zip(sums, list(loop.results)[1:], strict=False):
            value.replace_all_uses_with(total)
        for op in reversed(body):
            # Ops that the optimiser also reads, such as constants, stay in both places.
            if not any(True for value in op.results for _ in value.uses):
                op.erase()
            elif self.numbers[op] not in self.plan.free:
                raise ValueError(f"{op.name} of the batch is read outside of its micro-batch")

    def shrink(self) -> None:
        """Give the whole function the sizes of one part of the batch."""
        for number, value in enumerate(self.block.arguments):
            if number in self.plan.arguments:
                value.set_type(self._cut(value.type, [self.plan.arguments[number]]))
        for number in self.plan.body:
            for offset, inner in enumerate(walk_ops(self.ops[number])):
                self._shrink(inner, number + offset)
                _fit_regions(inner)
        kind = ir.FunctionType(ir.TypeAttr(self.main.attributes["function_type"]).value)
        inputs = [value.type for value in self.block.arguments]
        self.main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(inputs, kind.results)
        )

    def _interleaved(self, value: Value, number: int) -> Value:
        """Reshape a batch ``(…, n, …)`` to ``(…, n / parts, parts, …)``; keep other arguments."""
        if number not in self.plan.arguments:
            return value
        at, shape = self.plan.arguments[number], _shape(value)
        return _reshape(
            value, [*shape[:at], self._divided(shape[at]), self.parts, *shape[at + 1 :]]
        )

    def _part(self, value: Value, number: int) -> Value:
        """Return the micro-batch of an iteration, or the argument if it has no batch."""
        if number not in self.plan.arguments:
            return value
        assert self.counter is not None
        at, shape = self.plan.arguments[number] + 1, _shape(value)
        sizes = [*shape[:at], 1, *shape[at + 1 :]]
        zero = _splat(self.counter.type, 0)
        starts = [self.counter if d == at else zero for d in range(len(shape))]
        return _reshape(hlo.dynamic_slice(value, starts, sizes), [*shape[:at], *shape[at + 1 :]])

    def _clone(self, op: ir.Operation, known: dict[Value, Value]) -> None:
        number = self.numbers[op]
        dimensions = self.plan.batch.get((number, 0), ())
        if op.name == "stablehlo.iota" and _along(op) in dimensions:
            known[op.results[0]] = self._rows(op, dimensions)
            return
        for offset, inner in enumerate(substitute(op, known)):
            self._shrink(inner, number + offset)
            _fit_regions(inner)

    def _rows(self, op: ir.Operation, dimensions: Sequence[int]) -> Value:
        """Number the rows of a part as in the whole batch, so that random numbers stay the same."""
        kind = self._cut(op.results[0].type, dimensions)
        # In integers, since a short float would round the product.
        whole = ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_signless(32))
        assert self.counter is not None
        with op.location:
            number = hlo.broadcast_in_dim(whole, self.counter, [])
            rows = hlo.multiply(hlo.iota(whole, _along(op)), _splat(whole, self.parts))
            # Part k has rows k, k + parts and so on.
            return hlo.convert(kind, hlo.add(rows, number))

    def _shrink(self, op: ir.Operation, number: int) -> None:
        """Give an op the types and sizes of one part of the batch."""
        for n, value in enumerate(op.results):
            if dimensions := self.plan.batch.get((number, n), ()):
                value.set_type(self._cut(value.type, dimensions))
        dimensions = self.plan.batch.get((number, 0), ())
        if op.name == "stablehlo.constant" and dimensions:
            try:
                data = ir.DenseElementsAttr(op.attributes["value"])
            except TypeError:  # the bindings have no class for complex elements
                raise ValueError("a constant of the batch holds complex numbers") from None
            if not data.is_splat:
                raise ValueError("a constant holds other values for each row of the batch")
            splat = data.get_splat_value()
            op.attributes["value"] = ir.DenseElementsAttr.get_splat(op.results[0].type, splat)
        elif op.name == "stablehlo.slice" and dimensions:
            limits = list(ir.DenseI64ArrayAttr(op.attributes["limit_indices"]))
            limits = [e if d not in dimensions else self._divided(e) for d, e in enumerate(limits)]
            op.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)
        elif op.name == "stablehlo.dynamic_slice" and dimensions:
            op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(op.results[0].type.shape)
        elif op.name == "stablehlo.gather":
            self._gather(op)
        elif op.name == "stablehlo.custom_call" and dimensions and call_axes(op):
            op.attributes["backend_config"] = divided_call(op, [self.parts])

    def _gather(self, op: ir.Operation) -> None:
        """Shrink the slices of a gather that span the batch."""
        sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
        shape = ir.RankedTensorType(op.operands[0].type).shape
        # Such a slice is as long as the whole dimension was before.
        cut = [e if e <= shape[d] else shape[d] for d, e in enumerate(sizes)]
        op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(cut)

    def _cut(self, kind: ir.Type, dimensions: Sequence[int]) -> ir.RankedTensorType:
        """Return a type with the sizes of one part of the batch."""
        own = ir.RankedTensorType(kind)
        shape = [self._divided(e) if d in dimensions else e for d, e in enumerate(own.shape)]
        return ir.RankedTensorType.get(shape, own.element_type)

    def _divided(self, extent: int) -> int:
        if extent % self.parts:
            raise ValueError(f"{self.parts} micro-batches do not divide a batch of {extent}")
        return extent // self.parts


def _fit_regions(op: ir.Operation) -> None:
    """Give the arguments of a loop's regions the types of its operands."""
    if op.name == "stablehlo.while":
        for region in op.regions:
            for argument, value in zip(region.blocks[0].arguments, op.operands, strict=True):
                argument.set_type(value.type)


def _along(op: ir.Operation) -> int:
    """Return the dimension along which an iota counts."""
    return int(ir.IntegerAttr(op.attributes["iota_dimension"]).value)


def _shape(value: Value) -> list[int]:
    return list(value.type.shape)


def _splat(kind: ir.Type, value: int) -> Value:
    own = ir.RankedTensorType(kind)
    element = own.element_type
    whole = isinstance(element, ir.IntegerType)
    one = ir.IntegerAttr.get(element, value) if whole else ir.FloatAttr.get(element, float(value))
    return hlo.constant(ir.DenseElementsAttr.get_splat(own, one))


def _reshape(value: Value, shape: Sequence[int]) -> Value:
    return hlo.reshape(ir.RankedTensorType.get(shape, value.type.element_type), value)
