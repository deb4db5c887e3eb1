"""Memory of a program from buffer lifetimes: the peak, and use over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from ..cost.bytes import array_traffic
from ..ir.op_table import UPDATES, named, ops_with
from ..ir.program import NESTING, Computation, Op, Program
from .kernel import is_free

#: Ops whose result cannot take over the buffer of an operand.
_NOT_IN_PLACE = ops_with(lambda spec: not spec.in_place)
#: Ops that name values produced elsewhere.
_VIEWS = named("views")
_Leaves = list[int]


class MemoryProfile(NamedTuple):
    """Bytes in use while each op of a program's entry runs.

    Attributes:
        names: Names of the entry's ops, in order.
        bytes: Bytes in use while each op runs, including arguments and results.
        resident: Bytes of arguments and results, which live throughout.
    """

    names: tuple[str, ...]
    bytes: tuple[float, ...]
    resident: float


def peak_memory(program: Program) -> float:
    """Compute the most bytes in use at one time, including arguments and results.

    A buffer lives from its definition to its last use in the order of ops. Arguments and results
    live throughout; a result that reuses a donated argument's buffer is not counted again. A loop
    keeps its state in place and adds its body's peak; an update or elementwise op reuses an
    operand's buffer of the same size that is not read later.

    Args:
        program: Ideally scheduled HLO; for StableHLO the order of ops is taken as the schedule.

    Returns:
        Bytes. Compilers additionally pad, and reserve scratch space for library calls.
    """
    profile = memory_over_time(program)
    return max(profile.bytes, default=profile.resident)


def memory_over_time(program: Program) -> MemoryProfile:
    """Compute the bytes in use while each op of the entry runs; see :func:`peak_memory`.

    Args:
        program: As for :func:`peak_memory`.
    """
    entry = program.entry_computation
    arguments = sum(op.result_bytes for op in entry.parameters)
    # A donated argument and the result in its place share a buffer.
    aliased = {parameter: output for output, parameter in program.aliases}
    shared = sum(op.result_bytes for op in entry.parameters if int(op.attrs["index"]) in aliased)
    # Peaks of called computations are memoised over the whole program.
    results, living = _Lifetimes(program, entry, {}).living()
    resident = float(arguments + max(0, results - shared))
    names = tuple(op.name for op in entry.ops)
    return MemoryProfile(names, tuple(resident + now for now in living), resident)


class _Lifetimes:
    """Buffers of one computation; ``memo`` caches the peaks of computations that it calls."""

    def __init__(self, program: Program, comp: Computation, memo: dict[str, int]) -> None:
        self.program = program
        self.comp = comp
        self.memo = memo
        # Buffers are numbered; `leaves` lists, for each op, the buffers of its result's arrays.
        self.sizes: list[int] = []
        self.starts: list[int] = []
        self.leaves: list[_Leaves] = []
        self.outside: set[int] = set()

    def living(self) -> tuple[int, list[int]]:
        """Compute the bytes of results allocated here, and of temporaries over time.

        Returns:
            Bytes of results, bytes of temporaries while each op runs.
        """
        last = self._last_uses()
        taken: dict[int, int] = {}
        for position, op in enumerate(self.comp.ops):
            self.leaves.append(self._define(op, position, last, taken))
        root = self.leaves[self.comp.root]
        kept = {self._final(b, taken) for b in root} - self.outside
        results = sum(self.sizes[b] for b in kept)
        return results, self._sweep(last, taken, kept)

    def _last_uses(self) -> list[int]:
        """Return the index of the last op that reads each op's value, including through views."""
        ops = self.comp.ops
        # An unused value lives while its op runs.
        last = list(range(len(ops)))
        # Index until which an asynchronous op uses its operands, by the index of its start.
        ends: dict[int, int] = {}
        # Backwards, so that a view's last use is known when its operand is reached.
        for position in range(len(ops) - 1, -1, -1):
            op = ops[position]
            if op.opcode in _VIEWS or op.opcode == "while" or _is_done(op):
                through = last[position]
            else:
                through = ends.get(position, position)
            for operand in op.operands:
                last[operand] = max(last[operand], through, position)
                if _is_done(op) or op.opcode == "async-update":
                    ends[operand] = ends.get(position, position)
        return last

    def _define(self, op: Op, position: int, last: list[int], taken: dict[int, int]) -> _Leaves:
        opcode = op.opcode
        inputs = [self.leaves[i] for i in op.operands]
        if opcode == "get-tuple-element":
            return self._element(op, inputs[0])
        joined = [b for leaves in inputs for b in leaves]
        if _is_done(op) and joined:
            # The first leaves that its start allocated; scalars of its state follow.
            started = max(self.starts[b] for b in joined)
            return [b for b in joined if self.starts[b] == started][: len(op.results)]
        # The end of a send forwards its token.
        if opcode.endswith("-done") and joined:
            return joined[-len(op.results) :]
        if opcode in _VIEWS:
            return joined
        if opcode == "while":
            return self._state(op, joined, position)
        # Starts repeat their operands among their results, except all-reduce-start.
        if opcode.endswith("-start") and len(op.results) > len(joined):
            made = [self._new(leaf.nbytes, position) for leaf in op.results[len(joined) :]]
            # Operands come first, except in a copy, where they are second.
            return [made[0], *joined, *made[1:]] if opcode == "copy-start" else [*joined, *made]
        # Arguments are counted by the caller, constants are part of the executable.
        outside = opcode in ("parameter", "constant") or is_free(op)
        made = []
        for leaf in op.results:
            buffer = self._new(0 if opcode == "constant" else leaf.nbytes, position)
            made.append(buffer)
            if outside:
                self.outside.add(buffer)
            else:
                self._take_over(op, buffer, position, last, taken)
        return made

    def _new(self, size: int, position: int) -> int:
        self.sizes.append(size)
        self.starts.append(position)
        return len(self.sizes) - 1

    def _state(self, op: Op, given: _Leaves, position: int) -> _Leaves:
        """Return the buffers of a loop's results: its state's, or new ones if it may not write.

        Compiled programs copy arguments and constants before a loop that changes them; StableHLO
        leaves that to the compiler.
        """
        unchanged = _unchanged(op, self.program)
        return [
            self._new(leaf.nbytes, position)
            if buffer in self.outside and number not in unchanged
            else buffer
            for number, (buffer, leaf) in enumerate(zip(given, op.results, strict=False))
        ]

    def _element(self, op: Op, leaves: _Leaves) -> _Leaves:
        """Return the leaves of one tuple element; a nested tuple has several."""
        source = self.comp.ops[op.operands[0]]
        wanted = len(op.results)
        index = int(op.attrs["index"])
        # In a flat tuple the index is that of the leaf.
        if wanted == 1 and not source.attrs.get("nesting"):
            return leaves[index : index + 1]
        if wanted == len(leaves):
            return leaves
        # Nested tuples: the first leaves from there on that match by type.
        for start in range(index, len(source.results) - wanted + 1):
            if source.results[start : start + wanted] == op.results:
                return leaves[start : start + wanted]
        return leaves[:wanted]

    def _take_over(
        self, op: Op, buffer: int, position: int, last: list[int], taken: dict[int, int]
    ) -> None:
        """Let a result reuse the buffer of an operand that dies here."""
        if not self._in_place(op):
            return
        for operand in op.operands:
            if last[operand] > position:
                continue
            for candidate in self.leaves[operand]:
                if candidate in taken or candidate in self.outside:
                    continue
                # The last use of the defining op includes uses through views, loops and tuples.
                dies = last[self.starts[candidate]] <= position
                if dies and self.sizes[candidate] == self.sizes[buffer]:
                    taken[candidate] = buffer
                    return

    def _in_place(self, op: Op) -> bool:
        """Return whether an element of the result depends on no other element of the operand."""
        if op.opcode != "fusion":
            return op.opcode not in _NOT_IN_PLACE
        inner = self.program.computations[op.called[0]]
        root = inner.root_op
        if root.opcode == "bitcast":
            root = inner.ops[root.operands[0]]
        # XLA fuses an update only if it can run in place.
        if root.opcode in UPDATES:
            return True
        codes = {o.opcode for o in inner.ops} - {"broadcast", "iota"}
        return op.attrs.get("kind") == "kLoop" and not codes & _NOT_IN_PLACE

    @staticmethod
    def _final(buffer: int, taken: dict[int, int]) -> int:
        while buffer in taken:
            buffer = taken[buffer]
        return buffer

    def _sweep(self, last: list[int], taken: dict[int, int], kept: set[int]) -> list[int]:
        """Return the bytes of living temporaries while each op runs."""
        change = [0] * (len(self.comp.ops) + 1)
        for buffer, size in enumerate(self.sizes):
            if buffer in self.outside or self._final(buffer, taken) in kept:
                continue
            change[self.starts[buffer]] += size
            # A successor in the same buffer starts at the op where this one ends.
            end = self.starts[taken[buffer]] - 1 if buffer in taken else last[self.starts[buffer]]
            change[end + 1] -= size
        living, in_use = 0, []
        for position, op in enumerate(self.comp.ops):
            living += change[position]
            in_use.append(living + self._inside(op))
        return in_use

    def _inside(self, op: Op) -> int:
        """Return the peak of what a loop, branch or call needs besides operands and results."""
        if op.opcode not in NESTING and op.opcode != "async-start":
            return 0
        return max((self._called(name) for name in op.called), default=0)

    def _called(self, name: str) -> int:
        if name not in self.memo:
            comp = self.program.computations[name]
            inside = _Lifetimes(self.program, comp, self.memo).living()[1]
            self.memo[name] = max(inside, default=0)
        return self.memo[name]


