"""A program to plan, and the same program annotated with a plan's shardings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING

from ...common.errors import PlanError, ProgramError
from ...datagen.partition.program import call_split, sharding_text
from ...features.ir.mlir.attention_calls import CallAxis, CallSplit
from ...features.ir.partitioning import annotated_devices, header_counts, joined_devices
from ...features.ir.platforms import Platform
from ...features.ir.reader import SourceProgram, read_program
from ...features.kernels.memory import memory_over_time
from ...features.lowering.xla import _as_stablehlo
from .arguments import Argument, arguments_of
from .cost import Sheet
from .dimensions import PRODUCTS, Dimensions, dimensions_of
from .micro_batches import accumulation_of
from .op_axes import is_attention
from .space import UNCHANGED, Change, Cuts, Plan, Space, assign, fsdp_dimension, space_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from ...features.ir.mlir.micro_batches import Accumulation
    from ...features.lowering.repeated_layers.remat import Layers
    from ...simulate.clusters.topology import Cluster
    from ..program.predictor import Predictor

#: Sharding of an array: the axes of each dimension.
Spec = tuple[tuple[str, ...], ...]


@dataclass
class PlannedProgram:
    """A program for one device, and what may be sharded in it.

    Attributes:
        source: The program, with calls inlined and without shardings.
        found: Dimensions of the program.
        arguments: Arguments of the program.
        space: Dimensions that may be sharded.
        given: The original program, if it had shardings.
        note: Which of its shardings are ignored; empty for none.
        batch: Batch dimension by name or number of an argument; ``None`` if it was detected.
        change: Changes from the given program.
        layers_at: Source line of the first op of the rematerialized layers; empty for none.
    """

    source: SourceProgram
    found: Dimensions
    arguments: list[Argument]
    space: Space
    given: SourceProgram | None = None
    note: str = ""
    batch: Mapping[str, int] | None = None
    change: Change = UNCHANGED
    layers_at: str = ""
    _changed: dict[Change, PlannedProgram] = field(default_factory=dict)
    _parts: dict[int, PlannedProgram] = field(default_factory=dict)

    @property
    def plain(self) -> bytes:
        """The program without shardings, as MLIR bytecode."""
        from ...features.ir.mlir.bindings import write_bytecode

        return write_bytecode(self.source.module)

    @cached_property
    def layers(self) -> Layers | None:
        """The equal layers of the forward pass; ``None`` if there are none."""
        from ...features.lowering.repeated_layers.remat import layers_of

        return layers_of(self.source.module)

    def changed(self, change: Change) -> PlannedProgram:
        """Return the program with rematerialized layers, and in micro-batches.

        Raises:
            PlanError: It has no such layers, or micro-batches would compute something else.
        """
        if change == self.change:
            return self
        if change not in self._changed:
            self._changed[change] = self._make(change)
        return self._changed[change]

    def _make(self, change: Change) -> PlannedProgram:
        from ...features.ir.mlir.micro_batches import in_micro_batches
        from ...features.lowering.repeated_layers.remat import rematerialised

        made = self
        if change.remat:
            known = self.layers.count if self.layers else 0
            if change.remat > known:
                raise PlanError(
                    f"{change.remat} layers cannot be rematerialised: "
                    f"{known} equal layers with a backward pass were found"
                    if known
                    else "nothing can be rematerialised: no equal layers with a backward pass were "
                    "found",
                    where="--remat",
                    hint="layers are found only if they are unrolled, not in a loop (scan); "
                    "jax.checkpoint in the program works in either case",
                )
            assert self.layers is not None
            module = rematerialised(self.source.module, self.layers, change.remat)
            made = self._with(module, Change(change.remat))
            made.layers_at = self.line_of(self.layers.start)
        if change.micro > 1:
            if change.micro * 2 > self.rows:
                raise PlanError(
                    f"{change.micro} micro-batches of {self.rows} rows leave nothing to shard",
                    where="--micro-batches",
                    hint="each needs at least two rows; or give 1",
                )
            module = made._divided(in_micro_batches, change.micro)
            made = made._with(module, change)
        return made

    @cached_property
    def rows(self) -> int:
        """Rows of the batch: the greatest common divisor over its arguments."""
        return gcd(*(own.type.shape[own.batch] for own in self.arguments if own.role == "batch"))

    @cached_property
    def accumulation(self) -> Accumulation:
        """The ops that run for each micro-batch.

        Raises:
            PlanError: Micro-batches would compute something else.
        """
        return accumulation_of(self.source.program, self.found, self.arguments)

    def _divided(
        self, divide: Callable[[ir.Module, Accumulation, int], ir.Module], parts: int
    ) -> ir.Module:
        try:
            return divide(self.source.module, self.accumulation, parts)
        except ValueError as error:
            raise PlanError(
                f"the step cannot be split into micro-batches: {error}",
                where="--micro-batches",
                hint="give a number that divides the batch, or 1",
            ) from None

    def micro_batch(self, parts: int) -> PlannedProgram:
        """Return the step for one of several equal parts of the batch, with the same op numbers.

        Raises:
            PlanError: Micro-batches would compute something else.
        """
        from ...features.ir.mlir.micro_batches import one_micro_batch

        if parts not in self._parts:
            self._parts[parts] = self._with(self._divided(one_micro_batch, parts), self.change)
        return self._parts[parts]

    def line_of(self, position: int) -> str:
        """Return the source line of an op of ``main``, counted from 0; empty if unknown."""
        from ...features.ir.mlir.locations import user_line
        from ...features.lowering.repeated_layers.mlir_excise import main_function

        main = main_function(self.source.module)
        assert main is not None  # layers were found in it
        first = list(main.regions[0].blocks[0].operations)[position]
        place = user_line(str(first.operation.location), self.source.origin)
        return f"{place.file}:{place.line}" if place.line else ""

    def _with(self, module: ir.Module, change: Change) -> PlannedProgram:
        names = {n: own.name for n, own in enumerate(self.arguments)}
        made = _planned(module, self.source, names, self.batch, change)
        made.layers_at = self.layers_at
        return made

    def sheet(
        self, cluster: Cluster, predictor: Predictor, plain: PlannedProgram | None = None
    ) -> Sheet:
        """Summarize the program for screening.

        Args:
            cluster: The cluster.
            predictor: Predicts the kernels of one device.
            plain: The program without rematerialization, if this one has it.
        """
        made = Sheet(
            self.source,
            self.found,
            self.arguments,
            self.space,
            cluster,
            predictor,
            self.change.micro,
        )
        if plain is not None:
            # The lowering ``fused`` may reorder recomputed ops, so its memory profile does not
            # apply; the order of the program's ops does.
            share = activation_bytes(self) / max(activation_bytes(plain), 1.0)
            made.activations = share * plain.sheet(cluster, predictor).activations
        return made

    def argument_spec(self, own: Argument, plan: Plan) -> Spec:
        """Return the sharding of an argument between steps under a plan."""
        cuts, sizes = self.space.cuts(plan), plan.sizes
        cut = list(assign(own.classes, cuts))
        extra = fsdp_dimension(own, cuts, sizes)
        if extra >= 0:
            cut[extra] = (*cut[extra], "fsdp")
        return tuple(cut)

    def annotated(self, plan: Plan) -> bytes:
        """Return the program with a plan's GSPMD shardings, as MLIR bytecode.

        Arguments, and results that replace them, are sharded as the plan specifies, other results
        by their dimensions. Parameters sharded by ``fsdp`` are gathered before use. Results of
        products with the batch are constrained, since XLA's partitioner otherwise chooses by
        operand sizes.
        """
        from ...features.ir.mlir.bindings import write_bytecode
        from ...features.ir.mlir.shardings import constrained, with_shardings

        sizes = plan.sizes
        arguments = [
            sharding_text(self.argument_spec(own, plan), len(own.classes), sizes)
            for own in self.arguments
        ]
        outputs = {
            n: sharding_text(cut, len(cut), sizes) for n, cut in enumerate(self.result_specs(plan))
        }
        operands, results = self.constraints(plan)
        module = constrained(
            self.source.module,
            {at: sharding_text(cut, len(cut), sizes) for at, cut in operands.items()},
            {at: sharding_text(cut, len(cut), sizes) for at, cut in results.items()},
            self.calls(plan),
        )
        return write_bytecode(with_shardings(module, arguments, outputs, plan.devices))

    @cached_property
    def kept_twice(self) -> int:
        """Bytes of parameters and state with updates that are separate results (not donated)."""
        taken = {own.output for own in self.arguments}
        kept = (a for a in self.arguments if a.role in ("parameter", "state"))
        left = [own.type for own in kept if own.output < 0]
        entry, total = self.source.program.entry_computation, 0
        root = entry.root_op
        for number, place in enumerate(root.operands if root.opcode == "tuple" else ()):
            kind = entry.ops[place].type
            if number not in taken and kind in left and kind.shape:
                left.remove(kind)
                total += kind.nbytes
        return total

    def result_specs(self, plan: Plan) -> list[Spec]:
        """Return the shardings of results; updated state has that of its argument."""
        entry, cuts = self.source.program.entry_computation, self.space.cuts(plan)
        root = entry.root_op
        places = root.operands if root.opcode == "tuple" else (entry.root,)
        taken = {own.output: own for own in self.arguments if own.output >= 0}
        kept = [own for own in self.arguments if own.role in ("parameter", "state")]
        left = [own for own in kept if own.output < 0]
        specs = []
        for number, place in enumerate(places):
            value = ((entry.name, place), 0)
            kind, classes = self.found.types[value], self.found.value_classes(value)
            same = (own for own in left if (own.type, own.classes) == (kind, classes))
            own = taken.get(number) or next(same, None)
            if own in left:
                left.remove(own)
            specs.append(self.argument_spec(own, plan) if own else assign(classes, cuts))
        return specs

    def calls(self, plan: Plan) -> dict[int, CallSplit]:
        """Return the shardings of attention calls, by the numbers of the ops."""
        cuts, found = self.space.cuts(plan), {}
        for step in self.found.steps:
            if is_attention(step.op) and step.axes and step.op.source is not None:
                along = assign([self.found.axis_class(step, axis) for axis in step.axes], cuts)
                if any(along):
                    axes = [CallAxis(axis.results, axis.operands) for axis in step.axes]
                    operands = [self.found.types[o].shape for o in step.operands]
                    results = [kind.shape for kind in step.op.results]
                    found[step.op.source.index] = call_split(
                        axes, along, operands, results, plan.sizes
                    )
        return found

    def constraints(self, plan: Plan) -> tuple[dict[tuple[int, int], Spec], dict[int, Spec]]:
        """Return the shardings of operands and of results, by the numbers of the ops."""
        cuts: Cuts = self.space.cuts(plan)
        operands: dict[tuple[int, int], Spec] = {}
        for own in self.arguments:
            if fsdp_dimension(own, cuts, plan.sizes) < 0:
                continue
            for use in own.uses:
                if use.step.op.source is not None:
                    value = use.step.operands[use.operand]
                    cut = assign(self.found.value_classes(value), cuts)
                    # All calls of a function share the same op.
                    operands.setdefault((use.step.op.source.index, use.operand), cut)
        results: dict[int, Spec] = {}
        for step in self.found.steps:
            if step.op.opcode in PRODUCTS and step.op.source is not None:
                classes = self.found.value_classes((step.place, 0))
                if self.space.batch & set(classes):
                    results.setdefault(step.op.source.index, assign(classes, cuts))
        return operands, results

    def lines(self, plan: Plan) -> dict[str, Spec]:
        """Return shardings of products' results by source line, where JAX code would state them."""
        found: dict[str, Spec] = {}
        by_index = {s.op.source.index: s.op.source for s in self.found.steps if s.op.source}
        for number, cut in self.constraints(plan)[1].items():
            source = by_index[number]
            if source.file and any(cut):
                found.setdefault(f"{source.file}:{source.line}", cut)
        return found


