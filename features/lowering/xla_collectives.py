"""Rewrite a program's collectives as XLA does before fusion.

A partitioner emits one collective per use. XLA's GPU and TPU pipelines then remove duplicates
(CSE), turn an all-reduce of which every device keeps only its slice into a reduce-scatter
(ReduceScatterCreator), and add before reducing (AllReduceReassociate, ReduceScatterReassociate). An
uncompiled program would otherwise communicate far more than the one that runs. Combining
collectives afterwards is done in :mod:`opcast.simulate.program.nodes`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..ir.op_table import named
from ..ir.program import Computation, Op, Program

#: Collectives that common-subexpression elimination may merge.
PURE_COLLECTIVES = frozenset(
    ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
)
#: Ops with side effects, or whose results differ although they look equal.
IMPURE = named("impure")
#: Ops that return the device's number, and collectives that sum.
_RANKS = frozenset(("partition-id", "replica-id"))
_REDUCED = frozenset(("all-reduce", "reduce-scatter"))


def optimise_collectives(program: Program) -> Program:
    """Rewrite a program to fewer and cheaper collectives with the same values.

    Args:
        program: Not optimised yet; it is not changed.
    """
    computations = {
        name: _Rewriter(program, own).run() for name, own in program.computations.items()
    }
    return replace(program, computations=computations)


class _Rewriter:
    """Rewrites one computation in place: an op keeps its index or is dropped at the end."""

    def __init__(self, program: Program, computation: Computation) -> None:
        self.program, self.computation = program, computation
        self.ops = list(computation.ops)
        self.root = computation.root
        self.dropped: set[int] = set()

    def run(self) -> Computation:
        """Apply all rewrites."""
        # Most computations (reducers, bodies) have no collectives and stay the same object.
        if not any(op.opcode in PURE_COLLECTIVES for op in self.ops):
            return self.computation
        self._merge_equal()
        self._scatter()
        while self._reassociate():
            pass
        return self._rebuilt()

    def _readers(self) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self.ops]
        for place, op in enumerate(self.ops):
            if place not in self.dropped:
                for operand in op.operands:
                    readers[operand].append(place)
        return readers

    def _merge_equal(self) -> None:
        """Merge equal collectives by value numbering: equal ops on equal operands are equal."""
        # All pure ops get a value number, to find collectives of equal but separate operands; only
        # the collectives are merged, the rest is left to the compiler.
        number, known = list(range(len(self.ops))), dict[Hashable, int]()
        for place, op in enumerate(self.ops):
            if op.opcode in IMPURE:
                continue
            first = known.setdefault(self._key(op, [number[o] for o in op.operands]), place)
            number[place] = first
        same = {p: n for p, n in enumerate(number) if p != n}
        twins = {p: n for p, n in same.items() if self.ops[p].opcode in PURE_COLLECTIVES}
        for place, op in enumerate(self.ops):
            if any(o in twins for o in op.operands):
                operands = tuple(twins.get(o, o) for o in op.operands)
                self.ops[place] = replace(op, operands=operands)
        self.root = twins.get(self.root, self.root)
        self.dropped |= set(twins)

    def _key(self, op: Op, operands: Sequence[int]) -> Hashable:
        # Channels only distinguish collectives; a merged one keeps the first.
        attrs = {k: v for k, v in op.attrs.items() if k != "channel_id"}
        called = tuple(self._reducer(name) for name in op.called)
        return op.opcode, tuple(operands), op.results, repr(sorted(attrs.items())), called

    def _reducer(self, name: str) -> Hashable:
        """Return a computation's only op on its parameters if there is just one, else its name."""
        only = self.program.computations[name].only_op
        # Each collective's reducer has a different name; only what it computes matters.
        return (only.opcode, only.operands) if only is not None else name

    def _scatter(self) -> None:
        """Turn an all-reduce of which each device keeps only its part into a reduce-scatter."""
        readers = self._readers()
        ranked = self._ranked()
        for place, op in enumerate(self.ops):
            if op.opcode != "all-reduce" or op.is_tuple or len(op.operands) != 1:
                continue
            way = self._to_slice(place, readers)
            if not way or place in self.dropped:
                continue
            cut = self.ops[way[-1]]
            before = self.ops[cut.operands[0]].type
            dimension = _cut_dimension(before.shape, cut.type.shape, _group_size(op, self.program))
            # The slice has to be the device's own: its start must depend on the device's number.
            if dimension < 0 or not any(ranked[o] for o in cut.operands[1:]):
                continue
            source = op.operands[0]
            # Reshapes in between run on the unreduced value instead: a reduction is elementwise.
            for view in way[:-1]:
                self.ops[view] = replace(self.ops[view], operands=(source,))
                source = view
            self.ops[way[-1]] = replace(
                cut,
                name=f"{op.name}.scatter",
                opcode="reduce-scatter",
                operands=(source,),
                called=op.called,
                attrs={**op.attrs, "dimension": dimension},
            )
            self.dropped.add(place)

    def _ranked(self) -> list[bool]:
        """Return which values differ between devices because they depend on the device number."""
        ranked: list[bool] = []
        for op in self.ops:
            ranked.append(op.opcode in _RANKS or any(ranked[o] for o in op.operands))
        return ranked

    def _to_slice(self, place: int, readers: Sequence[Sequence[int]]) -> list[int]:
        """Follow reshapes up to a dynamic slice that is the only user of an op; else empty."""
        way: list[int] = []
        while len(readers[place]) == 1 and place != self.root:
            reader = readers[place][0]
            op = self.ops[reader]
            if op.operands[0] != place:
                return []
            way.append(reader)
            if op.opcode == "dynamic-slice":
                return way
            if op.opcode != "reshape":
                return []
            place = reader
        return []

    def _reassociate(self) -> bool:
        """Add before reducing, where a sum reads two reductions over the same devices."""
        readers, changed = self._readers(), False
        for place, op in enumerate(self.ops):
            if op.opcode != "add" or place in self.dropped or len(set(op.operands)) != 2:
                continue
            first, second = sorted(op.operands)
            # Another user would still need the single reduction.
            if any(len(readers[o]) != 1 or o == self.root for o in (first, second)):
                continue
            one, two = self.ops[first], self.ops[second]
            if not self._may_join(one, two):
                continue
            inner = self.ops[one.operands[0]].type
            # The later of the two indices holds the sum, so that both operands precede it.
            self.ops[second] = Op(
                f"{two.name}.sum",
                "add",
                (one.operands[0], two.operands[0]),
                (inner,),
                source=op.source,
            )
            self.ops[place] = replace(two, name=op.name, operands=(second,), results=op.results)
            self.dropped.add(first)
            readers, changed = self._readers(), True
        return changed

    def _may_join(self, one: Op, two: Op) -> bool:
        return (
            one.opcode in _REDUCED
            and not one.is_tuple
            and len(one.operands) == 1
            and all(self._reducer(name) == ("add", (0, 1)) for name in one.called)
            and self._key(one, ()) == self._key(two, ())
            and self.ops[one.operands[0]].type == self.ops[two.operands[0]].type
        )

    def _rebuilt(self) -> Computation:
        """Drop ops that have no users any more because of the rewrites."""
        readers = self._readers()
        left = [len(r) for r in readers]
        # Only operands of the original ops can have lost their last user.
        pending = [o for op in self.computation.ops for o in op.operands]
        while pending:
            place = pending.pop()
            op = self.ops[place]
            if place in self.dropped or left[place] or place == self.root or op.opcode in IMPURE:
                continue
            self.dropped.add(place)
            for operand in op.operands:
                left[operand] -= 1
                pending.append(operand)
        return self._without_dropped()

    def _without_dropped(self) -> Computation:
        kept = [p for p in range(len(self.ops)) if p not in self.dropped]
        where = {old: new for new, old in enumerate(kept)}
        ops = [
            replace(self.ops[p], operands=tuple(where[o] for o in self.ops[p].operands))
            for p in kept
        ]
        return Computation(self.computation.name, ops, where[self.root])


def _group_size(op: Op, program: Program) -> int:
    groups = op.attrs.get("replica_groups") or ()
    sizes = {len(group) for group in groups}
    if not sizes:
        return program.num_replicas * program.num_partitions
    # Groups of different sizes give parts of different sizes: no reduce-scatter.
    return sizes.pop() if len(sizes) == 1 else 0


def _cut_dimension(whole: Sequence[int], part: Sequence[int], count: int) -> int:
    """Return the one dimension that is cut into ``count`` parts; -1 if there is none."""
    cut = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if count > 1 and len(cut) == 1 and part[cut[0]] * count == whole[cut[0]]:
        return cut[0]
    return -1
