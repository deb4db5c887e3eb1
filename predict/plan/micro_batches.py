"""Ops of a training step that run per micro-batch, and the sums that are accumulated.

Gradient accumulation is possible if all rows of the batch are independent and only sums over rows,
such as gradients and the loss, reach the optimizer. Ops that mix rows in any other way (batch
normalization statistics, expert capacity) would compute something else in micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.errors import PlanError
from ...features.ir.mlir.attention_calls import draws_numbers
from ...features.ir.mlir.micro_batches import Accumulation
from ...features.ir.program import NESTING, Op, Program, reached
from .arguments import Argument
from .dimensions import BARRIERS, Dimensions, Step
from .op_axes import OPAQUE, is_attention

#: Unary ops that preserve a sum over rows.
_LINEAR = frozenset(("convert", "negate", "reshape", "transpose"))
#: Ops that only forward values.
_NAMES = frozenset(("get-tuple-element", "parameter", "tuple"))


def accumulation_of(
    program: Program, found: Dimensions, arguments: Sequence[Argument]
) -> Accumulation:
    """Find the ops that run for each micro-batch.

    Args:
        program: The step, with its calls inlined.
        found: Dimensions of the step.
        arguments: Arguments of the step.

    Raises:
        PlanError: Rows of the batch depend on each other, or results have a batch dimension.
    """
    return _Finder(program, found, arguments).accumulation()


@dataclass
class _Finder:
    """The ops of ``main``, by position, and how they depend on the batch.

    Attributes:
        program: The step.
        found: Dimensions of the step.
        arguments: Arguments of the step.
        colours: Colours of batch dimensions.
        batched: Ops with a result that has the batch dimension.
        depends: Ops whose results depend on the batch.
        leads: Ops that a result with the batch dimension depends on.
        partial: Ops whose results are sums over the rows of a micro-batch.
    """

    program: Program
    found: Dimensions
    arguments: Sequence[Argument]
    colours: set[int] = field(default_factory=set)
    batched: set[int] = field(default_factory=set)
    depends: set[int] = field(default_factory=set)
    leads: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)

    def accumulation(self) -> Accumulation:
        """See :func:`accumulation_of`."""
        entry = self.program.entry_computation
        places = entry.parameter_places
        for number, own in enumerate(self.arguments):
            if own.role == "batch":
                value = ((self.program.entry, places[number]), 0)
                self.colours.add(self.found.colours[value][own.batch])
        self.colours.discard(0)
        batch = {
            number: dimensions[0]
            for number, place in places.items()
            if (dimensions := self._batch_dimensions(place, 0))
        }
        for number in batch:
            if self.arguments[number].role in ("parameter", "state"):
                raise _refused(f"the batch enters {self.arguments[number].name}, which persists")
        results = self._results()
        if any(self._batch_dimensions(number, 0) for number in results):
            raise _refused("results of the step have the batch dimension")
        self._spread({places[number] for number in batch})
        self._check_rows()
        self._find_sums()
        return self._written(batch, results)

    def _results(self) -> tuple[int, ...]:
        entry = self.program.entry_computation
        return entry.root_op.operands if entry.root_op.opcode == "tuple" else (entry.root,)

    def _batch_dimensions(self, position: int, leaf: int) -> list[int]:
        value = ((self.program.entry, position), leaf)
        own = self.found.colours.get(value, ())
        return [d for d, colour in enumerate(own) if colour in self.colours]

    def _spread(self, rows: set[int]) -> None:
        ops = self.program.entry_computation.ops
        self.depends |= rows
        for position, op in enumerate(ops):
            if any(self._batch_dimensions(position, n) for n in range(len(op.results))):
                self.batched.add(position)
            if self._reads(op) & self.depends:
                self.depends.add(position)
        self.leads |= self.batched
        for position in range(len(ops) - 1, -1, -1):
            if position in self.leads:
                self.leads |= set(ops[position].operands)
        for position, op in enumerate(ops):
            mixes = position in self.depends & self.leads - self.batched
            if mixes and op.opcode not in _NAMES:
                raise _refused(f"rows of the batch depend on each other at {_line(op)}")
            if op.opcode in NESTING and position in self.batched:
                whole = [
                    n for n in range(len(op.results)) if not self._batch_dimensions(position, n)
                ]
                if any(op.results[n].dtype[0] in "fb" for n in whole):
                    raise _refused(f"the loop at {_line(op)} accumulates gradients itself")

    def _reads(self, op: Op) -> set[int]:
        """Return what an op reads; for an element of a barrier only the operand of that element."""
        if op.opcode == "get-tuple-element":
            maker = self.program.entry_computation.ops[op.operands[0]]
            if maker.opcode in BARRIERS:
                return {maker.operands[int(op.attrs["index"])]}
        return set(op.operands)

    def _check_rows(self) -> None:
        """Check that ops with batch dimensions keep rows apart or sum over them."""
        entry = self.program.entry
        for step in self.found.steps:
            met = [
                (k, d)
                for k, value in enumerate(step.operands)
                for d, colour in enumerate(self.found.colours.get(value, ()))
                if colour in self.colours
            ]
            made = [
                (leaf, d)
                for leaf in range(len(step.op.results))
                for d, colour in enumerate(self.found.colours[step.place, leaf])
                if colour in self.colours
            ]
            along = {at for axis in step.axes for at in axis.operands}
            over = {at for axis in step.axes for at in axis.results}
            # In ``main``, iotas are renumbered; a loop's body does not depend on the micro-batch.
            numbered = (
                step.op.opcode == "iota"
                and (0, step.op.attrs["dimensions"][0]) in made
                and step.place[0] != entry
            )
            if not set(met) <= along or not set(made) <= over or numbered:
                raise _refused(f"{step.op.opcode} at {_line(step.op)} mixes rows of the batch")
            # A library's attention keeps rows apart, unless it draws random numbers.
            known = is_attention(step.op) and not draws_numbers(step.op.config())
            if (met or made) and step.op.opcode in OPAQUE and not known:
                raise _refused(f"{step.op.opcode} at {_line(step.op)} may mix rows of the batch")
            summed = {at for axis in step.axes if axis.summed for at in axis.operands}
            if not summed & set(met):
                continue
            if step.place[0] != entry or not self._adds(step) or made:
                raise _refused(f"{step.op.opcode} at {_line(step.op)} is not a sum over the batch")
            self.partial.add(step.place[1])

    def _adds(self, step: Step) -> bool:
        if step.op.opcode in ("dot", "convolution"):
            return True
        if step.op.opcode not in ("reduce", "scatter") or len(step.op.results) != 1:
            return False
        return self.program.computations[step.op.called[0]].root_op.opcode == "add"

    def _find_sums(self) -> None:
        """Extend the partial sums to linear ops and additions of partial sums."""
        ops = self.program.entry_computation.ops
        readers: dict[int, list[int]] = {}
        for position, op in enumerate(ops):
            for number in op.operands:
                readers.setdefault(number, []).append(position)
        for position, op in enumerate(ops):
            if position in self.leads or position not in self.depends or position in self.partial:
                continue
            fed = [number for number in op.operands if number in self.batched]
            if fed and op.opcode not in _NAMES:
                raise _refused(f"{op.opcode} at {_line(op)} is not a sum over the batch")
            adds = op.opcode == "add" and len(op.operands) == 2
            if (
                (adds or op.opcode in _LINEAR)
                and set(op.operands) <= self.partial
                # A sum that is also read elsewhere would be kept twice.
                and all(readers[number] == [position] for number in op.operands)
            ):
                self.partial.add(position)

    def _written(self, batch: dict[int, int], results: tuple[int, ...]) -> Accumulation:
        entry = self.program.entry_computation
        needed = reached(self.batched | self.partial, lambda number: entry.ops[number].operands)
        body = sorted(n for n in needed if entry.ops[n].opcode not in _NAMES)
        outside = [op for n, op in enumerate(entry.ops) if n not in needed or n == entry.root]
        read = {number for op in outside for number in op.operands} | set(results)
        numbers = {n: _number(entry.ops[n]) for n in body}
        return Accumulation(
            tuple(numbers.values()),
            self._dimensions(),
            batch,
            tuple((numbers[n], 0) for n in body if n in self.partial and n in read),
            frozenset(numbers[n] for n in body if n not in self.batched | self.partial),
        )

    def _dimensions(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the batch dimensions by number of the op and its result, including in loops."""
        made = {}
        for ((visit, position), leaf), colours in self.found.colours.items():
            op = self.program.computations[visit.partition("#")[0]].ops[position]
            own = tuple(d for d, colour in enumerate(colours) if colour in self.colours)
            if own and op.opcode not in _NAMES:
                made[_number(op), leaf] = own
        return made


def _number(op: Op) -> int:
    if op.source is None or op.source.index < 0:
        raise _refused(f"{op.opcode} has no place in the program")
    return op.source.index


def _line(op: Op) -> str:
    return f"{op.source.file}:{op.source.line}" if op.source and op.source.file else op.opcode


def _refused(why: str) -> PlanError:
    return PlanError(
        f"the step cannot be split into micro-batches: {why}",
        where="--micro-batches",
        hint="omit the option, or give 1",
    )
