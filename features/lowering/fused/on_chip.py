"""Values that a TPU's compiler keeps in on-chip memory between kernels or prefetches.

XLA:TPU assigns memory spaces after scheduling (MemorySpaceAssignment): a value stays in on-chip
memory if there is space for it during its live range. Here values are placed in program order; a
value that is too large, or for which no space is left, goes to main memory. Program arguments and
results are in main memory; arguments of products are prefetched during the kernel before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...devices.device import DeviceSpec
from ...ir.op_table import named
from ...ir.program import NESTING, Computation, Op, Program, TensorType, reached
from .clusters import PRODUCTS

#: Ops whose result aliases their operand.
_VIEWS = frozenset(("bitcast", "opt-barrier", "optimization-barrier", "copy-done"))
#: Ops whose results alias other values, or are not arrays in memory.
_NO_VALUES = named("no_values") | _VIEWS
#: Fraction of on-chip memory that values may use; the rest is for the windows of kernels.
#: Engineering estimates, this and the next one (docs/fused.md).
SHARE = 0.75
#: Largest value that is placed, as a fraction of on-chip memory: values of half of it still are
#: (compiled for a v5e).
LARGEST = 0.5
_MIB = 2.0**20


@dataclass(frozen=True)
class OnChip:
    """On-chip memory in which a compiler places values.

    Attributes:
        space: Number of its memory space in HLO layouts.
        capacity: Size in bytes.
    """

    space: int
    capacity: float


def on_chip_of(device: DeviceSpec | None) -> OnChip | None:
    """Return the memory for values: CMEM (v4), a core's VMEM (later TPUs), ``None`` for others."""
    if device is None or device.platform != "tpu":
        return None
    target = str(device.compiler.get("target", ""))
    # XLA assigns memory spaces from v4 on; docs/tpu.md: "v3 has no such memory spaces".
    if target in ("v2", "v3"):
        return None
    if target == "v4":
        # 128 MiB of CMEM (Jouppi et al., TPU v4, ISCA 2023); memory space 3, as libtpu writes it.
        return OnChip(3, 128 * _MIB)
    return OnChip(1, device.shared_bytes_per_core)


def prefetch(program: Program, memory: OnChip) -> None:
    """Prefetch arguments of products while the preceding kernel runs, like XLA's prefetcher.

    The first kernel has to wait for its arguments.

    Args:
        program: Fused and scheduled; its entry is changed.
        memory: The memory.
    """
    comp = program.entry_computation
    fetched: dict[int, list[int]] = {}  # arguments of a kernel, by its position
    started: dict[int, list[int]] = {}  # arguments that are fetched beside a kernel
    before = -1
    for position, op in enumerate(comp.ops):
        if op.opcode in _NO_VALUES:
            continue
        if before >= 0 and _multiplies(op, program):
            arguments = dict.fromkeys(_viewed(comp, i) for i in op.operands)
            own = [i for i in arguments if _is_fetched(comp.ops[i], memory)]
            fetched[position], started[before] = own, [*started.get(before, ()), *own]
        before = position
    ops: list[Op] = []
    place: list[int] = []
    starts: dict[int, int] = {}
    for position, op in enumerate(comp.ops):
        near = {
            i: _append(ops, _done(ops[starts[i]], starts[i])) for i in fetched.get(position, ())
        }
        for i in started.get(position, ()):
            starts[i] = _append(ops, _start(comp.ops[i], place[i], memory))
        operands = []
        for i in op.operands:
            known = near.get(_viewed(comp, i), place[i])
            if comp.ops[i].opcode == "bitcast" and known != place[i]:
                known = _append(ops, replace(comp.ops[i], operands=(known,)))
            operands.append(known)
        place.append(_append(ops, replace(op, operands=tuple(operands))))
    program.computations[program.entry] = replace(comp, ops=ops, root=place[comp.root])


