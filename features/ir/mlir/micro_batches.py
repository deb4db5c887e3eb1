"""Gradient accumulation: a training step that goes through its batch in parts.

What depends on the batch becomes the body of a loop over micro-batches, as a ``lax.scan`` around
the gradient does; sums over the batch, such as gradients, are added up over its iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..jax_compat import copy_module, functions_of, walk_ops
from .attention_calls import call_axes, divided_call

if TYPE_CHECKING:
    from jaxlib.mlir import ir


@dataclass(frozen=True)
class Accumulation:
    """What of a step is done for each micro-batch. Ops are numbered as ``walk_ops`` counts.

    Attributes:
        body: Ops of ``main`` that are done for each micro-batch, in order.
        batch: Dimensions that are the batch, of each op's results: by op and result.
        arguments: The dimension that is the batch, by number of the argument.
        sums: Results of the body that are added up over the micro-batches.
        free: Ops of the body that do not depend on the batch: others may read them, too.
    """

    body: Sequence[int]
    batch: Mapping[tuple[int, int], Sequence[int]]
    arguments: Mapping[int, int]
    sums: Sequence[tuple[int, int]]
    free: frozenset[int]


def in_micro_batches(module: ir.Module, plan: Accumulation, parts: int) -> ir.Module:
    """A copy of a step that goes through its batch in equal parts.

    Part ``k`` are rows ``k``, ``k + parts`` and so on, so that a batch which is cut over devices
    needs no exchange.

    Args:
        module: StableHLO, its calls inlined.
        plan: What is done for each part.
        parts: Number of micro-batches; divides all dimensions that are the batch.

    Raises:
        ValueError: An op does not fit a part of the batch.
    """
    return _rewritten(module, plan, parts, _Writer.write)


def one_micro_batch(module: ir.Module, plan: Accumulation, parts: int) -> ir.Module:
    """A copy of a step for one of equal parts of its batch, optimiser included.

    Ops keep their numbers. Rows are numbered from 0: random numbers are those of a smaller batch.

    Args:
        module: StableHLO, its calls inlined.
        plan: What is done for each part.
        parts: Number of micro-batches; divides all dimensions that are the batch.

    Raises:
        ValueError: An op does not fit a part of the batch.
    """
    return _rewritten(module, plan, parts, _Writer.shrink)


def _rewritten(
    module: ir.Module, plan: Accumulation, parts: int, rewrite: Callable[[_Writer], None]
) -> ir.Module:
    from jaxlib.mlir import ir

    copy = copy_module(module)
    with copy.context, ir.Location.unknown():
        rewrite(_Writer(copy, plan, parts))
        if not copy.operation.verify():
            raise ValueError("an op of the step does not fit a part of the batch")
    return copy


class _Writer:
    """State while the loop is written; the module's context and a location are entered."""

    def __init__(self, module: ir.Module, plan: Accumulation, parts: int) -> None:
        self.plan, self.parts = plan, parts
        self.ops = walk_ops(module)
        self.main = functions_of(module)["main"]
        self.block = self.main.regions[0].blocks[0]
        self.numbers = {op: number for number, op in enumerate(self.ops)}
        #: Number of the micro-batch, in the loop's body.
        self.counter: Any = None

    def write(self) -> None:
        from jaxlib.mlir import ir

        start = ir.InsertionPoint.at_block_begin(self.block)
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
        inits = [_splat(counter, 0, start), *(_splat(v.type, 0, start) for v in sums)]
        inits += [
            self._interleaved(arguments[n], self.plan.arguments[n], start)
            if n in self.plan.arguments
            else arguments[n]
            for n in read
        ]
        kinds = [value.type for value in inits]
        loop = ir.Operation.create(
            "stablehlo.while", results=kinds, operands=inits, regions=2, ip=start
        )
        places_of = [ir.Location.unknown()] * len(kinds)
        condition = loop.regions[0].blocks.append(*kinds, arg_locs=places_of)
        step = loop.regions[1].blocks.append(*kinds, arg_locs=places_of)
        self._condition(condition)
        self.counter = step.arguments[0]
        known: dict[Any, Any] = {}
        inside = ir.InsertionPoint(step)
        for n, value in zip(read, list(step.arguments)[1 + len(sums) :], strict=True):
            cut = n in self.plan.arguments
            known[arguments[n]] = self._part(value, arguments[n], n, step, inside) if cut else value
        for op in body:
            self._clone(op, known, inside)
        one = _splat(counter, 1, inside)
        after = [_add(step.arguments[0], one, inside)]
        for value, total in zip(sums, list(step.arguments)[1:], strict=False):
            after.append(_add(total, known[value], inside))
        after += list(step.arguments)[1 + len(sums) :]
        ir.Operation.create("stablehlo.return", operands=after, ip=inside)
        for value, total in zip(sums, list(loop.results)[1:], strict=False):
            value.replace_all_uses_with(total)
        for op in reversed(body):
            # What the optimiser reads as well, such as a constant, is in both places.
            if not any(True for value in op.results for _ in value.uses):
                op.erase()
            elif self.numbers[op] not in self.plan.free:
                raise ValueError(f"{op.name} of the batch is read outside of its micro-batch")

    def shrink(self) -> None:
        """Give the whole function the sizes of a part of the batch."""
        from jaxlib.mlir import ir

        for number, value in enumerate(self.block.arguments):
            if number in self.plan.arguments:
                own = ir.RankedTensorType(value.type)
                shape = list(own.shape)
                at = self.plan.arguments[number]
                shape[at] = self._divided(shape[at])
                value.set_type(ir.RankedTensorType.get(shape, own.element_type))
        for number in self.plan.body:
            for offset, inner in enumerate(walk_ops(self.ops[number])):
                self._shrink(inner, number + offset)
                _fit_regions(inner)
        kind = ir.FunctionType(ir.TypeAttr(self.main.attributes["function_type"]).value)
        inputs = [value.type for value in self.block.arguments]
        self.main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(inputs, kind.results)
        )

    def _condition(self, block: ir.Block) -> None:
        from jaxlib.mlir import ir

        place = ir.InsertionPoint(block)
        most = _splat(block.arguments[0].type, self.parts, place)
        flag = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
        less = ir.Operation.create(
            "stablehlo.compare",
            results=[flag],
            operands=[block.arguments[0], most],
            attributes={
                "comparison_direction": ir.Attribute.parse("#stablehlo<comparison_direction LT>"),
                "compare_type": ir.Attribute.parse("#stablehlo<comparison_type SIGNED>"),
            },
            ip=place,
        )
        ir.Operation.create("stablehlo.return", operands=[less.results[0]], ip=place)

    def _interleaved(self, value: Any, dimension: int, place: ir.InsertionPoint) -> Any:
        """The batch ``(…, n, …)`` as ``(…, n / parts, parts, …)``."""
        shape = list(value.type.shape)
        shape[dimension : dimension + 1] = [self._divided(shape[dimension]), self.parts]
        return _reshape(value, shape, place)

    def _part(
        self, value: Any, whole: Any, number: int, step: ir.Block, place: ir.InsertionPoint
    ) -> Any:
        """The micro-batch of an iteration."""
        from jaxlib.mlir import ir

        at = self.plan.arguments[number] + 1
        shape = list(value.type.shape)
        shape[at] = 1
        zero = _splat(step.arguments[0].type, 0, place)
        starts = [step.arguments[0] if d == at else zero for d in range(len(shape))]
        part = ir.Operation.create(
            "stablehlo.dynamic_slice",
            results=[ir.RankedTensorType.get(shape, value.type.element_type)],
            operands=[value, *starts],
            attributes={"slice_sizes": ir.DenseI64ArrayAttr.get(shape)},
            ip=place,
        )
        return _reshape(part.results[0], [*shape[:at], *shape[at + 1 :]], place)

    def _clone(self, op: ir.Operation, known: dict[Any, Any], place: ir.InsertionPoint) -> None:
        number = self.numbers[op]
        dimensions = self.plan.batch.get((number, 0), ())
        if op.name == "stablehlo.iota" and _along(op) in dimensions:
            known[op.results[0]] = self._rows(op, dimensions, place)
            return
        clone = op.clone(ip=place).operation
        known.update(zip(op.results, clone.results, strict=True))
        for offset, inner in enumerate(walk_ops(clone)):
            for n, value in enumerate(inner.operands):
                if value in known:
                    inner.operands[n] = known[value]
            self._shrink(inner, number + offset)
            _fit_regions(inner)

    def _rows(self, op: ir.Operation, dimensions: Sequence[int], place: ir.InsertionPoint) -> Any:
        """Numbers of a part's rows in the whole batch, so that random numbers stay the same."""
        from jaxlib.mlir import ir

        kind = ir.RankedTensorType(op.results[0].type)
        shape = [self._divided(e) if d in dimensions else e for d, e in enumerate(kind.shape)]
        # Counted in whole numbers: a short float would round the product, not the row.
        whole = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))

        def made(name: str, *operands: Any, kind: Any = whole, **attributes: Any) -> Any:
            own = ir.Operation.create(
                f"stablehlo.{name}",
                results=[kind],
                operands=operands,
                attributes=attributes,
                loc=op.location,
                ip=place,
            )
            return own.results[0]

        rows = made("iota", iota_dimension=op.attributes["iota_dimension"])
        number = made(
            "broadcast_in_dim", self.counter, broadcast_dimensions=ir.DenseI64ArrayAttr.get([])
        )
        # Part k has rows k, k + parts and so on.
        rows = made("add", made("multiply", rows, _splat(whole, self.parts, place)), number)
        return made("convert", rows, kind=ir.RankedTensorType.get(shape, kind.element_type))

    def _shrink(self, op: ir.Operation, number: int) -> None:
        """Give an op the types and sizes of a part of the batch."""
        from jaxlib.mlir import ir

        for n, value in enumerate(op.results):
            dimensions = self.plan.batch.get((number, n), ())
            if dimensions:
                kind = ir.RankedTensorType(value.type)
                shape = [
                    self._divided(e) if d in dimensions else e for d, e in enumerate(kind.shape)
                ]
                value.set_type(ir.RankedTensorType.get(shape, kind.element_type))
        dimensions = self.plan.batch.get((number, 0), ())
        if op.name == "stablehlo.constant" and dimensions:
            data = ir.DenseElementsAttr(op.attributes["value"])
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
        """Slices of a gather that span the batch span a part of it."""
        from jaxlib.mlir import ir

        sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
        shape = ir.RankedTensorType(op.operands[0].type).shape
        # A slice as long as the whole dimension was before it was cut.
        cut = [e if e <= shape[d] else shape[d] for d, e in enumerate(sizes)]
        op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(cut)

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
    """The dimension that an iota counts."""
    from jaxlib.mlir import ir

    return int(ir.IntegerAttr(op.attributes["iota_dimension"]).value)


def _splat(kind: Any, value: int, place: ir.InsertionPoint) -> Any:
    from jaxlib.mlir import ir

    own = ir.RankedTensorType(kind)
    integer = isinstance(own.element_type, ir.IntegerType)
    one = (
        ir.IntegerAttr.get(own.element_type, value)
        if integer
        else ir.FloatAttr.get(own.element_type, float(value))
    )
    data = ir.DenseElementsAttr.get_splat(own, one)
    made = ir.Operation.create(
        "stablehlo.constant", results=[own], attributes={"value": data}, ip=place
    )
    return made.results[0]


def _reshape(value: Any, shape: Sequence[int], place: ir.InsertionPoint) -> Any:
    from jaxlib.mlir import ir

    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    made = ir.Operation.create("stablehlo.reshape", results=[kind], operands=[value], ip=place)
    return made.results[0]


def _add(left: Any, right: Any, place: ir.InsertionPoint) -> Any:
    from jaxlib.mlir import ir

    made = ir.Operation.create(
        "stablehlo.add", results=[left.type], operands=[left, right], ip=place
    )
    return made.results[0]
