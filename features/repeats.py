"""Finds layers that repeat in a program, and which of its ops a program with fewer layers keeps.

A framework writes a model's layers one after the other, each as the same sequence of ops: forward,
backward (often in reverse order) and in the optimiser, each of which is a *run* of equal *blocks*.
Runs are found as periods in the sequence of op signatures; which blocks belong to the same layer
follows from what reads what. Taking layers out of the middle leaves a program whose ops read the
same places of the layers that then lie next to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: Fewer layers are compiled as they are.
MIN_LAYERS = 6
#: Periods that are tried, the most frequent gaps between equal ops first.
_MAX_PERIODS = 400
_MIN_PERIOD = 3

#: What an operand reads: result ``number`` of op ``op``, or argument ``number`` if ``op`` is -1.
Read = tuple[int, int]


@dataclass(frozen=True)
class OpTable:
    """Ops of a function in order, without its return.

    Attributes:
        signatures: What each op does: opcode, attributes, types, bodies.
        reads: What each op reads.
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
        tail: Ops of one more block that is cut off.
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
        """Block and offset of an op; ``None`` if it lies elsewhere."""
        if not self.start <= op < self.stop:
            return None
        return divmod(op - self.start, self.period)


@dataclass(frozen=True)
class Repeats:
    """The layers of a program.

    Attributes:
        layers: How many there are.
        runs: Their runs of blocks.
        layer_of: For each run the layer of each block.
    """

    layers: int
    runs: tuple[Run, ...]
    layer_of: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Excision:
    """What a program with fewer layers consists of.

    Attributes:
        removed: Ops that go.
        rewired: What operands of kept ops read instead, by op and operand number.
    """

    removed: frozenset[int]
    rewired: dict[tuple[int, int], Read]


def find_repeats(table: OpTable) -> Repeats | None:
    """Find the layers of a program.

    Returns:
        The layers; ``None`` if no structure repeats at least :data:`MIN_LAYERS` times, or if layers
        cannot be taken out.
    """
    codes = _codes(table.signatures)
    candidates = [run for period in _periods(codes) for run in _runs_of(codes, period)]
    for layers in _likely_counts(candidates):
        # A block at either end may differ, such as the first layer's, which has no gradient to add.
        chosen = _disjoint([r for r in candidates if layers - 1 <= r.count <= layers + 1])
        found = _label(table, chosen, layers)
        if found is not None and excise(table, found, 2) is not None:
            return found
    return None


def excise(table: OpTable, repeats: Repeats, keep: int) -> Excision | None:
    """Take layers out of the middle.

    Args:
        table: The ops.
        repeats: Their layers.
        keep: Layers to keep, half of them at either end.

    Returns:
        What goes and what is read instead; ``None`` if a kept op reads what has no counterpart.
    """
    first = keep // 2
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
                if instead is None or instead[0] in removed or instead[0] >= op:
                    return None
                rewired[op, number] = instead
    return Excision(frozenset(removed), rewired)


class _Seams:
    """Finds what stands in the place of an op that goes."""

    def __init__(self, table: OpTable, repeats: Repeats, gone: range) -> None:
        self.table = table
        self.runs = repeats.runs
        # One more for the tail, which is always kept: of the layer that the whole blocks lack.
        self.kept_blocks = [
            [*(b for b, layer in enumerate(labels) if layer not in gone), len(labels)]
            for labels in repeats.layer_of
        ]
        self.labels = []
        for labels in repeats.layer_of:
            lacking = set(range(repeats.layers)) - set(labels)
            self.labels.append((*labels, lacking.pop() if len(lacking) == 1 else -1))

    def _place(self, op: int) -> tuple[int, int, int] | None:
        for number, run in enumerate(self.runs):
            if run.start <= op < run.stop + run.tail:
                return (number, *divmod(op - run.start, run.period))
        return None

    def counterpart(self, reader: int, number: int) -> Read | None:
        """What an operand reads instead: what is as far from the reader as that was."""
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
        """Block of another run with the layer of a block; -1 if there is none."""
        layer, target = self.labels[run][block], self.labels[other]
        if run == other:
            return block
        return target.index(layer) if layer >= 0 and layer in target else -1

    def _distance(self, at: tuple[int, int, int], of: tuple[int, int, int]) -> int:
        """Blocks between a reader and what it reads, in the order of the reader's run.

        Where frameworks sort layers by name, a run goes through them in another order, and a block
        that begins within a layer reads of the next one in that order.
        """
        if at[0] == of[0]:
            return of[1] - at[1]
        labels, wanted = self.labels[at[0]], self.labels[of[0]][of[1]]
        if wanted in labels:
            return labels.index(wanted) - at[1]
        # The reader's run lacks that layer, which lies beyond one of its ends.
        return -at[1] - 1 if wanted < min(labels[:-1]) else len(labels) - at[1]

    def _end(self, of: tuple[int, int, int]) -> int:
        """What an op outside of all runs reads: the first or the last block, or nothing else."""
        kept = self.kept_blocks[of[0]]
        if of[1] == self.runs[of[0]].count - 1:
            return kept[-2] if len(kept) > 1 else -1
        return kept[0] if of[1] == 0 else -1

    def _first_or_last(self, at: tuple[int, int, int], number: int, away: int) -> Read:
        """What the first (or last) block reads there, beyond which there is no other."""
        run = self.runs[at[0]]
        block = 0 if away < 0 else run.count - 1
        return self.table.reads[run.start + block * run.period + at[2]][number]


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(s, len(known)) for s in signatures], dtype=np.int64)


