"""Extract the kernels of a program in the order in which the target runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..cost.flops import op_cost
from ..ir.program import NESTING, Computation, Op, Program, Source
from .canonical import KernelFacts, ProgramFacts, control_facts, facts_of_ir
from .kernel import Kernel, containers, is_free, main_opcodes

#: libtpu writes 2^63 - 1 where it has no estimate; no kernel takes half of that.
_NO_CYCLES = 2.0**62
# As `tag_locations` writes them: "op12/add", nested by slashes.
_TAG = re.compile(r"(?:^|/)op(\d+)(?=/|$)")


def extract_kernels(
    program: Program, ops: Sequence[Source] | None = None
) -> tuple[list[Kernel], list[str]]:
    """List what the target executes, in schedule order.

    Loop bodies appear inline, once, with the trip count as multiplicity, after a kernel of kind
    ``control`` for the loop itself. A condition runs once more than its body, or not at all where
    the compiler knows the trip count. The most expensive branch of a conditional is used.

    Args:
        program: Optimised, scheduled HLO; or StableHLO, in which every op becomes a kernel.
        ops: StableHLO ops by walk index, if the program was compiled with locations ``op<index>``.

    Returns:
        The kernels, and notes on what remained unknown.
    """
    schedule = _Schedule(program, ops)
    schedule.run()
    return schedule.kernels, schedule.notes


def kernel_from_ir(ir: str) -> Kernel:
    """Rebuild a kernel from its canonical text, recomputing kind, costs and hash.

    Raises:
        ProgramError: The text is not an HLO module.
    """
    return _kernel(facts_of_ir(ir), "")


def kernels_from_irs(irs: Iterable[str]) -> list[Kernel]:
    """Rebuild many kernels; equal texts share one object.

    Raises:
        ProgramError: A text is not an HLO module.
    """
    by_ir: dict[str, Kernel] = {}
    return [by_ir.get(ir) or by_ir.setdefault(ir, kernel_from_ir(ir)) for ir in irs]


def _kernel(facts: KernelFacts, name: str) -> Kernel:
    cost = facts.cost
    return Kernel(
        name=name or facts.body.entry_computation.root_op.opcode,
        kind=facts.kind,
        body=facts.body,
        ir=facts.ir,
        hash=facts.hash,
        flops=cost.flops,
        transcendentals=cost.transcendentals,
        bytes_in=cost.bytes_in,
        bytes_out=cost.bytes_out,
    )


class _Schedule:
    """State while one program is flattened."""

    def __init__(self, program: Program, ops: Sequence[Source] | None) -> None:
        self.program = program
        self.ops = ops
        self.facts = ProgramFacts(program)
        self.kernels: list[Kernel] = []
        self.notes: list[str] = []
        # Names of loops without a known trip count.
        self.endless: set[str] = set()
        self.weights: dict[str, float] = {}
        self.tags: dict[str, tuple[Source, ...]] = {}
        self.from_stablehlo = program.dialect == "stablehlo"

    def run(self) -> None:
        """Flatten the entry computation."""
        # Arguments come from outside: no kernel produces them.
        entry = self.program.entry_computation
        self._inline(entry, [frozenset()] * len(entry.parameters), 1.0, ())

    def _inline(
        self, comp: Computation, arguments: list[Value], times: float, scope: tuple[str, ...]
    ) -> Value:
        """Append the kernels of a computation; return the producers of its result."""
        values: list[Value] = []
        for op in comp.ops:
            values.append(self._visit(op, comp, values, arguments, times, scope))
        return values[comp.root]

    def _visit(
        self,
        op: Op,
        comp: Computation,
        values: list[Value],
        arguments: list[Value],
        times: float,
        scope: tuple[str, ...],
    ) -> Value:
        opcode = op.opcode
        if opcode == "parameter":
            index = int(op.attrs["index"])
            return arguments[index] if index < len(arguments) else frozenset()
        inputs = [values[i] for i in op.operands]
        if opcode == "get-tuple-element":
            return pick(inputs[0], int(op.attrs["index"]))
        if opcode == "tuple":
            return inputs
        if opcode == "while" and len(op.called) == 2:
            return self._loop(op, inputs, times, scope)
        if opcode == "conditional" and op.called:
            return self._branch(op, inputs, times, scope)
        if opcode == "call" and op.called and not self._is_one_kernel(op):
            # Functions are inlined: targets run kernels, not calls.
            return self._inline(self.program.computations[op.called[0]], inputs, times, scope)
        # StableHLO has no layouts, so a reshape moves nothing. In optimised HLO a reshape that is
        # not a bitcast does.
        if is_free(op) or (self.from_stablehlo and opcode == "reshape"):
            if len(inputs) > 1 and op.is_tuple:
                return inputs
            return inputs[0] if len(inputs) == 1 else flat(inputs)
        if opcode == "async-update":
            return inputs[0]
        facts = self.facts.of(op, [comp.ops[i] for i in op.operands])
        return self._add(facts, op, inputs, times, scope)

    def _is_one_kernel(self, op: Op) -> bool:
        """Return whether a call runs as one kernel: XLA:CPU's small and parallel calls."""
        if self.from_stablehlo:
            return False
        # XLA:CPU moves small loops into such calls (SmallWhileLoopHoistingPass), which run as one.
        if "xla_cpu_small_call" in str(op.attrs.get("frontend_attributes", "")):
            return True
        inner = self.program.computations[op.called[0]].ops
        work = [o for o in inner if not is_free(o)]
        # A parallel call wraps a single op that XLA:CPU splits over threads.
        return len(work) == 1 and work[0].opcode not in NESTING

    def _add(
        self, facts: KernelFacts, op: Op, inputs: list[Value], times: float, scope: tuple[str, ...]
    ) -> frozenset[int]:
        position = len(self.kernels)
        kernel = _kernel(facts, op.name)
        kernel.multiplicity = times
        kernel.operands = tuple(sorted(flat(inputs)))
        kernel.scope = scope
        kernel.endless = not self.endless.isdisjoint(scope)
        kernel.sources = self._sources(op, facts.kind)
        kernel.async_role = _async_role(op.opcode)
        kernel.cycles = estimated_cycles(op)
        if kernel.async_role == "done":
            self._pair(kernel, position)
        self.kernels.append(kernel)
        return frozenset((position,))

    def _pair(self, done: Kernel, position: int) -> None:
        """Link the end of an asynchronous operation to its start."""
        # The latest unpaired start, since async operations of one kind may be nested.
        for candidate in reversed(done.operands):
            start = self.kernels[candidate]
            if start.async_role == "start" and start.async_peer < 0:
                start.async_peer, done.async_peer = position, candidate
                # The end waits; the cost of the operation is at its start.
                done.kind = start.kind
                return

    def _loop(self, op: Op, inputs: list[Value], times: float, scope: tuple[str, ...]) -> Value:
        trips = self._trips(op)
        # The kernel of the loop itself counts once per iteration; it takes no time
        # (Kernel.takes_time).
        control = self._add(control_facts(op.opcode), op, inputs, times * trips, scope)
        # The body's first kernels wait for the loop itself.
        state = [merge(value, control) for value in inputs]
        condition, body = (self.program.computations[name] for name in op.called)
        inside = (*scope, op.name)
        # The condition runs once more than the body, for the test that ends the loop.
        if not _counted_by_compiler(op):
            self._inline(condition, state, times * (trips + 1), inside)
        # The state passes through unchanged.
        if trips == 0:
            return state[0] if len(state) == 1 else list(state)
        result = self._inline(body, state, times * trips, inside)
        return merge(result, control)

    def _trips(self, op: Op) -> int:
        trips = op.attrs.get("trip_count")
        if trips is not None:
            return int(trips)
        self.endless.add(op.name)
        name = self._place(op)
        self.notes.append(
            f"loop {op.name} has no known trip count and is counted once; give it with "
            f"trip_counts={{{name!r}: N}} or --trip-count {name}=N"
        )
        return 1

    def _place(self, op: Op) -> str:
        """Return how a user would refer to an op: by its source line, or else by its name."""
        origin = self._origin(op.source)
        return f"{origin[0].file}:{origin[0].line}" if origin and origin[0].line else op.name

    def _branch(self, op: Op, inputs: list[Value], times: float, scope: tuple[str, ...]) -> Value:
        # Only the predicate is needed to choose a branch.
        control = self._add(control_facts(op.opcode), op, inputs[:1], times, scope)
        weights = [self._weight(name) for name in op.called]
        # An upper bound: which branch runs depends on data.
        taken = weights.index(max(weights))
        # StableHLO branches share the values that they capture; HLO gives each its own operand.
        arguments = inputs[1:] if self.from_stablehlo else inputs[1 + taken : 2 + taken]
        if len(weights) > 1:
            self.notes.append(
                f"conditional {self._place(op)}: branch {taken}, the costliest of {len(weights)}, "
                "counts"
            )
        body = self.program.computations[op.called[taken]]
        state = [merge(value, control) for value in arguments]
        return merge(self._inline(body, state, times, (*scope, op.name)), control)

    def _weight(self, name: str) -> float:
        """Add up a branch's FLOPs and bytes, only for comparing branches."""
        if name not in self.weights:
            comp = self.program.computations[name]
            costs = [op_cost(op, comp, self.program) for op in comp.ops]
            # A FLOP and a byte count the same here. Engineering estimate, sufficient to rank
            # branches.
            self.weights[name] = sum(c.flops + c.transcendentals + c.bytes for c in costs)
        return self.weights[name]

    def _sources(self, op: Op, kind: str) -> tuple[Source, ...]:
        """Return the StableHLO ops behind an instruction, those that determine its kind first."""
        own = self._origin(op.source)
        if not op.called or kind == "control" or self.from_stablehlo:
            return own
        main = main_opcodes(kind)
        first: list[Source] = []
        rest: list[Source] = list(own)
        # What works on fewer elements than the kernel writes is only a part of it.
        least = max((t.size for t in op.results), default=0)
        for comp in containers(op, self.program):
            for inner in comp.ops:
                if inner.source is not None:
                    leads = inner.opcode in main and _elements(inner, comp) >= least
                    (first if leads else rest).extend(self._origin(inner.source))
        return tuple(dict.fromkeys(first + rest))

    def _origin(self, source: Source | None) -> tuple[Source, ...]:
        if source is None:
            return ()
        if self.ops is None or self.from_stablehlo:
            return (source,)
        sources = self.tags.get(source.op)
        if sources is None:
            known = [self.ops[i] for i in tagged_ops(source.op) if i < len(self.ops)]
            sources = self.tags[source.op] = tuple(known)
        return sources