def _is_done(op: Op) -> bool:
    """Return whether an op forwards the result of an asynchronous one; not so the end of a send."""
    return op.opcode.endswith("-done") and op.result_bytes > 0


def _unchanged(op: Op, program: Program) -> set[int]:
    """Return the elements of a loop's state that its body forwards unchanged."""
    if len(op.called) != 2:
        return set(range(len(op.results)))
    ops = program.computations[op.called[1]].ops
    root = program.computations[op.called[1]].root_op
    outputs = [ops[i] for i in root.operands] if root.opcode == "tuple" else [root]
    known = ("parameter", "get-tuple-element")
    return {
        number
        for number, output in enumerate(outputs)
        if output.opcode in known and int(output.attrs["index"]) == number
    }


def entry_bytes(program: Program) -> float:
    """Return a lower bound on the bytes of arguments that a program reads and results it writes.

    An argument counts as much as the user that touches most of it. Functions count where they are
    called. What loops and branches read and write is excluded.
    """
    moved = _Moved(program)
    root = moved.run(program.entry_computation)
    total = sum(moved.touched.values())
    for place, leaf in set(root):
        moves = moved.written.get(place, [])
        total += sum(moves) if leaf < 0 else sum(moves[leaf : leaf + 1])
    return total


#: Producers of a value: index among the ops that ran, and the leaf of its tuple or -1 for all.
_Makers = list[tuple[int, int]]


