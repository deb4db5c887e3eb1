"""What of a program changed, in words: its ops and arguments, and the kernels made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...common.units import plain, size
from ...features.ir.program import (
    BOOKKEEPING,
    DTYPE_BITS,
    FLOAT,
    FLOAT8,
    HALF,
    dtype_family,
)

if TYPE_CHECKING:
    from ...features.ir.program import Program
    from .pieces import Piece

#: Changes of FLOPs and bytes that are told, as a share. Engineering choice.
TELLING = 0.01
#: Kinds of ops that one line tells at most, those of the largest count.
_MOST = 6


def kernel_reasons(old: Sequence[Piece], new: Sequence[Piece]) -> tuple[str, ...]:
    """Say what tells the kernels of some ops from those that the new version has of them."""
    if not old or not new:
        kind = Counter(p.opcode for p in (*old, *new)).most_common(1)[0][0]
        return (f"{kind} {'removed' if old else 'added'}",)
    found = []
    widths = [_floats(pieces) for pieces in (old, new)]
    if widths[0] != widths[1] and all(widths):
        before, after = (max(w, key=lambda d: DTYPE_BITS[d]) for w in widths)
        wider = DTYPE_BITS[after] - DTYPE_BITS[before]
        names = [", ".join(sorted(w)) for w in widths]
        word = "widened" if wider > 0 else "narrowed" if wider < 0 else "changed"
        found.append(f"{names[0]} {word} to {names[1]}")
    counts = [sum(p.times for p in pieces) for pieces in (old, new)]
    work = [sum(p.flops for p in pieces) for pieces in (old, new)]
    same_work = abs(work[1] - work[0]) <= TELLING * max(work)
    if counts[0] != counts[1]:
        said = f"{plain(counts[0])} → {plain(counts[1])} kernels"
        # The same arithmetic in more kernels: what was between them goes through memory.
        if same_work:
            said = f"{'fusion broken' if counts[1] > counts[0] else 'fused'}: {said}"
        found.append(said)
    if not same_work:
        found.append(f"{_share(work)} FLOPs")
    moved = [sum(p.bytes for p in pieces) for pieces in (old, new)]
    if abs(moved[1] - moved[0]) > TELLING * max(moved):
        sign = "+" if moved[1] > moved[0] else "−"
        found.append(f"{sign}{size(abs(moved[1] - moved[0]))} moved")
    return tuple(found) or ("written in another way",)


def _share(pair: Sequence[float]) -> str:
    before, after = pair
    if not before:
        return "first"
    return f"{after / before - 1.0:+.0%}" if after < 10 * before else f"{after / before:.3g}×"


def _floats(pieces: Sequence[Piece]) -> set[str]:
    kinds = {p.dtype for p in pieces}
    return {own for own in kinds if dtype_family(own) in (FLOAT, HALF, FLOAT8)}


def program_reasons(old: Program, new: Program) -> tuple[str, ...]:
    """Say how the ops and the arguments of two programs differ, before any compiler."""
    found = []
    if arguments := _arguments(old, new):
        found.append(f"recompilation: {arguments}")
    counts = [_ops(program) for program in (old, new)]
    opcodes = {own: [_by_dtype(c, own) for c in counts] for own, _ in (*counts[0], *counts[1])}
    told: list[tuple[int, str]] = []
    for name, (before, after) in opcodes.items():
        gone, come = before - after, after - before
        if sum(gone.values()) == sum(come.values()):
            if gone:
                kinds = f"{'/'.join(sorted(gone))} → {'/'.join(sorted(come))}"
                told.append((gone.total(), f"{gone.total()} {name} {kinds}"))
        else:
            more = after.total() - before.total()
            told.append((abs(more), f"{'+' if more > 0 else '−'}{abs(more)} {name}"))
    told.sort(key=lambda own: -own[0])
    if told:
        rest = f" and {len(told) - _MOST} more kinds" if len(told) > _MOST else ""
        found.append("ops: " + ", ".join(text for _, text in told[:_MOST]) + rest)
    return tuple(found)


def _ops(program: Program) -> Counter[tuple[str, str]]:
    """Ops of a program by opcode and element type of the result."""
    found: Counter[tuple[str, str]] = Counter()
    for computation in program.computations.values():
        for op in computation.ops:
            if op.opcode not in BOOKKEEPING and op.results:
                found[op.opcode, op.type.dtype] += 1
    return found


def _by_dtype(counts: Counter[tuple[str, str]], opcode: str) -> Counter[str]:
    return Counter({dtype: n for (own, dtype), n in counts.items() if own == opcode})


def _arguments(old: Program, new: Program) -> str:
    """How the entry's arguments differ; empty if they do not."""
    before, after = ([str(p.type) for p in o.entry_computation.parameters] for o in (old, new))
    if len(before) != len(after):
        return f"{len(before)} → {len(after)} arguments"
    differ = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if not differ:
        return ""
    first = differ[0]
    rest = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"argument {first} {before[first]} → {after[first]}{rest}"