def read_planned(
    program: object, batch: Mapping[str, int] | None = None, platform: Platform | None = None
) -> PlannedProgram:
    """Read a program for planning.

    Args:
        program: An input of :func:`read_program`. If it has shardings, the plan is compared with
            them.
        batch: Batch dimension by name or number of an argument; ``None`` to detect it.
        platform: Platform that a function is lowered for.

    Raises:
        ProgramError: The program has collectives already, or its batch is unknown.
        PlanError: ``batch`` is wrong, or nothing can be cut.
    """
    from ...features.ir.mlir.shardings import (
        argument_names,
        inline_calls,
        with_donations,
        without_empty_meshes,
        without_shardings,
    )

    source = read_program(program, platform=platform)
    if source.program.is_scheduled or joined_devices(source) > 1:
        raise ProgramError(
            "the program is compiled or has collectives already, so it cannot be planned",
            where=source.origin,
            hint="give the program for one device, or with shardings only",
        )
    read, devices, note = source.program, annotated_devices(source), ""
    of_hlo, split = source.kind == "hlo", prod(header_counts(source)) > 1
    source = _as_stablehlo(source)
    given = source if split and devices > 1 else None
    if devices > 1 and not split:
        note = (
            f"its own shardings over {devices} devices are ignored: with one partition in its "
            "header they have no effect"
        )
    module = without_empty_meshes(source.module)
    if of_hlo:
        module = with_donations(module, read.aliases, read.donors)
    try:
        module = inline_calls(without_shardings(module))
    except ValueError as error:
        raise ProgramError(
            str(error),
            where=source.origin,
            hint="give the function without shard_map, or the unplanned program; opcast "
            "predict --cluster accepts it as it is",
        ) from None
    made = _planned(module, source, argument_names(source.module), batch)
    made.given, made.note = given, note
    return made


def activation_bytes(program: PlannedProgram) -> float:
    """Return the peak bytes besides arguments and results, with ops in the program's order."""
    profile = memory_over_time(program.source.program)
    return max(profile.bytes, default=profile.resident) - profile.resident


def _planned(
    module: ir.Module,
    origin: SourceProgram,
    names: Mapping[int, str],
    batch: Mapping[str, int] | None,
    change: Change = UNCHANGED,
) -> PlannedProgram:
    from ...features.ir.mlir.bindings import write_bytecode

    plain = read_program(write_bytecode(module))
    plain.origin, plain.platforms = origin.origin, origin.platforms
    found = dimensions_of(plain.program)
    arguments = arguments_of(plain.program, found, names, batch)
    space = space_of(found, arguments)
    return PlannedProgram(plain, found, arguments, space, batch=batch, change=change)
