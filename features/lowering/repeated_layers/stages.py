"""Pipeline stages: a training step cut into stages of layers, each a separate program.

The forward pass is assigned to stages by layers. An op of the backward pass belongs to the first of
the stages whose values it reads: the incoming gradient is from a later stage, saved values and
parameters are from its own. Values that depend only on parameters or only on the batch (casts,
masks, random numbers) are computed wherever they are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .runs import OpTable, Read

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from .remat import Layers


@dataclass(frozen=True)
class StepValues:
    """Properties of a step's values that are needed to cut it.

    Attributes:
        table: The ops of ``main``.
        returned: Values that ``main`` returns.
        ranks: Number of dimensions of each op's results.
        nbytes: Bytes of each op's results.
        batch: Indices of the arguments that are the batch.
        held: Indices of the arguments that are parameters or state.
        barriers: Ops that only forward their operands.
    """

    table: OpTable
    returned: Sequence[Read]
    ranks: Sequence[Sequence[int]]
    nbytes: Sequence[Sequence[int]]
    batch: Collection[int]
    held: Collection[int]
    barriers: Collection[int]


@dataclass(frozen=True)
class Stage:
    """One stage of a step; values are results of ops or arguments of the whole step.

    Attributes:
        ops: Its ops, in order.
        arguments: Arguments of the step that it reads or returns.
        incoming: Values that it receives from other stages.
        results: Results of the step that it returns.
        outgoing: Values that other stages read and that are not results.
    """

    ops: tuple[int, ...]
    arguments: tuple[int, ...]
    incoming: tuple[Read, ...]
    results: tuple[int, ...]
    outgoing: tuple[Read, ...]


@dataclass(frozen=True)
class StepCut:
    """A step cut into stages.

    Attributes:
        home: Stage of each op; ``None`` if it is computed wherever it is read.
        stages: The stages.
        backward: First op of the backward pass.
        layers: Stage of each layer.
    """

    home: Sequence[int | None]
    stages: tuple[Stage, ...]
    backward: int
    layers: tuple[int, ...]

    def sends(self) -> dict[tuple[int, int], list[Read]]:
        """Return the values sent from one stage to another, by (source, destination)."""
        found: dict[tuple[int, int], list[Read]] = defaultdict(list)
        for number, stage in enumerate(self.stages):
            for read in stage.incoming:
                source = self.home[read[0]]
                assert source is not None  # values without a stage are not received
                found[source, number].append(read)
        return dict(found)

    def saved(self, table: OpTable, stage: int) -> list[Read]:
        """Return values of the forward pass that a stage saves for its backward pass."""
        mine = self.stages[stage]
        own = set(mine.ops)
        kept = {
            read
            for op in mine.ops
            if op >= self.backward
            for read in table.reads[op]
            if 0 <= read[0] < self.backward
            and (self.home[read[0]] == stage or (read[0] not in own and read in mine.incoming))
        }
        return sorted(kept)


def cut_step(values: StepValues, layers: Layers, stages: int) -> StepCut:
    """Cut a step into stages of layers.

    Args:
        values: The step.
        layers: The equal layers of its forward pass.
        stages: Number of stages, at most as many as layers.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if stages > layers.count:
        raise ValueError(f"{layers.count} equal layers cannot be cut into {stages} stages")
    return _Cutter(values, layers, stages).cut()


