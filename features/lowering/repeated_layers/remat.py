"""Rematerialisation: a training step that computes its layers again instead of keeping them.

What ``jax.checkpoint`` around a layer does to a program is done to its ops: values between layers
stay, and what the backward pass reads of the interior of a layer is computed a second time, right
before it, behind an ``optimization_barrier`` that keeps compilers from joining it with the first
time (Chen et al., Training deep nets with sublinear memory cost, 2016).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .runs import OpTable, Read, Run, find_runs

if TYPE_CHECKING:
    from jaxlib.mlir import ir

#: Fewest equal layers: two decide which values lie between layers.
_LEAST = 2
#: Of the runs that look like a forward pass, the first with this share of the most saved bytes.
#: Chosen by judgement: a backward pass whose gradients are read in its reverse order looks alike,
#: and comes later.
_SHARE = 0.25
#: Runs that are looked at, the longest first. Chosen by judgement: a forward pass is among the
#: longest few, and each run costs a walk over the program.
_MOST_RUNS = 40


@dataclass(frozen=True)
class Layers:
    """The forward pass of equal layers in a training step.

    Attributes:
        start: First op of the first layer, counted in ``main``.
        period: Ops of a layer.
        count: Layers.
        again: Values that only the backward pass reads of a layer: offset of the op in the layer,
            and number of its result.
        saved_bytes: Bytes of these values in one layer.
    """

    start: int
    period: int
    count: int
    again: frozenset[Read]
    saved_bytes: int

    @property
    def stop(self) -> int:
        """One past the last op of the last layer."""
        return self.start + self.period * self.count


def find_layers(table: OpTable, nbytes: Sequence[Sequence[int]]) -> Layers | None:
    """Find the equal layers of a step's forward pass, whose values the backward pass reads.

    Args:
        table: The ops of a program.
        nbytes: Bytes of each op's results.

    Returns:
        The layers, cut where fewest bytes go from one to the next; ``None`` if there are none.
    """
    readers: list[list[int]] = [[] for _ in table.reads]
    for op, reads in enumerate(table.reads):
        for source, _ in reads:
            if source >= 0:
                readers[source].append(op)
    found = []
    runs = sorted(find_runs(table, _LEAST), key=lambda run: run.start - run.stop)
    for run in runs[:_MOST_RUNS]:
        layers = _cut(table, run, nbytes)
        if layers is not None and _is_forward(table, layers, readers):
            found.append(layers)
    most = max((own.saved_bytes * own.count for own in found), default=0)
    fit = [own for own in found if own.saved_bytes * own.count >= _SHARE * most > 0]
    if not fit:
        return None
    first = min(fit, key=lambda own: own.start)
    # Of runs over the same ops, the one with most layers: two layers repeat as one does.
    return max((own for own in fit if own.start < first.stop), key=lambda own: own.count)


def _cut(table: OpTable, run: Run, nbytes: Sequence[Sequence[int]]) -> Layers | None:
    """Cut a run into layers where least is handed on, and find what is read later."""
    end = run.stop + run.tail
    last: dict[Read, int] = {}
    for op in range(run.start, end):
        for read in table.reads[op]:
            if read[0] >= run.start:
                last[read] = op
    # Bytes that are alive across each cut of the second block, as sums of differences.
    change = [0] * (run.period + 1)
    middle = run.start + run.period
    for (op, result), until in last.items():
        first, past = max(op + 1, middle) - middle, min(until + 1, middle + run.period) - middle
        if first < past:
            change[first] += nbytes[op][result]
            change[past] -= nbytes[op][result]
    alive, best = 0, (0, True, 0)
    for offset in range(run.period):
        alive += change[offset]
        # A cut beyond the tail leaves one layer less.
        own = (alive, offset > run.tail, offset)
        best = own if offset == 0 else min(best, own)
    start = run.start + best[2]
    count = run.count - best[1]
    if count < _LEAST:
        return None
    again = _again(table, start, run.period, count)
    size = sum(nbytes[start + offset][result] for offset, result in again)
    return Layers(start, run.period, count, again, size)


def _again(table: OpTable, start: int, period: int, count: int) -> frozenset[Read]:
    """Values of a layer's interior that are read after all layers, the last layer's first."""
    stop = start + period * count
    kept: set[Read] = set()
    first: dict[Read, list[int]] = defaultdict(lambda: [0] * count)
    for op in range(start, len(table.reads)):
        reader = (op - start) // period if op < stop else -1
        for source, result in table.reads[op]:
            if not start <= source < stop:
                continue
            layer, offset = divmod(source - start, period)
            if reader < 0:
                places = first[offset, result]
                places[layer] = places[layer] or op
            elif reader != layer:
                kept.add((offset, result))
    return frozenset(
        own
        for own, places in first.items()
        if own not in kept and all(places) and all(a > b for a, b in pairwise(places))
    )


def _is_forward(table: OpTable, layers: Layers, readers: Sequence[Sequence[int]]) -> bool:
    """Whether what reads the last layer leads to what reads the first: a backward pass.

    An optimiser may read gradients in reverse order, too, but updates do not lead to one another.
    """
    if not layers.again:
        return False
    late: list[set[int]] = [set() for _ in range(layers.count)]
    for layer in (0, layers.count - 1):
        first = layers.start + layer * layers.period
        for offset, _ in layers.again:
            late[layer] |= {op for op in readers[first + offset] if op >= layers.stop}
    pending = list(late[-1])
    seen = set(pending)
    while pending:
        for op in readers[pending.pop()]:
            if op not in seen:
                seen.add(op)
                pending.append(op)
    return bool(late[0] & seen)


@dataclass(frozen=True)
class Again:
    """What is computed again for a layer.

    Attributes:
        late: The ops that read its values later, in order: the clones are in front of the first.
        ops: Ops to clone, in order.
        inputs: What they read of the rest, behind the barrier.
        trigger: A gradient that has been computed there; the barrier waits for it.
        values: Values that late ops read from the clones.
    """

    late: tuple[int, ...]
    ops: tuple[int, ...]
    inputs: tuple[Read, ...]
    trigger: Read | None
    values: frozenset[Read]


def computed_again(table: OpTable, layers: Layers, count: int) -> Iterator[Again]:
    """Find what is computed again for each of the first layers, whose values are kept longest.

    Args:
        table: The ops.
        layers: Its layers.
        count: How many of them are rematerialised.
    """
    readers: dict[Read, list[int]] = defaultdict(list)
    for op, reads in enumerate(table.reads):
        for read in reads:
            readers[read].append(op)
    for layer in range(count):
        first = layers.start + layer * layers.period
        past = first + layers.period
        values = frozenset((first + offset, result) for offset, result in layers.again)
        late = sorted({op for own in values for op in readers[own] if op >= layers.stop})
        ops: set[int] = set()
        pending = [op for op, _ in values]
        kept: set[Read] = set()
        while pending:
            op = pending.pop()
            if op in ops:
                continue
            ops.add(op)
            for read in table.reads[op]:
                # What stays alive anyway is not computed again: values between layers, and those
                # that are read in any other order.
                inner = first <= read[0] < past and readers[read][-1] < past
                if inner or read in values:
                    pending.append(read[0])
                else:
                    kept.add(read)
        # In the order of the ops, so that layers stay equal and are compiled once.
        ordered = (read for op in sorted(ops) for read in table.reads[op])
        inputs = dict.fromkeys(read for read in ordered if read in kept)
        trigger = next(
            (
                read
                for op in late
                for read in table.reads[op]
                if layers.stop <= read[0] < late[0] and table.reads[read[0]]
            ),
            None,
        )
        yield Again(tuple(late), tuple(sorted(ops)), tuple(inputs), trigger, values)


def layers_of(module: ir.Module) -> Layers | None:
    """Find the equal layers of a module's forward pass; ``None`` if there are none.

    Args:
        module: StableHLO with its calls inlined.
    """
    from ...ir.mlir.values import read_types
    from .mlir_excise import main_function, read_table

    main = main_function(module)
    if main is None:
        return None
    ops = [op.operation for op in main.regions[0].blocks[0].operations]
    nbytes = [
        [sum(kind.nbytes for kind in read_types(str(value.type))[0]) for value in op.results]
        for op in ops
    ]
    return find_layers(read_table(main), nbytes)


def rematerialised(module: ir.Module, layers: Layers, count: int) -> ir.Module:
    """A copy of a module that computes its first layers again in the backward pass.

    Args:
        module: StableHLO with its calls inlined.
        layers: The layers of its ``main``.
        count: How many of them are computed again.
    """
    from ...ir.mlir.bindings import copy_module
    from .mlir_excise import clone_ops, main_function, read_table

    copy = copy_module(module)
    main = main_function(copy)
    # Layers were found in it.
    assert main is not None
    table = read_table(main)
    clone_ops(main, table, list(computed_again(table, layers, count)))
    return copy
