"""Infer the sources of kernels that the compiler rewrote without recording their origin.

XLA's CPU compiler drops the names of the convolutions that it reverses for weight gradients,
and of the products that it makes of convolutions. Such a kernel is recognised by its neighbours: it
writes what a StableHLO op wrote for its users, or reads what that op read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ir.program import Source
from .kernel import Kernel

if TYPE_CHECKING:
    from jaxlib.mlir.ir import Operation

_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in ("transpose", "reshape", "convert", "reverse", "broadcast_in_dim", "pad", "slice")
)
#: StableHLO ops that kernels of a kind can come from.
_ORIGINS: dict[str, tuple[str, ...]] = {
    "conv": ("stablehlo.convolution",),
    "gemm": ("stablehlo.dot_general", "stablehlo.convolution"),
    "reduce": ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.select_and_scatter"),
    "fusion": ("stablehlo.convolution",),
}
#: Kernels without sources that are stepped over on the way to one that has some; by judgement, XLA
#: puts at most a few copies and transposes between two kernels of the user's ops.
_MAX_STEPS = 6
_Step = Callable[[int], Iterable[int]]


@dataclass(slots=True)
class _Candidate:
    """An op that no kernel names: the values that it reads, and the readers of its value."""

    source: int
    name: str
    reads: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)


def infer_sources(
    kernels: Sequence[Kernel], ops: Sequence[Source], operations: Sequence[Operation]
) -> None:
    """Give kernels without sources the op that their neighbours point to.

    Args:
        kernels: In schedule order; ``sources`` is filled in where it is empty.
        ops: Sources by walk index.
        operations: MLIR operations by walk index.
    """
    unattributed = [i for i, k in enumerate(kernels) if not k.sources and k.kind in _ORIGINS]
    if not unattributed:
        return
    # A view of a product's result can carry its name into the kernel that reads it.
    named = {
        s.index
        for k in kernels
        if k.kind != "fusion"
        for s in k.sources
        if s.op in _ORIGINS.get(k.kind, ())
    }
    candidates = _candidates(operations, named)
    if not candidates:
        return
    users: dict[int, list[int]] = {}
    for position, kernel in enumerate(kernels):
        for operand in kernel.operands:
            users.setdefault(operand, []).append(position)
    for position in unattributed:
        origin = _match(position, kernels, users, candidates)
        if origin is not None:
            kernels[position].sources = (ops[origin.source],)


def _candidates(operations: Sequence[Operation], named: set[int]) -> list[_Candidate]:
    """Collect the ops that a kernel can come from and none names, and their neighbours."""
    wanted = {name for names in _ORIGINS.values() for name in names}
    candidates: dict[int, _Candidate] = {}
    makers: dict[object, int] = {}
    for index, op in enumerate(operations):
        if op.name in wanted and index not in named:
            candidates[index] = _Candidate(index, op.name)
    if not candidates:
        return []
    for index, op in enumerate(operations):
        values = [makers[value] for value in op.operands if value in makers]
        if index in candidates:
            candidates[index].reads.update(values)
        is_view = op.name in _VIEWS and len(values) > 0
        for maker in values:
            if maker in candidates:
                candidates[maker].readers.add(index)
        for result in op.results:
            # A view's value counts as its operand's: the compiler may have folded it.
            makers[result] = values[0] if is_view else index
    return list(candidates.values())


def _match(
    position: int,
    kernels: Sequence[Kernel],
    users: dict[int, list[int]],
    candidates: list[_Candidate],
) -> _Candidate | None:
    """Find the candidate that shares most with a kernel: name first, then readers, then inputs."""
    after = _nearest([position], kernels, lambda i: users.get(i, ()))
    before = _nearest([position], kernels, lambda i: kernels[i].operands)
    names = _ORIGINS[kernels[position].kind]
    best, score = None, 0
    for candidate in candidates:
        if candidate.name not in names:
            continue
        # Weights make it lexicographic: a name counts for more than readers and inputs together (4
        # > 2 + 1).
        shared = 4 * (candidate.source in after or candidate.source in before)
        shared += 2 * bool(candidate.readers & after) + bool(candidate.reads & before)
        if shared > score:
            best, score = candidate, shared
    return best


def _nearest(start: list[int], kernels: Sequence[Kernel], step: _Step) -> set[int]:
    """Walk indices of the nearest kernels with sources in one direction."""
    origins: set[int] = set()
    front: Iterable[int] = start
    seen = set(start)
    for _ in range(_MAX_STEPS):
        reached = {j for i in front for j in step(i)} - seen
        seen |= reached
        origins.update(s.index for j in reached for s in kernels[j].sources)
        front = [j for j in reached if not kernels[j].sources]
        if not front:
            break
    return origins
