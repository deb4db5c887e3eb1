"""Rematerialisation: a training step that recomputes its layers instead of saving activations.

The effect of ``jax.checkpoint`` around a layer is applied to the program's ops: values between
layers are saved, and interior values of a layer that the backward pass reads are recomputed right
before it, behind an ``optimization_barrier`` that keeps compilers from merging them with the first
computation (Chen et al., Training deep nets with sublinear memory cost, 2016).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ...ir.program import reached
from .runs import OpTable, Read, Run, find_runs

if TYPE_CHECKING:
    from jaxlib.mlir import ir

#: Fewest equal layers: two determine which values lie between layers.
_LEAST = 2
#: Among runs that resemble a forward pass, the first with at least this fraction of the most saved
#: bytes is used. Engineering estimate: a backward pass whose gradients are read in its reverse
#: order looks similar and comes later.
_SHARE = 0.25
#: Runs that are examined, longest first. Engineering estimate: a forward pass is among the longest
#: few, and each run costs a walk over the program.
_MOST_RUNS = 40


@dataclass(frozen=True)
class Layers:
    """The forward pass of equal layers in a training step.

    Attributes:
        start: First op of the first layer, as an index in ``main``.
        period: Ops per layer.
        count: Layers.
        again: Interior values of a layer that only the backward pass reads: offset of the op in the
            layer, and result number.
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
    """Find the equal layers of a step's forward pass whose values the backward pass reads.

    Args:
        table: The ops of a program.
        nbytes: Bytes of each op's results.

    Returns:
        The layers, cut where the fewest bytes pass from one to the next; ``None`` without any.
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
    # Among runs over the same ops, the one with most layers: a pair of layers repeats as well.
    return max((own for own in fit if own.start < first.stop), key=lambda own: own.count)


def _cut(table: OpTable, run: Run, nbytes: Sequence[Sequence[int]]) -> Layers | None:
    """Cut a run into layers where the fewest bytes are passed on, and find what is read later."""
    end = run.stop + run.tail
    last: dict[Read, int] = {}
    for op in range(run.start, end):
        for read in table.reads[op]:
            if read[0] >= run.start:
                last[read] = op
    # Bytes alive across each cut of the second block, as a prefix sum of differences.
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
        # A cut beyond the tail leaves one layer fewer.
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
    """Return interior values of layers that are read after all layers, the last layer's first."""
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
    """Return whether users of the last layer lead to users of the first, as in a backward pass.

    An optimiser may also read gradients in reverse order, but its updates do not depend on one
    another.
    """
    if not layers.again:
        return False
    late: list[set[int]] = [set() for _ in range(layers.count)]
    for layer in (0, layers.count - 1):
        first = layers.start + layer * layers.period
        for offset, _ in layers.again:
            late[layer] |= {op for op in readers[first + offset] if op >= layers.stop}
    later = reached(late[-1], lambda op: readers[op])
    return bool(late[0] & later)


@dataclass(frozen=True)
class Again:
    """The recomputation of a layer.

    Attributes:
        late: Ops that read its values later, in order; the clones precede the first.
        ops: Ops to clone, in order.
        inputs: Other values that they read, behind the barrier.
        trigger: A gradient already computed there, on which the barrier waits.
        values: Values that late ops read from the clones.
    """

    late: tuple[int, ...]
    ops: tuple[int, ...]
    inputs: tuple[Read, ...]
    trigger: Read | None
    values: frozenset[Read]


def computed_again(table: OpTable, layers: Layers, count: int) -> Iterator[Again]:
    """Find what is recomputed for each of the first layers, whose values are kept longest.

    Args:
        table: The ops.
        layers: The layers in it.
        count: Number of layers that are rematerialised.
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
                # Values that stay alive anyway are not recomputed: those between layers, and those
                # read in any other order.
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
    """Copy a module and recompute its first layers in the backward pass.

    Args:
        module: StableHLO with its calls inlined.
        layers: The layers of its ``main``.
        count: Number of layers that are recomputed.
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
