"""Trip counts of loops whose bounds and steps follow from constants.

Values are followed from the entry down into functions, branches and loop bodies, and through
conversions and tuples. A parameter is known if all its call sites agree, and an element of a loop's
state if the body returns it unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...common.errors import ProgramError
from .op_table import named
from .program import NESTING, Computation, Op, Program

#: Ops whose value equals that of their operand, for scalars.
_TRANSPARENT = named("transparent")
#: Comparisons after swapping their sides, for bounds on the left.
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
#: Ops that are evaluated for constants; sums also involve counters (`_combine`).
_FOLDED: dict[str, Callable[[int, int], int]] = {
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
}
#: Most ops through which a value is followed; each takes three of Python's default limit of 1000
#: stack frames.
_MAX_DEPTH = 100


class Linear(NamedTuple):
    """Element ``element`` of the loop's state (-1 for none) plus a constant."""

    element: int
    offset: int


class _Compare(NamedTuple):
    direction: str
    lhs: Linear
    rhs: Linear


Value = Linear | _Compare | list["Value"] | None
Arguments = list[Value]


def set_trip_counts(program: Program, given: Mapping[str, int] | int | None = None) -> None:
    """Set ``attrs["trip_count"]`` of every ``while``: inferred, given by the user, or ``None``.

    Args:
        program: Changed in place, except for counts that are already set.
        given: As for :func:`apply_given`.

    Raises:
        ProgramError: As for :func:`apply_given`.
    """
    if any(op.opcode == "while" for c in program.computations.values() for op in c.ops):
        _Walk(program).run()
    apply_given(program, given)


def apply_given(program: Program, given: Mapping[str, int] | int | None) -> None:
    """Fill in the user's counts for loops without one.

    Args:
        program: Changed in place.
        given: One count for all loops without one, or counts by the loop's name, its source line
            (``file:line``) or the line number alone.

    Raises:
        ProgramError: ``given`` names a loop that the program does not have, or contradicts the
            known count of one.
    """
    loops = [op for c in program.computations.values() for op in c.ops if op.opcode == "while"]
    used: set[str] = set()
    for op in loops:
        own = op.attrs.get("trip_count")
        if isinstance(given, int):
            op.attrs["trip_count"] = given if own is None else own
            continue
        hits = [name for name in loop_names(op) if name in (given or {})]
        used.update(hits)
        if given is None or not hits:
            continue
        count = int(given[hits[0]])
        if own not in (None, count):
            raise ProgramError(
                f"the loop {hits[0]!r} runs {own} times, as its condition says, not {count}",
                where=program.origin,
                hint="give counts of loops whose count is not known",
            )
        op.attrs["trip_count"] = count
    unknown = [] if given is None or isinstance(given, int) else sorted(set(given) - used)
    if unknown:
        known = ", ".join(f"{op.name} ({loop_names(op)[1]})" for op in loops[:10])
        raise ProgramError(
            f"no loop is called {unknown[0]!r}",
            where=program.origin,
            hint=f"the loops are: {known}" if loops else "the program has no loops",
        )


def loop_names(op: Op) -> list[str]:
    """List the names by which a user can refer to a loop: its own and ``file:line``."""
    if op.source is None:
        return [op.name, ""]
    file, line = op.source.file, op.source.line
    return [op.name, f"{file}:{line}", f"{file.rsplit('/', 1)[-1]}:{line}", str(line)]


