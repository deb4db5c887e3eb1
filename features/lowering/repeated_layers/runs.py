"""Runs of equal blocks in a sequence of ops, and the changes that remove blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: Default of the fewest blocks of a run. It must not exceed the smallest of ``MIN_LAYERS`` in
#: ``lower.py``, less one, because the first or last layer may differ.
MIN_LAYERS = 6
#: Most periods that are tried, the most frequent gaps between equal ops first. Engineering estimate
#: that bounds the search; the period of a layer is among the most common gaps.
_MAX_PERIODS = 400
#: Fewest ops of a layer; shorter periods are more likely chains of equal elementwise ops.
_MIN_PERIOD = 3

#: Value read by an operand: result ``number`` of op ``op``, or argument ``number`` if ``op`` is -1.
Read = tuple[int, int]


@dataclass(frozen=True)
class OpTable:
    """Ops of a function in order, without its return.

    Attributes:
        signatures: Identity of each op's work: opcode, attributes, types, bodies.
        reads: Values that each op reads.
    """

    signatures: Sequence[Hashable]
    reads: Sequence[Sequence[Read]]


@dataclass(frozen=True)
class Run:
    """Equal blocks of ops.

    Attributes:
        start: First op.
        period: Ops of a block.
        count: Blocks.
        tail: Ops of one more, incomplete block.
    """

    start: int
    period: int
    count: int
    tail: int = 0

    @property
    def stop(self) -> int:
        """One past the last op of the last whole block."""
        return self.start + self.period * self.count

    def place(self, op: int) -> tuple[int, int] | None:
        """Return the block and offset of an op; ``None`` if it is outside the run."""
        if not self.start <= op < self.stop:
            return None
        return divmod(op - self.start, self.period)


def find_runs(table: OpTable, least: int = MIN_LAYERS) -> list[Run]:
    """Find all runs of at least ``least`` blocks, for likely periods; they may overlap."""
    codes = _codes(table.signatures)
    return [run for period in _periods(codes, least) for run in _runs_of(codes, period, least)]


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(s, len(known)) for s in signatures], dtype=np.int64)


def _periods(codes: np.ndarray, least: int) -> list[int]:
    """List likely periods: gaps between neighbouring equal ops, the most common first."""
    # Sorted by signature, then position: neighbours are successive equal ops.
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    gaps = np.diff(order)[same]
    counts = Counter(gaps[gaps >= _MIN_PERIOD].tolist())
    return [gap for gap, n in counts.most_common(_MAX_PERIODS) if n >= least - 1]


def _runs_of(codes: np.ndarray, period: int, least: int) -> Iterator[Run]:
    """Yield stretches in which every op equals the one a period later."""
    equal = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
    edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        blocks, tail = divmod(stop - start, period)
        # k periods in which each op equals the next are k + 1 equal blocks.
        if blocks + 1 >= least:
            yield Run(start, period, blocks + 1, tail)


def likely_counts(candidates: Sequence[Run]) -> list[int]:
    """Rank numbers of layers by how many ops would belong to them."""
    covered: Counter[int] = Counter()
    for layers in {run.count for run in candidates}:
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        covered[layers] = sum(r.stop - r.start for r in disjoint(near))
    # Five candidates: a wrong one costs a failed labelling, which is cheap.
    return sorted(covered, key=lambda layers: (-covered[layers], -layers))[:5]


def disjoint(candidates: Sequence[Run], count: int = 0) -> list[Run]:
    """Choose non-overlapping runs, the longest first, and list them in order of position.

    Args:
        candidates: Runs that may overlap.
        count: Runs with this number of blocks precede all others; 0 for none. A chain of equal ops,
            such as the squares of all gradients, repeats with several periods.
    """
    chosen: list[Run] = []
    for run in sorted(
        candidates, key=lambda r: (bool(count) and r.count != count, r.start - r.stop, r.period)
    ):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


@dataclass(frozen=True)
class Repeats:
    """The layers of a program.

    Attributes:
        layers: Number of layers.
        runs: Their runs of blocks.
        layer_of: Layer of each block, by run.
    """

    layers: int
    runs: tuple[Run, ...]
    layer_of: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Excision:
    """Changes that turn a program into one with fewer layers.

    Attributes:
        removed: Ops to remove.
        rewired: New values of operands of kept ops, by op and operand number.
    """

    removed: frozenset[int]
    rewired: dict[tuple[int, int], Read]


def excise(table: OpTable, repeats: Repeats, keep: int) -> Excision | None:
    """Remove layers from the middle.

    Args:
        table: The ops.
        repeats: Their layers.
        keep: Layers to keep, half of them at either end.

    Returns:
        Removed ops and rewired operands; ``None`` if a kept op reads a value without a
        counterpart.
    """
    first = keep // 2
    # From the middle: the first and last layers, whose surroundings differ, stay.
    gone = range(first, repeats.layers - (keep - first))
    if not gone or any(not set(gone) <= set(labels) for labels in repeats.layer_of):
        return None
    removed = {
        op
        for run, labels in zip(repeats.runs, repeats.layer_of, strict=True)
        for block, layer in enumerate(labels)
        if layer in gone
        for op in range(run.start + block * run.period, run.start + (block + 1) * run.period)
    }
    rewired: dict[tuple[int, int], Read] = {}
    seams = _Seams(table, repeats, gone)
    for op in range(len(table.reads)):
        if op in removed:
            continue
        for number, (source, _) in enumerate(table.reads[op]):
            if source in removed:
                instead = seams.counterpart(op, number)
                # An op can only read what precedes it.
                if instead is None or instead[0] in removed or instead[0] >= op:
                    return None
                rewired[op, number] = instead
    return Excision(frozenset(removed), rewired)


class _Seams:
    """Finds the counterpart of a removed op's value."""

    def __init__(self, table: OpTable, repeats: Repeats, gone: range) -> None:
        self.table = table
        self.runs = repeats.runs
        # One more for the tail, which is always kept: it is of the layer without a whole block.
        self.kept_blocks = [
            [*(b for b, layer in enumerate(labels) if layer not in gone), len(labels)]
            for labels in repeats.layer_of
        ]
        self.labels = []
        for labels in repeats.layer_of:
            # A run with one block fewer (the first or last layer differs) has a tail or head of
            # that layer.
            lacking = set(range(repeats.layers)) - set(labels)
            self.labels.append((*labels, lacking.pop() if len(lacking) == 1 else -1))

    def _place(self, op: int) -> tuple[int, int, int] | None:
        for number, run in enumerate(self.runs):
            if run.start <= op < run.stop + run.tail:
                return (number, *divmod(op - run.start, run.period))
        return None

    def counterpart(self, reader: int, number: int) -> Read | None:
        """Find the value at the same distance, in blocks, from the reader as the removed one."""
        source, result = self.table.reads[reader][number]
        at, of = self._place(reader), self._place(source)
        if of is None:
            return None
        if at is None:
            block = self._end(of)
        else:
            kept = self.kept_blocks[at[0]]
            away = self._distance(at, of)
            position = kept.index(at[1]) + away
            if not 0 <= position < len(kept):
                return self._first_or_last(at, number, away)
            block = self._same_layer(at[0], kept[position], of[0])
        run = self.runs[of[0]]
        if block < 0 or (block == run.count and of[2] >= run.tail):
            return None
        return run.start + block * run.period + of[2], result

    def _same_layer(self, run: int, block: int, other: int) -> int:
        """Return the block of another run with the same layer; -1 if there is none."""
        layer, target = self.labels[run][block], self.labels[other]
        if run == other:
            return block
        return target.index(layer) if layer >= 0 and layer in target else -1

    def _distance(self, at: tuple[int, int, int], of: tuple[int, int, int]) -> int:
        """Count blocks between a reader and the value it reads, in the order of the reader's run.

        Where frameworks sort layers by name, a run visits them in another order, and a block that
        begins within a layer reads from the next one in that order.
        """
        if at[0] == of[0]:
            return of[1] - at[1]
        labels, wanted = self.labels[at[0]], self.labels[of[0]][of[1]]
        if wanted in labels:
            return labels.index(wanted) - at[1]
        # The reader's run lacks that layer, which is beyond one of its ends.
        return -at[1] - 1 if wanted < min(labels[:-1]) else len(labels) - at[1]

    def _end(self, of: tuple[int, int, int]) -> int:
        """Return the block that an op outside all runs reads: the first or last, else -1."""
        kept = self.kept_blocks[of[0]]
        if of[1] == self.runs[of[0]].count - 1:
            return kept[-2] if len(kept) > 1 else -1
        return kept[0] if of[1] == 0 else -1

    def _first_or_last(self, at: tuple[int, int, int], number: int, away: int) -> Read:
        """Return what the first (or last) block reads there, since no block lies beyond."""
        run = self.runs[at[0]]
        block = 0 if away < 0 else run.count - 1
        return self.table.reads[run.start + block * run.period + at[2]][number]