@dataclass
class _Cutter:
    values: StepValues
    layers: Layers
    stages: int
    home: list[int | None] = field(default_factory=list)
    bound: dict[Read, int] = field(default_factory=dict)

    def cut(self) -> StepCut:
        reads = self.values.table.reads
        count = len(reads)
        self.on_batch = self._spread(self.values.batch)
        self.on_held = self._spread(self.values.held)
        self.home = [None] * count
        self.readers: list[list[int]] = [[] for _ in reads]
        for op, own in enumerate(reads):
            for source in {r[0] for r in own if r[0] >= 0}:
                self.readers[source].append(op)
        backward = self._first_backward()
        for op in range(backward):
            if self._mixed(op):
                self.home[op] = self._place(op)
        self._bind(backward)
        for op in range(backward, count):
            if self._mixed(op):
                self.home[op] = self._earliest(op)
        self._sink(backward)
        of_layers = tuple(n * self.stages // self.layers.count for n in range(self.layers.count))
        return StepCut(tuple(self.home), self._written(), backward, of_layers)

    def _spread(self, arguments: Collection[int]) -> list[bool]:
        """Return which ops depend on any of the arguments."""
        found: list[bool] = []
        for reads in self.values.table.reads:
            found.append(any(n in arguments if op < 0 else found[op] for op, n in reads))
        return found

    def _mixed(self, op: int) -> bool:
        """Return whether an op depends on both batch and parameters: activations, gradients."""
        return self.on_batch[op] and self.on_held[op]

    def _place(self, op: int) -> int:
        """Return the stage of an op of the forward pass, by its position."""
        layer = (op - self.layers.start) // self.layers.period
        return min(max(layer, 0), self.layers.count - 1) * self.stages // self.layers.count

    def _first_backward(self) -> int:
        """Return the first op after the layers that reads what the last layer saved."""
        own = self.layers
        last = own.stop - own.period
        saved = {(last + offset, result) for offset, result in own.again}
        reads = self.values.table.reads
        for op in range(own.stop, len(reads)):
            if op in self.values.barriers or any(read in saved for read in reads[op]):
                return op
        return own.stop

    def _bind(self, backward: int) -> None:
        """Record the last forward stage that has each value, for the backward pass."""
        for op in range(backward - 1, -1, -1):
            stage = self.home[op]
            for read in self.values.table.reads[op]:
                held = self.on_held[read[0]] if read[0] >= 0 else read[1] in self.values.held
                if not held:
                    continue
                if stage is not None:
                    self.bound[read] = max(self.bound.get(read, 0), stage)
                else:
                    # A converted form of parameters, which is located where its users are.
                    own = range(len(self.values.ranks[op]))
                    later = [self.bound[op, n] for n in own if (op, n) in self.bound]
                    if later:
                        self.bound[read] = max(self.bound.get(read, 0), *later)
        for op in range(backward):
            stage = self.home[op]
            if stage is not None:
                for result in range(len(self.values.ranks[op])):
                    self.bound[op, result] = max(self.bound.get((op, result), 0), stage)

    def _earliest(self, op: int) -> int | None:
        """Return the first stage whose values an op reads; scalars are sent to every user.

        A sum over all gradients, such as their norm, must not draw the updates to its stage.
        """
        reads = self.values.table.reads[op]
        if not any(self.values.ranks[op]):
            homes = [home for n, _ in reads if n >= 0 and (home := self.home[n]) is not None]
            return min(homes, default=None)
        met = [self.bound[read] for read in reads if self._rank(read) and read in self.bound]
        first = min(met, default=None)
        if first is not None:
            for result in range(len(self.values.ranks[op])):
                self.bound[op, result] = first
        return first

    def _rank(self, read: Read) -> int:
        return self.values.ranks[read[0]][read[1]] if read[0] >= 0 else 1

    def _sink(self, backward: int) -> None:
        """Move ops to the earlier stage that alone reads them, if that sends no more bytes.

        A bias's gradient reads only what the later stage sends, but belongs to the earlier one.
        """
        kept = {read[0] for read in self.values.returned}
        for op in range(len(self.home) - 1, backward - 1, -1):
            stage, users = self.home[op], {self.home[n] for n in self.readers[op]}
            if stage is None or op in kept or len(users) != 1:
                continue
            (to,) = users
            if to is None or to >= stage:
                continue
            more = 0
            for read in set(self.values.table.reads[op]):
                source = self.home[read[0]] if read[0] >= 0 else None
                if source is None:
                    # Values without a stage are available; the later stage's parameters are not.
                    more += 2**62 * (self.bound.get(read, to) != to)
                elif source != to and all(self.home[n] != to for n in self.readers[read[0]]):
                    more += self.values.nbytes[read[0]][read[1]]
            if more <= sum(self.values.nbytes[op]):
                self.home[op] = to

    def _written(self) -> tuple[Stage, ...]:
        reads = self.values.table.reads
        owners = [self._owner(read) for read in self.values.returned]
        made = []
        for stage in range(self.stages):
            results = tuple(n for n, own in enumerate(owners) if own == stage)
            ops: set[int] = set()
            arguments: set[int] = set()
            incoming: set[Read] = set()
            pending = [(op, 0) for op, own in enumerate(self.home) if own == stage]
            pending += [self.values.returned[n] for n in results]
            while pending:
                read = pending.pop()
                op, number = read
                if op < 0:
                    arguments.add(number)
                elif self.home[op] not in (None, stage):
                    incoming.add(read)
                elif op not in ops:
                    ops.add(op)
                    pending += reads[op]
            made.append((ops, arguments, incoming, results))
        wanted = {read for _, _, incoming, _ in made for read in incoming}
        stages = []
        for stage, (ops, arguments, incoming, results) in enumerate(made):
            returned = {self.values.returned[n] for n in results}
            out = sorted(r for r in wanted - returned if self.home[r[0]] == stage)
            stages.append(
                Stage(
                    tuple(sorted(ops)),
                    tuple(sorted(arguments)),
                    tuple(sorted(incoming)),
                    results,
                    tuple(out),
                )
            )
        return tuple(stages)

    def _owner(self, read: Read) -> int:
        """Return the stage that returns a value; the first one for values without a stage."""
        own = self.home[read[0]] if read[0] >= 0 else None
        return own if own is not None else self.bound.get(read, 0)


def step_values(
    module: ir.Module, batch: Collection[int], held: Collection[int]
) -> tuple[StepValues, dict[int, int]]:
    """Collect the properties needed to cut a step.

    Args:
        module: StableHLO with its calls inlined.
        batch: Indices of the arguments that are the batch.
        held: Indices of the arguments that are parameters or state.

    Returns:
        The step, and the index of each op in ``main`` by its number in ``walk_ops`` order.
    """
    from ...ir.mlir.bindings import walk_ops
    from ...ir.mlir.values import read_types
    from .mlir_excise import main_function, read_table

    main = main_function(module)
    assert main is not None  # layers were found in it
    ops = [op.operation for op in main.regions[0].blocks[0].operations]
    kinds = [[read_types(str(value.type))[0] for value in op.results] for op in ops[:-1]]
    places: dict[object, Read] = {
        value: (op, n) for op, own in enumerate(ops) for n, value in enumerate(own.results)
    }
    places |= {value: (-1, n) for n, value in enumerate(main.regions[0].blocks[0].arguments)}
    values = StepValues(
        read_table(main),
        [places[value] for value in ops[-1].operands],
        [[max((len(k.shape) for k in kind), default=0) for kind in own] for own in kinds],
        [[sum(k.nbytes for k in kind) for kind in own] for own in kinds],
        batch,
        held,
        {n for n, op in enumerate(ops) if op.name == "stablehlo.optimization_barrier"},
    )
    position = {op: n for n, op in enumerate(ops)}
    numbers = {n: position[op] for n, op in enumerate(walk_ops(module)) if op in position}
    return values, numbers


def stage_module(module: ir.Module, stage: Stage) -> ir.Module:
    """Build the program of a stage.

    Its arguments are those of the step that it reads, then the values it receives; its results are
    those of the step that it computes, then the values it sends. Its ops keep their order.

    Args:
        module: The step from which the stage was cut.
        stage: The stage.
    """
    from jaxlib.mlir import ir

    from ...ir.mlir.bindings import copy_module
    from .mlir_excise import main_function, retype, write_return

    copy = copy_module(module)
    main = main_function(copy)
    assert main is not None  # it was cut
    block = main.regions[0].blocks[0]
    ops = [op.operation for op in block.operations]
    last = ops[-1]
    with copy.context, ir.Location.unknown():
        returned = [last.operands[n] for n in stage.results]
        returned += [ops[op].results[n] for op, n in stage.outgoing]
        write_return(last, returned)
        for op, number in stage.incoming:
            value = ops[op].results[number]
            value.replace_all_uses_with(block.add_argument(value.type, ops[op].location))
        kept = set(stage.ops)
        for number in range(len(ops) - 2, -1, -1):
            if number not in kept:
                ops[number].erase()
        more = len(stage.incoming), len(stage.outgoing)
        retype(main, stage.arguments, stage.results, more)
        if not copy.operation.verify():
            raise ValueError("the program of a stage is not valid")
    return copy
