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
#: No layer.
_NOWHERE = -9

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
    """

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last op."""
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
        The layers; ``None`` if no structure repeats at least :data:`MIN_LAYERS` times, or if it is
        not clear which blocks belong together.
    """
    codes = _codes(table.signatures)
    candidates = [run for period in _periods(codes) for run in _runs_of(codes, period)]
    for layers in _likely_counts(candidates):
        # A block at either end may differ, such as the first layer's, which has no gradient to add.
        chosen = _disjoint([r for r in candidates if layers - 1 <= r.count <= layers + 1])
        found = _label(table, chosen)
        if found is not None:
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
    seams = _Seams(repeats, gone)
    for op in range(len(table.reads)):
        if op in removed:
            continue
        for number, (source, result) in enumerate(table.reads[op]):
            if source in removed:
                instead = seams.counterpart(op, source)
                if instead is None:
                    return None
                rewired[op, number] = (instead, result)
    return Excision(frozenset(removed), rewired)


class _Seams:
    """Finds what stands in the place of an op that goes."""

    def __init__(self, repeats: Repeats, gone: range) -> None:
        self.runs = repeats.runs
        self.labels = repeats.layer_of
        self.kept_layers = [n for n in range(-1, repeats.layers + 2) if n not in gone]
        self.kept_blocks = [
            [b for b, layer in enumerate(labels) if layer not in gone] for labels in self.labels
        ]

    def _place(self, op: int) -> tuple[int, int, int] | None:
        for number, run in enumerate(self.runs):
            if found := run.place(op):
                return (number, *found)
        return None

    def counterpart(self, reader: int, source: int) -> int | None:
        """The op that ``reader`` reads instead of ``source``: as far from it as that was."""
        at, of = self._place(reader), self._place(source)
        if of is None:
            return None
        if at is None:
            block = self._end(of)
        elif at[0] == of[0]:
            kept = self.kept_blocks[at[0]]
            position = kept.index(at[1]) + of[1] - at[1]
            block = kept[position] if 0 <= position < len(kept) else -1
        else:
            target = self._layer_instead(at, self.labels[of[0]][of[1]])
            labels = self.labels[of[0]]
            block = labels.index(target) if target in labels else -1
        if block < 0:
            return None
        run = self.runs[of[0]]
        found = run.start + block * run.period + of[2]
        return found if found < reader else None

    def _end(self, of: tuple[int, int, int]) -> int:
        """What an op outside of all runs reads: the first or the last block, or nothing else."""
        kept = self.kept_blocks[of[0]]
        if of[1] == self.runs[of[0]].count - 1:
            return kept[-1]
        return kept[0] if of[1] == 0 else -1

    def _layer_instead(self, at: tuple[int, int, int], wanted: int) -> int:
        """The layer as far from the reader's as ``wanted`` was, in the order of the reader's run.

        Where frameworks sort layers by name, a run goes through them in another order, and a block
        that begins within a layer reads of the next one in that order.
        """
        labels, kept = self.labels[at[0]], self.kept_blocks[at[0]]
        if wanted in labels:
            position = kept.index(at[1]) + labels.index(wanted) - at[1]
            return labels[kept[position]] if 0 <= position < len(kept) else _NOWHERE
        position = self.kept_layers.index(labels[at[1]]) + wanted - labels[at[1]]
        inside = 0 <= position < len(self.kept_layers)
        return self.kept_layers[position] if inside else _NOWHERE


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
        count = (stop - start) // period + 1
        if count >= MIN_LAYERS:
            yield Run(start, period, count)


def _likely_counts(candidates: Sequence[Run]) -> list[int]:
    """Numbers of layers, by how many ops would belong to them."""
    covered: Counter[int] = Counter()
    for layers in {run.count for run in candidates}:
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        covered[layers] = sum(r.stop - r.start for r in _disjoint(near))
    return [layers for layers, _ in covered.most_common(5)]


def _disjoint(candidates: Sequence[Run]) -> list[Run]:
    """Runs that do not overlap, the longest first chosen, in order of place."""
    chosen: list[Run] = []
    for run in sorted(candidates, key=lambda r: (r.start - r.stop, r.period)):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


def _label(table: OpTable, runs: Sequence[Run]) -> Repeats | None:
    """Find the layer of each block, from the longest run on, through what reads what."""
    if not runs:
        return None
    main = max(range(len(runs)), key=lambda i: (runs[i].stop - runs[i].start, -i))
    labels: dict[int, tuple[int, ...]] = {main: tuple(range(runs[main].count))}
    arguments = _argument_layers(table, runs[main], labels[main])
    found = True
    while found:
        found = False
        for number, run in enumerate(runs):
            if number not in labels and (label := _linked(table, runs, labels, run, arguments)):
                labels[number] = label
                arguments |= _argument_layers(table, run, label)
                found = True
    order = sorted(labels)
    return Repeats(runs[main].count, tuple(runs[i] for i in order), tuple(labels[i] for i in order))


def _argument_layers(table: OpTable, run: Run, label: tuple[int, ...]) -> dict[int, int]:
    """Layers of the arguments that only one block of a run reads."""
    readers: dict[int, set[int]] = {}
    for op in range(run.start, run.stop):
        for source, number in table.reads[op]:
            if source < 0:
                readers.setdefault(number, set()).add((op - run.start) // run.period)
    return {arg: label[min(blocks)] for arg, blocks in readers.items() if len(blocks) == 1}


def _linked(
    table: OpTable,
    runs: Sequence[Run],
    labels: dict[int, tuple[int, ...]],
    run: Run,
    arguments: dict[int, int],
) -> tuple[int, ...] | None:
    """Layers of a run's blocks: those of what one operand of each block reads, all different."""
    for offset in range(run.period):
        for number in range(len(table.reads[run.start + offset])):
            reads = [
                table.reads[run.start + block * run.period + offset][number]
                for block in range(run.count)
            ]
            layers = [_layer(runs, labels, arguments, read) for read in reads]
            if None not in layers and len(set(layers)) == run.count:
                return tuple(layer for layer in layers if layer is not None)
    return None


def _layer(
    runs: Sequence[Run],
    labels: dict[int, tuple[int, ...]],
    arguments: dict[int, int],
    read: Read,
) -> int | None:
    source, number = read
    if source < 0:
        return arguments.get(number)
    for i, label in labels.items():
        if place := runs[i].place(source):
            return label[place[0]]
    return None