class _Walk:
    """Visits computations from callers to callees with the known values of their parameters."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[str, Arguments] = {}

    def run(self) -> None:
        """Visit all computations, in which callees come before callers."""
        entry = self.program.entry_computation
        self.known[entry.name] = [None] * len(entry.parameters)
        # Callers first, so that arguments are known when the callee is visited.
        for computation in reversed(list(self.program.computations.values())):
            memo: dict[int, Value] = {}
            arguments = self.known.get(computation.name, [])
            for op in computation.ops:
                if op.called and op.opcode != "fusion":
                    self._visit(op, computation, arguments, memo)

    def _visit(
        self, op: Op, computation: Computation, arguments: Arguments, memo: dict[int, Value]
    ) -> None:
        if op.opcode not in NESTING:
            for name in op.called:
                self._meet(name, [])
            return
        values = [self._value(computation, i, arguments, 0, memo) for i in op.operands]
        if op.opcode == "while":
            if op.attrs.get("trip_count") is None:
                op.attrs["trip_count"] = self._trip_count(op, values)
            values = self._invariants(op, values)
        elif op.opcode == "conditional":
            values = values[1:]
        # In HLO each branch has its own operand; StableHLO's branches capture all values.
        apart = op.opcode == "conditional" and self.program.dialect == "hlo"
        for place, name in enumerate(op.called):
            self._meet(name, values[place : place + 1] if apart else values)

    def _meet(self, name: str, values: Arguments) -> None:
        before = self.known.get(name)
        if before is None:
            self.known[name] = list(values)
        else:
            agreed = zip(before, values, strict=False)
            # Values of a function with several callers are known only if all agree.
            self.known[name] = [a if a == b else None for a, b in agreed]

    def _invariants(self, op: Op, initial: Arguments) -> Arguments:
        """Return what is known about the loop's state in any iteration."""
        body = self.program.computations[op.called[1]]
        if _single_tuple(op, body):
            whole = initial[0]
            return [self._kept(body, whole, single=True)] if isinstance(whole, list) else [None]
        return self._kept(body, initial)

    def _kept(self, body: Computation, initial: Arguments, *, single: bool = False) -> Arguments:
        """Return the initial elements of a state that the body keeps; ``None`` for the others."""
        state: Arguments = [Linear(i, 0) for i in range(len(initial))]
        after = self._state_after(body, [state] if single else state)
        after += [None] * (len(initial) - len(after))
        return [v if after[i] == Linear(i, 0) else None for i, v in enumerate(initial)]

    def _state_after(self, body: Computation, state: Arguments) -> Arguments:
        """Return the results of the body, followed by captured values, which never change."""
        result = self._value(body, body.root, state, 0, {})
        results = list(result) if isinstance(result, list) else [result]
        return [*results, *state[len(results) :]]

    def _trip_count(self, op: Op, initial: Arguments) -> int | None:
        condition, body = (self.program.computations[name] for name in op.called)
        single = _single_tuple(op, body)
        if single:
            whole = initial[0]
            if not isinstance(whole, list):
                return None
            initial = whole
        # Bounds and steps may be captured from outside or carried unchanged.
        fixed = self._kept(body, initial, single=single)
        elements: Arguments = [f if _is_number(f) else Linear(i, 0) for i, f in enumerate(fixed)]
        state: Arguments = [elements] if single else elements
        test = self._value(condition, condition.root, state, 0, {})
        if not isinstance(test, _Compare):
            return None
        after = self._state_after(body, state)
        for direction, counter, bound in (
            test,
            (_SWAPPED.get(test.direction, ""), test.rhs, test.lhs),
        ):
            first, limit = _pick(initial, counter), _at_start(bound, initial, after)
            step = _pick(after, counter)
            if first is None or limit is None or counter.element < 0:
                continue
            # The counter must start at a known number, and each iteration must add a constant to
            # the same element.
            if first.element >= 0 or step is None or step.element != counter.element:
                continue
            return _count(direction, first.offset + counter.offset, step.offset, limit)
        return None

    def _value(
        self,
        where: Computation,
        index: int,
        arguments: Arguments,
        depth: int,
        memo: dict[int, Value],
    ) -> Value:
        if index not in memo:
            # Set before descending, so that a cycle (malformed input) gives "unknown" instead of
            # endless recursion.
            memo[index] = None
            if depth < _MAX_DEPTH:
                memo[index] = self._compute(where, where.ops[index], arguments, depth + 1, memo)
        return memo[index]

    def _compute(
        self, where: Computation, op: Op, arguments: Arguments, depth: int, memo: dict[int, Value]
    ) -> Value:
        def operand(position: int) -> Value:
            return self._value(where, op.operands[position], arguments, depth, memo)

        code = op.opcode
        if code == "parameter":
            number = int(op.attrs["index"])
            return arguments[number] if number < len(arguments) else None
        if code == "constant":
            return _constant(op.attrs.get("value"))
        if code in _TRANSPARENT and op.operands:
            several = op.is_tuple and len(op.operands) > 1
            return [operand(i) for i in range(len(op.operands))] if several else operand(0)
        if code == "tuple":
            return [operand(i) for i in range(len(op.operands))]
        if code == "get-tuple-element":
            whole, element = operand(0), int(op.attrs["index"])
            return whole[element] if isinstance(whole, list) and element < len(whole) else None
        if code in ("call", "fusion") and op.called:
            inner = self.program.computations[op.called[0]]
            values = [operand(i) for i in range(len(op.operands))]
            return self._value(inner, inner.root, values, depth, {})
        # Nested loops multiply the work of this search, so only a few levels are entered.
        if code == "while" and op.is_tuple and len(op.called) == 2 and depth < 20:
            initial = [operand(i) for i in range(len(op.operands))]
            kept = self._invariants(op, initial)
            return kept[0] if _single_tuple(op, self.program.computations[op.called[1]]) else kept
        if len(op.operands) == 2:
            return _combine(op, operand(0), operand(1))
        return None


