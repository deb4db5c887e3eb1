"""Sources for kernels that the compiler rewrote without saying what they came from.

XLA's CPU compiler drops the names of the convolutions that it turns round for weight gradients,
and of the products that it makes of convolutions. Such a kernel is recognised by its neighbours: it
writes what a StableHLO op wrote for its users, or reads what that op read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .ir import Source
from .kernel import Kernel

_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in ("transpose", "reshape", "convert", "reverse", "broadcast_in_dim", "pad", "slice")
)
#: StableHLO ops that kernels of a kind can come from.
_PARENTS: dict[str, tuple[str, ...]] = {
    "conv": ("stablehlo.convolution",),
    "gemm": ("stablehlo.dot_general", "stablehlo.convolution"),
    "reduce": ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.select_and_scatter"),
    "fusion": ("stablehlo.convolution",),
}
_MAX_STEPS = 6
_Step = Callable[[int], Iterable[int]]


@dataclass(slots=True)
class _Parent:
    """An op that no kernel names: whose values it reads, and who reads its value."""

    source: int
    name: str
    reads: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)


def adopt(kernels: Sequence[Kernel], ops: Sequence[Source], operations: Sequence[Any]) -> None:
    """Give kernels without sources those of the op that their neighbours point to.

    Args:
        kernels: In schedule order; ``sources`` is filled in where it is empty.
        ops: Sources by walk index.
        operations: MLIR operations by walk index.
    """
    orphans = [i for i, k in enumerate(kernels) if not k.sources and k.kind in _PARENTS]
    if not orphans:
        return
    # A view of a product's result can carry its name into the kernel that reads it.
    named = {
        s.index
        for k in kernels
        if k.kind != "fusion"
        for s in k.sources
        if s.op in _PARENTS.get(k.kind, ())
    }
    parents = _unnamed(operations, named)
    if not parents:
        return
    users: dict[int, list[int]] = {}
    for position, kernel in enumerate(kernels):
        for operand in kernel.operands:
            users.setdefault(operand, []).append(position)
    for position in orphans:
        found = _match(position, kernels, users, parents)
        if found is not None:
            kernels[position].sources = (ops[found.source],)


def _unnamed(operations: Sequence[Any], named: set[int]) -> list[_Parent]:
    """Ops that could be parents, with their neighbours beyond views of values."""
    wanted = {name for names in _PARENTS.values() for name in names}
    parents: dict[int, _Parent] = {}
    makers: dict[Any, int] = {}
    for index, op in enumerate(operations):
        if op.name in wanted and index not in named:
            parents[index] = _Parent(index, op.name)
    if not parents:
        return []
    for index, op in enumerate(operations):
        values = [makers[value] for value in op.operands if value in makers]
        if index in parents:
            parents[index].reads.update(values)
        is_view = op.name in _VIEWS and len(values) > 0
        for maker in values:
            if maker in parents:
                parents[maker].readers.add(index)
        for result in op.results:
            makers[result] = values[0] if is_view else index
    return list(parents.values())


def _match(
    position: int, kernels: Sequence[Kernel], users: dict[int, list[int]], parents: list[_Parent]
) -> _Parent | None:
    """The parent that shares most with a kernel: its own name most, then readers, then inputs."""
    after = _nearest([position], kernels, lambda i: users.get(i, ()))
    before = _nearest([position], kernels, lambda i: kernels[i].operands)
    names = _PARENTS[kernels[position].kind]
    best, score = None, 0
    for parent in parents:
        if parent.name not in names:
            continue
        found = 4 * (parent.source in after or parent.source in before)
        found += 2 * bool(parent.readers & after) + bool(parent.reads & before)
        if found > score:
            best, score = parent, found
    return best


def _nearest(start: list[int], kernels: Sequence[Kernel], step: _Step) -> set[int]:
    """Walk indices of the nearest kernels with sources in one direction."""
    found: set[int] = set()
    front: Iterable[int] = start
    seen = set(start)
    for _ in range(_MAX_STEPS):
        reached = {j for i in front for j in step(i)} - seen
        seen |= reached
        found.update(s.index for j in reached for s in kernels[j].sources)
        front = [j for j in reached if not kernels[j].sources]
        if not front:
            break
    return found
