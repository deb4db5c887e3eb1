"""Lower a program with many equal layers by compiling it with four and with two of them.

Compiled layers repeat kernel by kernel: the difference between a program with four layers and one
with two is two layers. So kernels, memory and work of ``n`` layers are those of four, plus ``(n -
4) / 2`` times the difference.

A framework emits a model's layers one after the other, each as the same sequence of ops: forward,
backward (often in reverse order) and in the optimiser. Each of these is a *run* of equal *blocks*.
Data dependencies show which blocks belong to the same layer. Removing layers from the middle leaves
a program whose ops read the corresponding values of the layers that are then adjacent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...kernels.kernel import Kernel, LoweredProgram
from .runs import OpTable, Read, Repeats, Run, disjoint, excise, find_runs, likely_counts

if TYPE_CHECKING:
    from jaxlib.mlir import ir

#: Numbers of layers of the two programs that are compiled.
FULL, HALF = 4, 2
#: Fewest layers for which two small programs compile faster than the whole: XLA compiles equal
#: kernels of a program once for a GPU, but each time for a TPU (docs/lowering.md, Equal layers).
MIN_LAYERS = {"cuda": 12, "tpu": 7}


@dataclass(frozen=True)
class ShortPrograms:
    """A program with fewer layers.

    Attributes:
        layers: Layers of the whole program.
        modules: MLIR modules with :data:`FULL` and with :data:`HALF` layers.
    """

    layers: int
    modules: tuple[ir.Module, ir.Module]


def shorten(module: ir.Module, tagged: ir.Module, least: int) -> ShortPrograms | None:
    """Find equal layers and remove most of them.

    Args:
        module: The program; it is not changed.
        tagged: A copy whose ops carry their indices, so that kernels can be traced back.
        least: Fewest layers for which this pays.

    Returns:
        The two short programs; ``None`` if the program has no such structure.
    """
    from ...ir.mlir.bindings import copy_module
    from .mlir_excise import main_function, read_table, write_excised
    from .runs import excise

    function = main_function(module)
    table = read_table(function) if function is not None else None
    repeats = find_repeats(table) if table is not None else None
    if table is None or repeats is None or repeats.layers < least:
        return None
    modules = []
    for keep in (FULL, HALF):
        excision = excise(table, repeats, keep)
        short = copy_module(tagged)
        main = main_function(short)
        if excision is None or main is None or not write_excised(short, main, table, excision):
            return None
        modules.append(short)
    return ShortPrograms(repeats.layers, (modules[0], modules[1]))


def extrapolate(full: LoweredProgram, half: LoweredProgram, layers: int) -> LoweredProgram:
    """Extrapolate to the program with all its layers.

    The kernels are those of the program with :data:`FULL` layers, executed as often as they occur
    with ``layers``. Those whose shapes depend on the number of layers are scaled by their bytes.

    Args:
        full: With :data:`FULL` layers.
        half: With :data:`HALF` layers.
        layers: Layers of the whole program.
    """
    steps = (layers - FULL) / (FULL - HALF)
    factors = _factors(full.kernels, half.kernels, steps)
    kernels = [
        replace(k, multiplicity=k.multiplicity * f)
        for k, f in zip(full.kernels, factors, strict=True)
    ]
    # Saved activations grow with the layers; a decrease with more layers is ignored.
    peak = full.peak_memory_bytes + steps * (full.peak_memory_bytes - half.peak_memory_bytes)
    note = (
        f"{layers} equal runs of ops (layers): compiled with {FULL} and with {HALF} of them; "
        "the executions of kernels and the peak memory are extrapolated"
    )
    return replace(
        full,
        kernels=kernels,
        peak_memory_bytes=max(peak, full.peak_memory_bytes),
        notes=[*full.notes, note],
        compile_seconds=full.compile_seconds + half.compile_seconds,
    )


def _factors(full: Sequence[Kernel], half: Sequence[Kernel], steps: float) -> list[float]:
    """Return the multiplier of each kernel of ``full``."""
    # n(layers) = n(4) + steps · (n(4) - n(2)), for each distinct kernel.
    more, less = _executions(full), _executions(half)
    counts = {h: n + steps * (n - less.get(h, 0.0)) for h, n in more.items()}
    # Kernels only in the long program (such as stacks over layers), or fewer in it than in the
    # short one.
    odd = {h for h in more if h not in less or counts[h] < 0}
    gone = {h for h in less if h not in more} | (odd & set(less))
    # Kernels whose shape depends on the number of layers, all of a kind together, by bytes: the
    # size of a stack of all layers' gradients grows with the layers, not its count.
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, kernels, chosen in ((0, full, odd), (1, half, gone)):
        for k in kernels:
            if k.hash in chosen and k.takes_time:
                sums[k.kind][side] += k.multiplicity * (k.bytes or 1.0)
    scale = {
        kind: max(1.0, 1 + steps * (have - had) / have) if have else 1.0
        for kind, (have, had) in sums.items()
    }
    return [
        scale.get(k.kind, 1.0) if k.hash in odd else counts[k.hash] / more[k.hash] for k in full
    ]


def _executions(kernels: Sequence[Kernel]) -> Counter[str]:
    executions: Counter[str] = Counter()
    for kernel in kernels:
        executions[kernel.hash] += kernel.multiplicity  # type: ignore[assignment]
    return executions


def find_repeats(table: OpTable) -> Repeats | None:
    """Find the layers of a program.

    Returns:
        The layers; ``None`` if no structure repeats at least :data:`MIN_LAYERS` times, or if layers
        cannot be removed.
    """
    candidates = find_runs(table)
    for layers in likely_counts(candidates):
        # A block at either end may differ, such as the first layer's, without a gradient to add.
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        for chosen in (disjoint(near), disjoint(near, layers)):
            repeats = _label(table, chosen, layers)
            if repeats is not None and _worth(table, repeats) and excise(table, repeats, 2):
                return repeats
    return None


def _worth(table: OpTable, repeats: Repeats) -> bool:
    """Return whether layers make up most of a program, and as many as stated.

    Removing a chain of equal sums would gain nothing, and such a chain may have one block more than
    there are layers; forward pass and optimiser have exactly as many blocks as layers.
    """
    sizes = [(run.count, run.stop - run.start) for run in repeats.runs]
    most = sum(size for _, size in sizes)
    exact = sum(size for count, size in sizes if count == repeats.layers)
    return 2 * most > len(table.reads) and 4 * exact > most


def _label(table: OpTable, runs: Sequence[Run], layers: int) -> Repeats | None:
    """Assign a layer to each block by data dependencies, starting from the first long run."""
    complete = {i: r.stop - r.start for i, r in enumerate(runs) if r.count == layers}
    if not complete:
        return None
    # The first long run is the forward pass, in the model's order. Backward runs are about twice as
    # long as forward ones, so at least a quarter of the longest run counts as long.
    main = next(i for i, size in complete.items() if 4 * size >= max(complete.values()))
    labels: dict[int, tuple[int, ...]] = {main: tuple(range(layers))}
    # A layer's parameters are read by one block per run: they order even runs that read nothing
    # else of the layers, such as the optimiser's.
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
    """Return the layers of arguments that only one block of a run reads."""
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
        """Return the layers of a run's blocks, from the layers that one operand of each reads.

        An operand that reads a layer in all blocks is preferred to one that lacks a layer: a run
        that begins within a layer reads the previous layer in its first ops.
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
        """Return the layers of a run's blocks, from another run's blocks that read them."""
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
        """Require a different layer in each block; a single missing one follows from the rest."""
        # Two blocks with one layer mean that this operand does not distinguish layers.
        known = [layer for layer in label if layer is not None]
        if len(set(known)) != len(known) or len(known) < len(label) - 1:
            return None
        if len(known) < len(label):
            left = set(range(self.layers)) - set(known)
            if len(left) != 1:
                return None
            label = [left.pop() if layer is None else layer for layer in label]
        return tuple(layer for layer in label if layer is not None)
