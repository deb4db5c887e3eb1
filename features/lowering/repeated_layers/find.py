"""Finds layers that repeat in a program.

A framework writes a model's layers one after the other, each as the same sequence of ops: forward,
backward (often in reverse order) and in the optimiser, each of which is a *run* of equal *blocks*.
Which blocks belong to the same layer follows from what reads what. Taking layers out of the middle
(``excise.py``) leaves a program whose ops read the same places of the layers that are then next
to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from .excise import Repeats, excise
from .runs import OpTable, Read, Run, disjoint, find_runs, likely_counts


def find_repeats(table: OpTable) -> Repeats | None:
    """Find the layers of a program.

    Returns:
        The layers; ``None`` if no structure repeats at least :data:`MIN_LAYERS` times, or if layers
        cannot be taken out.
    """
    candidates = find_runs(table)
    for layers in likely_counts(candidates):
        # A block at either end may differ, such as the first layer's, which has no gradient to add.
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        for chosen in (disjoint(near), disjoint(near, layers)):
            repeats = _label(table, chosen, layers)
            if repeats is not None and _worth(table, repeats) and excise(table, repeats, 2):
                return repeats
    return None


def _worth(table: OpTable, repeats: Repeats) -> bool:
    """Whether layers are most of a program, and as many as stated.

    Taking out a chain of equal sums would gain nothing, and such a chain may have a block more than
    there are layers: blocks of the forward pass and of the optimiser are as many as the layers.
    """
    sizes = [(run.count, run.stop - run.start) for run in repeats.runs]
    most = sum(size for _, size in sizes)
    exact = sum(size for count, size in sizes if count == repeats.layers)
    return 2 * most > len(table.reads) and 4 * exact > most


def _label(table: OpTable, runs: Sequence[Run], layers: int) -> Repeats | None:
    """Find the layer of each block, from the first long run on, by what reads what."""
    complete = {i: r.stop - r.start for i, r in enumerate(runs) if r.count == layers}
    if not complete:
        return None
    # The first long one is the forward pass, in the model's own order.
    # A quarter of the longest run: backward runs are about twice as long as forward ones.
    main = next(i for i, size in complete.items() if 4 * size >= max(complete.values()))
    labels: dict[int, tuple[int, ...]] = {main: tuple(range(layers))}
    # A layer's parameters are read by one block of each run: by them even runs that read nothing
    # else of the layers, such as the optimiser's, find their order.
    arguments = _argument_layers(table, runs[main], labels[main])
    grown = True
    # Each labelled run gives the layers of what it reads and of what reads it, so labels spread
    # until nothing is added.
    while grown:
        grown = False
        for number, run in enumerate(runs):
            if number in labels:
                continue
            known = _Known(runs, labels, arguments, layers)
            if label := known.of_reads(table, run) or known.of_readers(table, run):
                labels[number] = label
                arguments |= _argument_layers(table, run, label)
                grown = True
    order = sorted(labels)
    return Repeats(layers, tuple(runs[i] for i in order), tuple(labels[i] for i in order))


def _argument_layers(table: OpTable, run: Run, label: tuple[int, ...]) -> dict[int, int]:
    """Return the layers of the arguments that only one block of a run reads."""
    readers: dict[int, set[int]] = {}
    for op in range(run.start, run.stop):
        for source, number in table.reads[op]:
            if source < 0:
                readers.setdefault(number, set()).add((op - run.start) // run.period)
    return {arg: label[min(blocks)] for arg, blocks in readers.items() if len(blocks) == 1}


class _Known:
    """Layers found so far, from which further runs are labelled."""

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
        """Return the layers of a run's blocks: those that one operand of each block reads from.

        An operand that reads a layer in all blocks comes before one that lacks a layer: a run that
        begins within a layer reads the one before in its first ops.
        """
        partial = None
        for offset in range(run.period):
            for number in range(len(table.reads[run.start + offset])):
                ops = range(run.start + offset, run.stop, run.period)
                read = [self._layer(table.reads[op][number]) for op in ops]
                label = self._complete(read)
                if label is not None and None not in read:
                    return label
                partial = partial or label
        return partial

    def of_readers(self, table: OpTable, run: Run) -> tuple[int, ...] | None:
        """Return the layers of a run's blocks: those of another run's blocks that read them."""
        for other, label in self.labelled:
            for offset in range(other.period):
                for number in range(len(table.reads[other.start + offset])):
                    layer_of: list[int | None] = [None] * run.count
                    for block, layer in enumerate(label):
                        op = other.start + block * other.period + offset
                        if place := run.place(table.reads[op][number][0]):
                            layer_of[place[0]] = layer
                    if (complete := self._complete(layer_of)) is not None:
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

    def _complete(self, label: list[int | None]) -> tuple[int, ...] | None:
        """Check for a different layer in each block; a single missing one follows from the rest."""
        # Two blocks of one layer mean that this operand does not distinguish layers.
        known = [layer for layer in label if layer is not None]
        if len(set(known)) != len(known) or len(known) < len(label) - 1:
            return None
        if len(known) < len(label):
            left = set(range(self.layers)) - set(known)
            if len(left) != 1:
                return None
            label = [left.pop() if layer is None else layer for layer in label]
        return tuple(layer for layer in label if layer is not None)