class _Moved:
    """What a program's ops read from its arguments, and what they write.

    Attributes:
        touched: Bytes touched of each argument.
        written: Bytes of each result of an op, by the op's index.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.arguments: set[int] = set()
        self.touched: dict[tuple[int, int], float] = {}
        self.written: dict[int, list[float]] = {}
        self._places = count()

    def run(self, comp: Computation, arguments: Sequence[_Makers] = ()) -> _Makers:
        """Process a computation, the entry without arguments; return the producers of its root."""
        makers: list[_Makers] = []
        for op in comp.ops:
            inputs = [makers[o] for o in op.operands]
            if op.opcode == "parameter" and arguments:
                makers.append(arguments[int(op.attrs["index"])])
            elif op.opcode == "call":
                makers.append(self.run(self.program.computations[op.called[0]], inputs))
            elif op.opcode in _VIEWS:
                makers.append(_seen(op, comp, inputs))
            else:
                makers.append([(self._run_op(op, comp, makers), -1)])
        return makers[comp.root] if makers else []

    def _run_op(self, op: Op, comp: Computation, makers: Sequence[_Makers]) -> int:
        place = next(self._places)
        if op.opcode == "parameter":
            self.arguments.add(place)
        # Their traffic is that of the computations that they call.
        if is_free(op) or op.opcode in NESTING:
            return place
        read, results = array_traffic(op, comp, self.program)
        leaves = [o for o in op.operands for _ in comp.ops[o].results]
        for operand, (_, moved) in zip(leaves, read, strict=True):
            for maker in makers[operand]:
                if maker[0] in self.arguments:
                    self.touched[maker] = max(self.touched.get(maker, 0.0), moved)
        self.written[place] = [moved for _, moved in results]
        return place


def _seen(op: Op, comp: Computation, inputs: Sequence[_Makers]) -> _Makers:
    """Return the producers of a view; for a part of a nested tuple, those of all parts."""
    own = [maker for makers in inputs for maker in makers]
    if op.opcode != "get-tuple-element":
        return own
    index, source = int(op.attrs["index"]), comp.ops[op.operands[0]]
    if len(own) == 1:
        return [(own[0][0], index)]
    flat = len(own) == len(source.results) and not source.attrs.get("nesting")
    return own[index : index + 1] if flat else own
