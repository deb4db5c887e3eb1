"""A training step split into stages of layers, each a separate program for one micro-batch."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...common.errors import PlanError
from ...common.units import size
from ...datagen.partition.program import sharding_text
from ...features.lowering.repeated_layers.runs import Read
from ...features.lowering.repeated_layers.stages import (
    Stage,
    StepCut,
    StepValues,
    cut_step,
    stage_module,
    step_values,
)
from ...simulate.step.pipeline import in_flight
from .arguments import Argument
from .dimensions import Step
from .program import PlannedProgram, Spec
from .space import Change, Plan, assign, cut_parts

if TYPE_CHECKING:
    from jaxlib.mlir import ir

#: Pipeline schedule: 1F1B keeps the fewest micro-batches in flight.
SCHEDULE = "1f1b"
#: Bytes sent, by source and target stage.
Traffic = Mapping[tuple[int, int], float]
#: Ops that only forward values and have no dimensions themselves.
_NAMES = frozenset(("get-tuple-element", "parameter", "tuple"))


class StageProgram(NamedTuple):
    """The program of a stage with its shardings, as MLIR bytecode.

    Attributes:
        key: Digest, equal for equal programs.
        data: The program.
        several: Whether it is for several devices, that is, whether anything in it is sharded.
    """

    key: str
    data: bytes
    several: bool


@dataclass
class StagedProgram:
    """A step split into stages, for micro-batches of one size.

    Attributes:
        program: The step for one micro-batch.
        change: Its rematerialization and number of micro-batches.
        values: Values of the step.
        numbers: Position of each op in ``main`` by its number.
        cut: Stages of the step.
        inside: Positions of the ops that run for each micro-batch.
        sums: Those whose results are accumulated over the micro-batches.
        rows: Values with the batch dimension.
        layers_at: Source line of the first layer of each stage.
    """

    program: PlannedProgram
    change: Change
    values: StepValues
    numbers: Mapping[int, int]
    cut: StepCut
    inside: frozenset[int]
    sums: frozenset[int]
    rows: frozenset[Read]
    layers_at: tuple[str, ...]

    @cached_property
    def modules(self) -> list[ir.Module]:
        """The program of each stage, without shardings."""
        return [stage_module(self.program.source.module, own) for own in self.cut.stages]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Position in the program's entry by position in the module's ``main``."""
        ops = self.program.source.program.entry_computation.ops
        found: dict[int, int] = {}
        for place, op in enumerate(ops):
            if op.opcode not in _NAMES and op.source and op.source.index in self.numbers:
                found[self.numbers[op.source.index]] = place
        return found

    @cached_property
    def _ordered(self) -> list[int]:
        return sorted(self.numbers)

    def _position(self, number: int) -> int:
        """Return the position of an op, or of the op whose region contains it; -1 for none."""
        at = bisect_right(self._ordered, number) - 1
        return self.numbers[self._ordered[at]] if at >= 0 else -1

    def _spec(self, read: Read, plan: Plan) -> Spec:
        """Return the sharding of a value."""
        place = self._places.get(read[0])
        if place is None:
            return ()
        value = ((self.program.source.program.entry, place), read[1])
        return assign(self.program.found.value_classes(value), self.program.space.cuts(plan))

    def local_bytes(self, read: Read, plan: Plan) -> float:
        """Return the bytes of a value on each device of a stage."""
        return self.values.nbytes[read[0]][read[1]] / cut_parts(self._spec(read, plan), plan.sizes)

    def annotated(self, plan: Plan) -> list[StageProgram]:
        """Return the program of each stage with the shardings of a plan.

        Args:
            plan: The plan, including its pipeline axis.
        """
        from ...features.ir.mlir.bindings import write_bytecode
        from ...features.ir.mlir.shardings import constrained, with_shardings

        inside, made = plan.inside, []
        sizes = inside.sizes
        told = self.program.constraints(inside)
        calls = self.program.calls(inside)
        outputs = self.program.result_specs(inside)
        for stage, module in zip(self.cut.stages, self.modules, strict=True):
            to = self._renumbered(stage, module)
            operands = {(to[n], k): cut for (n, k), cut in told[0].items() if n in to}
            products = {to[n]: cut for n, cut in told[1].items() if n in to}
            arguments = [
                self.program.argument_spec(self.program.arguments[n], inside)
                for n in stage.arguments
            ]
            arguments += [self._spec(read, inside) for read in stage.incoming]
            results = [outputs[n] for n in stage.results]
            results += [self._spec(read, inside) for read in stage.outgoing]
            # If nothing in a stage is sharded, all devices do the same.
            cuts = (*operands.values(), *products.values(), *arguments, *results)
            several = any(any(cut) for cut in cuts)
            if several:
                module = constrained(
                    module,
                    {at: _text(cut, sizes) for at, cut in operands.items()},
                    {at: _text(cut, sizes) for at, cut in products.items()},
                    {to[n]: call for n, call in calls.items() if n in to},
                )
                module = with_shardings(
                    module,
                    [_text(cut, sizes) for cut in arguments],
                    {n: _text(cut, sizes) for n, cut in enumerate(results)},
                    inside.devices,
                )
            text = str(module.operation.get_asm(enable_debug_info=False))
            key = hashlib.sha256(text.encode()).hexdigest()
            made.append(StageProgram(key, write_bytecode(module), several))
        return made

    def _renumbered(self, stage: Stage, module: ir.Module) -> dict[int, int]:
        """Map numbers of ops in the whole step to those in a stage, including ops in regions."""
        from ...features.ir.mlir.bindings import walk_ops
        from ...features.lowering.repeated_layers.mlir_excise import main_function

        main = main_function(module)
        assert main is not None  # stage modules have a main function
        places = {op: n for n, op in enumerate(walk_ops(module))}
        old = {position: number for number, position in self.numbers.items()}
        found = {}
        for op, position in zip(main.regions[0].blocks[0].operations, stage.ops, strict=False):
            for offset in range(len(walk_ops(op.operation))):
                found[old[position] + offset] = places[op.operation] + offset
        return found

    @cached_property
    def _first_stage(self) -> dict[int, int]:
        """The first stage that contains each op."""
        found: dict[int, int] = {}
        for number, stage in enumerate(self.cut.stages):
            for op in stage.ops:
                found.setdefault(op, number)
        return found

    def part(self, step: Step | None) -> tuple[int, str]:
        """Return the stage of an op and its phase: forward, backward or once per step."""
        source = step.op.source if step is not None else None
        at = self._position(source.index) if source is not None else -1
        if at not in self.inside:
            return self._first_stage.get(at, 0), "once"
        kind = "forward" if at < self.cut.backward else "backward"
        return self._first_stage.get(at, 0), kind

    def held(self, stage: int) -> list[Argument]:
        """Return the step's arguments that a stage holds."""
        return [self.program.arguments[n] for n in self.cut.stages[stage].arguments]

    def saved_bytes(self, stage: int, plan: Plan) -> float:
        """Return the bytes that a device keeps of a micro-batch between its passes.

        Args:
            stage: Number of the stage.
            plan: The plan inside the stage.
        """
        kept = self.cut.saved(self.values.table, stage)
        return sum(self.local_bytes(read, plan) for read in kept)

    def more_memory(self, stage: int, plan: Plan) -> float:
        """Return a device's bytes beyond its program: micro-batches in flight, gradient sums.

        Args:
            stage: Number of the stage.
            plan: The plan, including its pipeline axis.
        """
        ahead = in_flight(SCHEDULE, stage, plan.stages, plan.change.micro) - 1.0
        sums = ((op, 0) for op in self.sums if self.cut.home[op] == stage)
        gradients = sum(self.local_bytes(read, plan.inside) for read in sums)
        if "fsdp" in plan.sizes:
            gradients /= plan.sizes["fsdp"]  # sharded like their parameters
        return ahead * self.saved_bytes(stage, plan.inside) + gradients

    def sent_bytes(self, plan: Plan) -> tuple[Traffic, Traffic]:
        """Return the bytes that each device of a stage sends to its peer, by pair of stages.

        Args:
            plan: The plan, including its pipeline axis.

        Returns:
            Bytes per micro-batch, and bytes per step: sums over gradients, and parameters of
            several stages, such as tied embeddings, which are updated in the first of them.
        """
        inside = plan.inside
        each: dict[tuple[int, int], float] = defaultdict(float)
        once: dict[tuple[int, int], float] = defaultdict(float)
        for pair, reads in self.cut.sends().items():
            for read in reads:
                # Values without rows are accumulated over the micro-batches before they are sent.
                (each if read in self.rows else once)[pair] += self.local_bytes(read, inside)
        for number, argument in enumerate(self.program.arguments):
            if argument.role != "parameter":
                continue
            own = [n for n, stage in enumerate(self.cut.stages) if number in stage.arguments]
            cut = self.program.argument_spec(argument, inside)
            for other in own[1:]:
                parts = cut_parts(cut, inside.sizes)
                once[own[0], other] += argument.type.nbytes / parts
        return each, once

    def notes(self) -> list[str]:
        """Return notes on the stages."""
        far = [
            (pair, read)
            for pair, reads in self.cut.sends().items()
            for read in reads
            if abs(pair[0] - pair[1]) > 1 and self.values.ranks[read[0]][read[1]]
        ]
        if not far:
            return []
        (source, target), read = max(far, key=lambda own: self.values.nbytes[own[1][0]][own[1][1]])
        held = size(self.values.nbytes[read[0]][read[1]])
        line = self.program.line_of(read[0])
        return [
            f"{len(far)} values skip at least one stage, the largest ({held}, made at "
            f"{line or 'an unknown line'}) from stage {source} to {target}: they are sent directly"
        ]