def _elements(op: Op, comp: Computation) -> int:
    """Most elements of an operand or result of an op."""
    types = [t for i in op.operands for t in comp.ops[i].results]
    return max(t.size for t in (*types, *op.results))


def tagged_ops(name: str) -> list[int]:
    """Return the walk indices in an instruction's name.

    For example 34 and 56 in ``op12/call/op34/add;op56/mul``.

    Calls precede what they call, and a semicolon joins ops that were merged into one.
    """
    tags = (_TAG.findall(part) for part in name.split(";"))
    return [int(numbers[-1]) for numbers in tags if numbers]


def estimated_cycles(op: Op) -> float:
    """Return the cycles that the TPU compiler estimates for an instruction; 0 if it states none."""
    # libtpu writes the estimate of products and convolutions into their window configuration.
    stated = op.config("window_config").get("estimated_cycles")
    cycles = float(op.config().get("estimated_cycles", 0) if stated is None else stated)
    # An unknown estimate is the largest integer, or a negative one.
    return cycles if 0 < cycles < _NO_CYCLES else 0.0


def _counted_by_compiler(op: Op) -> bool:
    """Return whether the compiled loop counts by itself and never runs its condition."""
    return "known_init_step" in op.config()


def _async_role(opcode: str) -> str:
    if opcode.endswith("-start") or opcode in ("send", "recv"):
        return "start"
    return "done" if opcode.endswith("-done") else ""


Value = frozenset[int] | list["Value"]


def flat(value: Value | Sequence[Value]) -> frozenset[int]:
    """Return all producers of a value; for a tuple, of all its elements."""
    if isinstance(value, frozenset):
        return value
    if len(value) == 1:
        return flat(value[0])
    return frozenset().union(*[flat(item) for item in value])


def pick(value: Value, index: int) -> Value:
    """Return the producers of one element; a kernel that returns a tuple produces all of it."""
    if isinstance(value, frozenset):
        return value
    return value[index] if index < len(value) else flat(value)


def merge(value: Value, extra: frozenset[int]) -> Value:
    """Add producers to every element."""
    if isinstance(value, frozenset):
        return value | extra
    return [merge(item, extra) for item in value]