def _single_tuple(op: Op, body: Computation) -> bool:
    """Return whether the state is a single tuple, as in HLO, instead of several operands."""
    return len(op.operands) == 1 and body.parameters[0].is_tuple


def _is_number(value: Value) -> bool:
    return isinstance(value, Linear) and value.element < 0


def _constant(value: object) -> Value:
    return Linear(-1, int(value)) if isinstance(value, int) else None


def _pick(state: Arguments, value: Linear) -> Linear | None:
    """Return the element of the state that a value is based on."""
    element = state[value.element] if 0 <= value.element < len(state) else None
    return element if isinstance(element, Linear) else None


def _at_start(bound: Linear, initial: Arguments, after: Arguments) -> int | None:
    """Return the bound as a number if no iteration changes it."""
    if bound.element < 0:
        return bound.offset
    if _pick(after, bound) != Linear(bound.element, 0):
        return None
    first = _pick(initial, bound)
    return first.offset + bound.offset if first and first.element < 0 else None


def _combine(op: Op, lhs: Value, rhs: Value) -> Value:
    """Compute sums, differences and comparisons of linear values, and products of constants."""
    if not isinstance(lhs, Linear) or not isinstance(rhs, Linear):
        return None
    if op.opcode == "compare":
        return _Compare(str(op.attrs.get("direction", "")), lhs, rhs)
    if op.opcode == "add" and min(lhs.element, rhs.element) < 0:
        return Linear(max(lhs.element, rhs.element), lhs.offset + rhs.offset)
    if op.opcode == "subtract" and rhs.element < 0:
        return Linear(lhs.element, lhs.offset - rhs.offset)
    if op.opcode in _FOLDED and lhs.element < 0 and rhs.element < 0:
        return Linear(-1, _FOLDED[op.opcode](lhs.offset, rhs.offset))
    return None


def _count(direction: str, first: int, step: int, bound: int) -> int | None:
    """Count the leading elements of ``first, first + step, …`` that satisfy the comparison."""
    if direction in ("GT", "GE"):
        return _count({"GT": "LT", "GE": "LE"}[direction], -first, -step, -bound)
    # For integers, i <= b means i < b + 1.
    if direction == "LE":
        direction, bound = "LT", bound + 1
    if direction == "LT":
        if first >= bound:
            return 0
        # Ceiling of (bound - first) / step.
        return -((first - bound) // step) if step > 0 else None
    if direction == "NE":
        if first == bound:
            return 0
        whole = step != 0 and (bound - first) % step == 0
        return (bound - first) // step if whole and (bound - first) // step > 0 else None
    if direction == "EQ":
        return 0 if first != bound else (1 if step else None)
    return None