def staged_program(program: PlannedProgram, stages: int, change: Change) -> StagedProgram:
    """Split a step into stages.

    Args:
        program: The whole step, unchanged.
        stages: Number of stages.
        change: Rematerialization and number of micro-batches.

    Raises:
        PlanError: The step has too few equal layers, or cannot be split into micro-batches.
    """
    layers = program.layers
    if layers is None or layers.count < stages:
        found = f"{layers.count} equal layers were" if layers else "no equal layers were"
        raise PlanError(
            f"no pipeline of {stages} stages: {found} found",
            where="--axes",
            hint="layers are found only if they are unrolled, not in a loop (scan)",
        )
    whole = program.changed(Change(change.remat))
    body = whole.micro_batch(change.micro)
    parts = whole.accumulation
    roles = {
        role: {n for n, own in enumerate(body.arguments) if own.role == role}
        for role in ("batch", "parameter", "state")
    }
    values, numbers = step_values(
        body.source.module, roles["batch"], roles["parameter"] | roles["state"]
    )
    cut = cut_step(values, layers, stages)
    starts = [layers.start + cut.layers.index(n) * layers.period for n in range(stages)]
    return StagedProgram(
        body,
        change,
        values,
        numbers,
        cut,
        frozenset(numbers[n] for n in parts.body),
        frozenset(numbers[n] for n, _ in parts.sums),
        frozenset((numbers[n], result) for n, result in parts.batch if n in numbers),
        tuple(program.line_of(at) for at in starts),
    )


def _text(cut: Spec, sizes: Mapping[str, int]) -> str:
    return sharding_text(cut, len(cut), sizes)