def _periods(codes: np.ndarray) -> list[int]:
    """Likely periods: gaps between neighbouring equal ops, the commonest first."""
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    gaps = np.diff(order)[same]
    counts = Counter(gaps[gaps >= _MIN_PERIOD].tolist())
    return [gap for gap, n in counts.most_common(_MAX_PERIODS) if n >= MIN_LAYERS - 1]


def _runs_of(codes: np.ndarray, period: int) -> Iterator[Run]:
    """Stretches in which every op equals the one a period later."""
    equal = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
    edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        blocks, tail = divmod(stop - start, period)
        if blocks + 1 >= MIN_LAYERS:
            yield Run(start, period, blocks + 1, tail)


def _likely_counts(candidates: Sequence[Run]) -> list[int]:
    """Numbers of layers, by how many ops would belong to them."""
    covered: Counter[int] = Counter()
    for layers in {run.count for run in candidates}:
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        covered[layers] = sum(r.stop - r.start for r in _disjoint(near))
    return sorted(covered, key=lambda layers: (-covered[layers], -layers))[:5]


def _disjoint(candidates: Sequence[Run]) -> list[Run]:
    """Runs that do not overlap, the longest first chosen, in order of place."""
    chosen: list[Run] = []
    for run in sorted(candidates, key=lambda r: (r.start - r.stop, r.period)):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


def _label(table: OpTable, runs: Sequence[Run], layers: int) -> Repeats | None:
    """Find the layer of each block, from the first long run on, by what reads what."""
    complete = {i: r.stop - r.start for i, r in enumerate(runs) if r.count == layers}
    if not complete:
        return None
    # The first long one is the forward pass, in the model's own order.
    main = next(i for i, size in complete.items() if 4 * size >= max(complete.values()))
    labels: dict[int, tuple[int, ...]] = {main: tuple(range(layers))}
    arguments = _argument_layers(table, runs[main], labels[main])
    found = True
    while found:
        found = False
        for number, run in enumerate(runs):
            if number in labels:
                continue
            known = _Known(runs, labels, arguments, layers)
            if label := known.of_reads(table, run) or known.of_readers(table, run):
                labels[number] = label
                arguments |= _argument_layers(table, run, label)
                found = True
    order = sorted(labels)
    return Repeats(layers, tuple(runs[i] for i in order), tuple(labels[i] for i in order))


def _argument_layers(table: OpTable, run: Run, label: tuple[int, ...]) -> dict[int, int]:
    """Layers of the arguments that only one block of a run reads."""
    readers: dict[int, set[int]] = {}
    for op in range(run.start, run.stop):
        for source, number in table.reads[op]:
            if source < 0:
                readers.setdefault(number, set()).add((op - run.start) // run.period)
    return {arg: label[min(blocks)] for arg, blocks in readers.items() if len(blocks) == 1}


class _Known:
    """What is known of layers so far, by which further runs are labelled."""

    def __init__(
        self,
        runs: Sequence[Run],
        labels: dict[int, tuple[int, ...]],
        arguments: dict[int, int],
        layers: int,
    ) -> None:
        self.labelled = [(runs[i], label) for i, label in labels.items()]
        self.arguments = arguments
        self.layers = layers

    def of_reads(self, table: OpTable, run: Run) -> tuple[int, ...] | None:
        """Layers of a run's blocks: those of what one operand of each block reads."""
        for offset in range(run.period):
            for number in range(len(table.reads[run.start + offset])):
                ops = range(run.start + offset, run.stop, run.period)
                label = self._complete([self._layer(table.reads[op][number]) for op in ops])
                if label is not None:
                    return label
        return None

    def of_readers(self, table: OpTable, run: Run) -> tuple[int, ...] | None:
        """Layers of a run's blocks: those of the blocks of another run that read them."""
        for other, label in self.labelled:
            for offset in range(other.period):
                for number in range(len(table.reads[other.start + offset])):
                    found: list[int | None] = [None] * run.count
                    for block, layer in enumerate(label):
                        op = other.start + block * other.period + offset
                        if place := run.place(table.reads[op][number][0]):
                            found[place[0]] = layer
                    if (complete := self._complete(found)) is not None:
                        return complete
        return None

    def _layer(self, read: Read) -> int | None:
        source, number = read
        if source < 0:
            return self.arguments.get(number)
        for run, label in self.labelled:
            if place := run.place(source):
                return label[place[0]]
        return None

    def _complete(self, found: list[int | None]) -> tuple[int, ...] | None:
        """A different layer for each block; one that is missing can only be the one left."""
        known = [layer for layer in found if layer is not None]
        if len(set(known)) != len(known) or len(known) < len(found) - 1:
            return None
        if len(known) < len(found):
            left = set(range(self.layers)) - set(known)
            if len(left) != 1:
                return None
            found = [left.pop() if layer is None else layer for layer in found]
        return tuple(layer for layer in found if layer is not None)
