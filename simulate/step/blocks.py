"""Work of a device of each pipeline stage in a step, in execution order.

A stage is a sequence of units: the embedding, layers, the head. A unit has blocks of computation
for either pass, with the collectives of its activations, and parameters that may have to be
gathered and whose gradients may have to be reduced. Times (:mod:`.stage_times`), operator counts
(:meth:`Stage.counts`) and traces (:mod:`opcast.simulate.chakra.step_ranks`) are folds over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...features.operators.op import Op
from .costs import CommCall
from .layer_ops import PassOps, embedding_ops, head_ops, layer_ops, update_ops
from .memory import layer_activations, stage_held
from .plan import Plan, kind_counts, stage_kinds
from .traffic import (
    Parameters,
    expert_calls,
    gather_calls,
    hop_call,
    layer_held,
    local_parameters,
    replica_calls,
    ring_calls,
    scatter_calls,
    table_held,
    tensor_calls,
    tied_calls,
)
from .workload import Workload

#: Bytes of a gradient transferred to the host, where the new weight comes from: f32.
_HOST_GRADIENT = 4


class Beside(NamedTuple):
    """A collective that overlaps some operators of its block, exposed if it takes longer.

    Attributes:
        call: The collective.
        ops: The operators.
        share: Fraction of their time that it may overlap.
    """

    call: CommCall
    ops: tuple[Op, ...]
    share: float = 1.0


@dataclass(frozen=True)
class Block:
    """Operators that run one after another, with the collectives of their activations.

    Attributes:
        ops: The operators.
        sent: Collectives whose results the next operator needs.
        beside: Collectives hidden behind operators.
    """

    ops: tuple[Op, ...]
    sent: tuple[CommCall, ...] = ()
    beside: tuple[Beside, ...] = ()

    @property
    def calls(self) -> tuple[CommCall, ...]:
        """All collectives of the block."""
        return (*self.sent, *(own.call for own in self.beside))


# Compared by identity: equal layers of a stage are one object, which folds visit once.
@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, the embedding or the head, for one micro-batch.

    Attributes:
        forward: Forward pass.
        backward: Backward pass including recomputation, without weight gradients.
        weights: Weight gradients.
        moved: Bytes of activations offloaded in the forward pass and fetched in the backward pass.
        gathers: Parameter gathers before either pass.
        scatters: Gradient reductions after each backward pass.
        once: Gradient reductions after the last backward pass.
        renewed: Parameter gathers after the update.
    """

    forward: Block
    backward: tuple[Block, ...]
    weights: Block
    moved: float
    gathers: tuple[CommCall, ...]
    scatters: tuple[CommCall, ...]
    once: tuple[CommCall, ...]
    renewed: tuple[CommCall, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """Work of a device of a stage.

    Attributes:
        plan: Resolved plan.
        train: Whether there is a backward pass and an update.
        units: Units in the order of the forward pass.
        update: Operators of the optimiser.
        moved: Bytes between device and host for the update.
        tied: Reductions of weights shared by stages, before the update.
        hop: Transfer of a micro-batch between stages, in either pass.
    """

    plan: Plan
    train: bool
    units: tuple[Unit, ...]
    update: tuple[Op, ...]
    moved: float
    tied: tuple[CommCall, ...]
    hop: CommCall

    @property
    def split(self) -> bool:
        """Whether weight gradients are separate tasks, as in zero-bubble schedules."""
        return self.plan.schedule == "zero-bubble"

    def counts(self) -> dict[Op, float]:
        """How often the device runs each operator in a step."""
        counts = dict[Op, float]()
        for unit, number in Counter(self.units).items():
            for block in (unit.forward, *unit.backward, unit.weights):
                for call in block.ops:
                    counts[call] = counts.get(call, 0.0) + float(number * self.plan.microbatches)
        for call in self.update:
            counts[call] = counts.get(call, 0.0) + 1.0
        return counts


# A step, its lower bound, energy and breakdown ask for the same few stages in turn.
@lru_cache(maxsize=64)
def step_stages(workload: Workload, plan: Plan) -> tuple[Stage, ...]:
    """Work of a device of each stage; equal stages are one object.

    Args:
        workload: Model.
        plan: Plan resolved by :func:`~.plan.resolved`.
    """
    known: dict[tuple[object, ...], Stage] = {}
    stages = []
    for stage in range(plan.pp):
        layers = tuple(kind_counts(workload, plan, stage).items())
        # Stages with the same layers and ends are equal: at most a few differ, whatever ``pp`` is.
        key = (layers, stage == 0, stage == plan.pp - 1)
        if key not in known:
            known[key] = _stage(workload, plan, stage)
        stages.append(known[key])
    return tuple(stages)


def _stage(workload: Workload, plan: Plan, stage: int) -> Stage:
    train = workload.mode == "train"
    known = {kind: _layer(kind, plan) for kind in kind_counts(workload, plan, stage)}
    units = [known[kind] for kind in stage_kinds(workload, plan, stage)]
    table = table_held(workload, plan)
    if stage == 0:
        units.insert(0, _end(workload, plan, embedding_ops(workload, plan), table))
    if stage == plan.pp - 1:
        # A tied head has no separate parameters to gather or reduce.
        own = Parameters(0.0) if workload.tied and plan.pp == 1 else table
        units.append(_end(workload, plan, head_ops(workload, plan), own))
    updated = local_parameters(stage_held(workload, plan, stage).trained(workload), plan)
    offloaded = train and plan.offload == "optimizer"
    return Stage(
        plan,
        train,
        tuple(units),
        update_ops(updated, workload),
        updated * (workload.width + _HOST_GRADIENT) if offloaded else 0.0,
        tuple(tied_calls(workload, plan, stage)) if train else (),
        hop_call(workload, plan),
    )


def _layer(workload: Workload, plan: Plan) -> Unit:
    ops = layer_ops(workload, plan)
    forward = _block(workload, plan, ops.forward, backward=False)
    # Full recomputation repeats the forward pass with its collectives; selective recomputation
    # only repeats operators that need none.
    again = {"none": (), "selective": (Block(ops.selective),), "full": (forward,)}[plan.recompute]
    backward = (_block(workload, plan, ops.backward, backward=True), *again)
    moved = layer_activations(workload, plan) if plan.offload == "activations" else 0.0
    held = layer_held(workload, plan)
    return _unit(workload, plan, held, forward, backward, Block(ops.weights), moved)


def _block(workload: Workload, plan: Plan, ops: tuple[Op, ...], *, backward: bool) -> Block:
    """A layer's operators in one pass, with the collectives of their activations.

    Tensor- and expert-parallel collectives are on the critical path: the next operator needs their
    result. ``hide_experts`` overlaps the expert exchange with the pass of another micro-batch; keys
    and values travel while attention processes the block before.
    """
    core = tuple(c for c in ops if c.family == "attention")
    # Attention covers all ``cp`` blocks; the last one sends nothing.
    around = (plan.cp - 1) / plan.cp
    sent, beside = tensor_calls(workload, plan), list[Beside]()
    for calls, hidden, behind, share in (
        (expert_calls(workload, plan), plan.hide_experts, ops, 1.0),
        (ring_calls(workload, plan, backward=backward), plan.overlap, core, around),
    ):
        if hidden:
            beside += [Beside(call, behind, share) for call in calls]
        else:
            sent += calls
    return Block(ops, tuple(sent), tuple(beside))


def _end(workload: Workload, plan: Plan, ops: PassOps, held: Parameters) -> Unit:
    """The embedding or the head."""
    return _unit(
        workload, plan, held, Block(ops.forward), (Block(ops.backward),), Block(ops.weights)
    )


def _unit(
    workload: Workload,
    plan: Plan,
    held: Parameters,
    forward: Block,
    backward: Sequence[Block],
    weights: Block,
    moved: float = 0.0,
) -> Unit:
    """A unit with the collectives of its parameters for the plan's ZeRO stage."""
    zero, train = plan.stage, workload.mode == "train"
    trained = held.trained(workload)
    gathers = tuple(gather_calls(held, workload, plan))
    scatters = tuple(scatter_calls(trained, workload, plan)) if train else ()
    sums = tuple(replica_calls(trained, workload, plan)) if train else ()
    return Unit(
        forward,
        tuple(backward) if train else (),
        weights if train else Block(()),
        moved if train else 0.0,
        # ZeRO 3 gathers parameters before every use; ZeRO 2 and 3 scatter the gradients of every
        # micro-batch; ZeRO 1 keeps whole gradients until the end of the step and then scatters
        # them. Updated parameters of ZeRO 1 and 2 are gathered for the next step.
        gathers if zero >= 3 else (),
        scatters if zero >= 2 else (),
        (*sums, *scatters) if zero == 1 else sums,
        tuple(gather_calls(trained, workload, plan)) if train and zero in (1, 2) else (),
    )