def _append(ops: list[Op], op: Op) -> int:
    ops.append(op)
    return len(ops) - 1


def _viewed(comp: Computation, position: int) -> int:
    """Return the index of the op whose value an operand is, looking through at most one view."""
    op = comp.ops[position]
    return op.operands[0] if op.opcode == "bitcast" else position


def _is_fetched(op: Op, memory: OnChip) -> bool:
    return op.opcode == "parameter" and 0 < op.type.nbytes <= LARGEST * memory.capacity


def _multiplies(op: Op, program: Program) -> bool:
    inside = (o.opcode for name in op.called for o in program.computations[name].ops)
    return op.opcode in PRODUCTS or not PRODUCTS.isdisjoint(inside)


def _start(argument: Op, place: int, memory: OnChip) -> Op:
    near = argument.type._replace(memory_space=memory.space)
    kinds = (near, argument.type, TensorType("u32"))
    return Op(f"{argument.name}.start", "copy-start", (place,), kinds, is_tuple=True)


def _done(start: Op, place: int) -> Op:
    return Op(f"{start.name}.done", "copy-done", (place,), start.results[:1])


def place_on_chip(program: Program, memory: OnChip) -> None:
    """Mark values that stay on chip with its memory space, in all computations that run kernels.

    Args:
        program: Fused and scheduled; its types are changed in place.
        memory: The memory.
    """

    # Bodies of loops and branches run kernels; fused computations and reducers do not.
    def inner(name: str) -> list[str]:
        ops = program.computations[name].ops
        return [called for op in ops if op.opcode in NESTING for called in op.called]

    for name in reached([program.entry], inner):
        _place(program.computations[name], memory)


_Value = tuple[int, int]  # position of the op that makes it, leaf of its results


def _place(comp: Computation, memory: OnChip) -> None:
    sources = _sources(comp)
    last: dict[_Value, int] = {}
    for position, op in enumerate(comp.ops):
        for operand in op.operands:
            for value in sources[operand]:
                last[value] = position
    kept = set(sources[comp.root % len(comp.ops)]) if comp.ops else set()
    ends: dict[int, float] = {}
    used, near = 0.0, set()
    for position, op in enumerate(comp.ops):
        # A value is freed at the op after its last use.
        used -= ends.pop(position - 1, 0.0)
        if op.opcode in _NO_VALUES:
            continue
        for leaf, t in enumerate(op.results):
            value = (position, leaf)
            # Results of the program go to main memory; values that nobody reads need no space.
            if value in kept or value not in last or t.nbytes > LARGEST * memory.capacity:
                continue
            if used + t.nbytes > SHARE * memory.capacity:
                continue
            used += t.nbytes
            ends[last[value]] = ends.get(last[value], 0.0) + t.nbytes
            near.add(value)
    for position, op in enumerate(comp.ops):
        _mark(op, sources[position], near, memory.space)


def _sources(comp: Computation) -> list[list[_Value]]:
    """Find the values behind each op's results, looking through views and tuples."""
    sources: list[list[_Value]] = []
    for position, op in enumerate(comp.ops):
        # A tuple of values, possibly the operand of a barrier.
        if op.opcode == "tuple" or (op.opcode in _VIEWS and op.operands):
            sources.append([value for operand in op.operands for value in sources[operand]])
        elif op.opcode == "get-tuple-element":
            values, index = sources[op.operands[0]], int(op.attrs["index"])
            flat = len(values) == len(comp.ops[op.operands[0]].results)
            sources.append([values[index]] if flat and index < len(values) else values)
        else:
            sources.append([(position, leaf) for leaf in range(len(op.results))])
    return sources


def _mark(op: Op, values: list[_Value], near: set[_Value], space: int) -> None:
    if len(values) != len(op.results) or not any(value in near for value in values):
        return
    op.results = tuple(
        t._replace(memory_space=space) if value in near else t
        for t, value in zip(op.results, values, strict=True)
    )
