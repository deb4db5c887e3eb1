"""Times of one device of a pipeline stage: a micro-batch, the reduction of gradients, the update.

A stage is a sequence of units: the embedding, layers, the head. Each has its computation, the
exposed collectives of its activations, and parameters that may have to be gathered and reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...features.operators.op import Op
from .calls import CommCall
from .costs import Costs, Part
from .layer_ops import PassOps, embedding_ops, head_ops, layer_ops, update_ops
from .memory import layer_activations, stage_held
from .overlap import Pass, exposed, ring, run_passes
from .placement import kind_counts, stage_kinds
from .plan import Plan
from .traffic import (
    Parameters,
    expert_calls,
    gather_calls,
    hop_call,
    layer_held,
    local_parameters,
    replica_calls,
    ring_call,
    scatter_calls,
    table_held,
    tensor_calls,
    tied_calls,
)
from .workload import Workload

#: Makes the collectives that some parameters need.
ParameterCalls = Callable[[Parameters, Workload, Plan], list[CommCall]]


@dataclass(frozen=True)
class Unit:
    """A layer, the embedding or the head.

    Attributes:
        forward: Forward pass of one micro-batch.
        backward: Backward pass, recomputation included, gradients of weights not.
        weights: Gradients of weights.
        held: Parameters on this device before sharding over data-parallel ranks.
    """

    forward: Part
    backward: Part
    weights: Part
    held: Parameters


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one device of a stage, all its chunks together.

    Attributes:
        forward: One micro-batch forward.
        backward: One micro-batch backward; without ``weights`` for zero-bubble schedules.
        weights: Gradients of weights, where they are apart.
        reduction: Reduction of gradients that the last backward pass does not hide.
        update: The optimiser, with what ZeRO gathers after it and what offloading costs.
    """

    forward: Part
    backward: Part
    weights: Part
    reduction: float
    update: Part

    @property
    def micro(self) -> Part:
        """All passes of one micro-batch."""
        return self.forward + self.backward + self.weights

    def slowed(self, factor: float) -> StageTimes:
        """The stage on a device that computes ``factor`` times as long; its links are the same."""

        def slower(part: Part) -> Part:
            return replace(part, compute=part.compute * factor)

        return StageTimes(
            slower(self.forward),
            slower(self.backward),
            slower(self.weights),
            self.reduction,
            slower(self.update),
        )

    def with_hop(self, seconds: float) -> StageTimes:
        """The stage with time in which the host hands every micro-batch on."""
        if not seconds:
            return self
        wait = Part(0.0, 0.0, seconds)
        return replace(self, forward=self.forward + wait, backward=self.backward + wait)

    @property
    def tail(self) -> float:
        """Seconds after the pipeline's last task."""
        return self.reduction + self.update.total


class StageCost:
    """Works out the times of one stage.

    Args:
        workload: The model.
        plan: Resolved.
        costs: Times of calls.
        stage: From 0.
    """

    def __init__(self, workload: Workload, plan: Plan, costs: Costs, stage: int) -> None:
        self.workload, self.plan, self.costs, self.stage = workload, plan, costs, stage
        self.kinds = stage_kinds(workload, plan, stage)
        self.layers = len(self.kinds)
        self.train = workload.mode == "train"
        self.units = self._units()

    def times(self) -> StageTimes:
        """Compute the times of a micro-batch, the reduction and the update."""
        # Only zero-bubble schedules place gradients of weights as tasks of their own.
        split = self.plan.schedule == "zero-bubble"
        forward = [u.forward for u in self.units]
        backward = [u.backward if split else u.backward + u.weights for u in self.units[::-1]]
        weights = [u.weights for u in self.units] if split else []
        ahead, back, tail = self._passes(forward, backward)
        return StageTimes(
            forward=ahead,
            backward=back,
            weights=_sum(weights) if self.train else Part(),
            reduction=tail,
            update=self._update(forward) if self.train else Part(),
        )

    def _passes(self, forward: list[Part], backward: list[Part]) -> tuple[Part, Part, float]:
        """Time a micro-batch in the steady state, and what the last one leaves to be reduced.

        Reductions of one micro-batch (ZeRO 2 and 3) continue beside the next one, so up to three
        micro-batches are run; a backlog that still grows is extrapolated. The last backward pass
        also has the reductions that are made once per step.
        """
        # ZeRO 3 gathers parameters before every use; ZeRO 2 and 3 scatter the gradients of every
        # micro-batch, in the order in which the backward pass makes them.
        gathers = self._each(gather_calls) if self.plan.stage >= 3 else []
        scatters = self._each(scatter_calls)[::-1] if self.plan.stage >= 2 and self.train else []
        ahead, back = _sum(forward), _sum(backward) if self.train else Part()
        once = self._once()[::-1] if self.train else []
        if not self.plan.overlap:
            sent = sum(gathers)
            more = Part(0.0, (sent + sum(scatters)) if self.train else 0.0)
            return ahead + Part(0.0, sent), back + more, sum(once)
        up = Pass([p.total for p in forward], gathers)
        if not self.train:
            wait = run_passes([up]).total - ahead.computing
            return ahead.waiting(self._slowed(wait, gathers, forward)), Part(), 0.0
        down = Pass([p.total for p in backward], gathers[::-1], scatters)
        # Three: the first has no backlog, the second meets it, the third shows whether it grows.
        count = min(self.plan.microbatches, 3)
        steady = run_passes([up, down] * count)
        both = [a + b for a, b in zip(scatters or [0.0] * len(once), once, strict=True)]
        last = run_passes([*[up, down] * (count - 1), up, down._replace(scatter=both)])
        # Ends of the previous backward, the last forward and the last backward pass: their
        # differences are the passes of the steady state.
        ends = (0.0, *steady.ends)[-3:]
        # Backlog of reductions after the last backward pass, and by how much it grew since the one
        # before; the micro-batches that were not run add as much each.
        left = steady.total - steady.ends[-1]
        fewer = run_passes([up, down] * max(1, count - 1))
        piled = max(0.0, left - (fewer.total - fewer.ends[-1])) * (self.plan.microbatches - count)
        waits = (ends[1] - ends[0] - ahead.computing, ends[2] - ends[1] - back.computing)
        tail = max(0.0, last.total - ends[2]) + piled
        return (
            ahead.waiting(self._slowed(waits[0], gathers, forward)),
            back.waiting(self._slowed(waits[1], [*gathers, *scatters], backward)),
            self._slowed(tail, once, []),
        )

    def _slowed(self, wait: float, sent: Sequence[float], run: Sequence[Part]) -> float:
        """Return a pass's exposed time, with what hidden collectives take from kernels beside them.

        Args:
            wait: Time that the pass takes beyond its computation.
            sent: Collectives of parameters and gradients that run beside it.
            run: Its units, whose own collectives are exposed anyway.
        """
        # Rounding may leave a wait just below zero.
        wait = max(0.0, wait)
        # Part of the wait is the units' own exposed collectives; the rest is exposed time of
        # ``sent``. What is hidden of it occupies cores and slows the kernels beside it, for the
        # share ``contention`` of its time.
        own = sum(part.exposed for part in run)
        return wait + self.costs.contention * max(0.0, sum(sent) - max(0.0, wait - own))

    def _once(self) -> list[float]:
        """Return the seconds of each unit's reductions that are made once per step."""
        sums = self._each(replica_calls)
        # ZeRO 1 keeps whole gradients until the end of the step and scatters them then.
        if self.plan.stage == 1:
            sums = [a + b for a, b in zip(sums, self._each(scatter_calls), strict=True)]
        return sums

    def _units(self) -> list[Unit]:
        w, p = self.workload, self.plan
        table = table_held(w, p)
        known = {kind: self._layer(kind) for kind in kind_counts(w, p, self.stage)}
        units = [known[kind] for kind in self.kinds] if w.mixed else [known[w]] * self.layers
        if self.stage == 0:
            units.insert(0, self._end(embedding_ops(w, p), table))
        if self.stage == p.pp - 1:
            # A tied head has no parameters of its own to gather or reduce.
            own = Parameters(0.0) if w.tied and p.pp == 1 else table
            units.append(self._end(head_ops(w, p), own))
        return units

    def _end(self, ops: PassOps, held: Parameters) -> Unit:
        parts = [self.costs.part(c) for c in (ops.forward, ops.backward, ops.weights)]
        return Unit(parts[0], parts[1], parts[2], held)

    def _layer(self, w: Workload) -> Unit:
        p, c = self.plan, self.costs
        ops = layer_ops(w, p)
        c.prepare((*ops.forward, *ops.backward, *ops.weights))
        # Collectives of tensor and expert parallelism lie on the critical path of a layer: the next
        # operator needs their result. They are exposed in both passes alike.
        sent, swapped = c.comm(tensor_calls(w, p)), c.comm(expert_calls(w, p))
        calls = round(sum(c.times for c in (*tensor_calls(w, p), *expert_calls(w, p)) if c.needed))
        # Beside another micro-batch, as much of an exchange is hidden as a pass computes.
        left = [
            exposed(swapped, c.compute(part) if p.hide_experts else 0.0)
            for part in (ops.forward, ops.backward)
        ]
        there = sent + left[0] + self._ring(ops.forward, backward=False)
        back = sent + left[1] + self._ring(ops.backward, backward=True)
        forward = c.part(ops.forward, there, calls)
        backward = c.part(ops.backward, back, calls)
        # Full recomputation repeats the forward pass with its collectives; selective recomputation
        # only repeats operators that need none.
        if p.recompute == "full":
            backward = backward + forward
        elif p.recompute == "selective":
            backward = backward + c.part(ops.selective)
        if p.offload == "activations" and self.train:
            forward, backward = self._offloaded(w, forward), self._offloaded(w, backward)
        return Unit(forward, backward, c.part(ops.weights), layer_held(w, p))

    def _ring(self, calls: Sequence[Op], *, backward: bool) -> float:
        """Return the seconds of exchanging keys and values that attention does not hide."""
        steps = self.plan.cp
        if steps == 1:
            return 0.0
        send = self.costs.link(ring_call(self.workload, self.plan, backward=backward))
        if not self.plan.overlap:
            return (steps - 1) * send
        # The operator stands for all ``cp`` blocks (its scale); a block is hidden by one of them.
        core = self.costs.compute([c for c in calls if c.family == "attention"])
        return exposed(ring(core / steps, send, steps), core)

    def _offloaded(self, workload: Workload, part: Part) -> Part:
        moved = layer_activations(workload, self.plan) / self.costs.host_bandwidth
        hidden = part.total if self.plan.overlap else 0.0
        return part + Part(0.0, exposed(moved, hidden))

    def _each(self, calls: ParameterCalls) -> list[float]:
        """Return the seconds of some collectives of every unit."""
        # Equal layers hold equal parameters and are priced once.
        make: dict[Parameters, float] = {}
        for unit in self.units:
            if unit.held not in make:
                make[unit.held] = self.costs.comm(calls(unit.held, self.workload, self.plan))
        return [make[unit.held] for unit in self.units]

    def _update(self, forward: list[Part]) -> Part:
        w, p, c = self.workload, self.plan, self.costs
        held = stage_held(w, p, self.stage)
        own = local_parameters(held, p)
        moved = 0.0
        if p.stage in (1, 2):
            # Updated parameters are gathered for the next step, whose first forward pass may hide
            # that; the exposed rest is booked here.
            gathers = self._each(gather_calls)
            own_time = [part.total for part in forward]
            hidden = run_passes([Pass(own_time, gathers)]).total - sum(own_time)
            moved = hidden if p.overlap else sum(gathers)
        # To the host an f32 gradient per parameter, back its new weight.
        if p.offload == "optimizer":
            moved += own * (w.width + 4) / c.host_bandwidth
        moved += c.comm(tied_calls(w, p, self.stage))
        return c.part(update_ops(own, w), moved)

    def _exchanges(self) -> float:
        """Seconds of the all-to-alls of a micro-batch in one pass, all layers."""
        counts = kind_counts(self.workload, self.plan, self.stage)
        return sum(n * self.costs.comm(expert_calls(w, self.plan)) for w, n in counts.items())

    def traffic(self) -> dict[str, float]:
        """Return the seconds of all communication of a step, hidden or not, by name."""
        w, p, c, train = self.workload, self.plan, self.costs, self.train
        count, held = p.microbatches, stage_held(w, p, self.stage)
        # Forward, backward, and the forward pass once more under full recomputation.
        passes = (2.0 + (p.recompute == "full")) if train else 1.0
        both = 2.0 if train else 1.0
        seconds = {
            "tensor": passes * count * self.layers * c.comm(tensor_calls(w, p)),
            "expert": passes * count * self._exchanges(),
            "pipeline": both * count * c.link(hop_call(w, p)),
        }
        if p.cp > 1:
            # The ring of the forward pass, again where it is recomputed, and that of the backward.
            sends = (passes - 1.0 if train else 1.0) * c.link(ring_call(w, p, backward=False))
            sends += c.link(ring_call(w, p, backward=True)) if train else 0.0
            seconds["context"] = (p.cp - 1) * count * self.layers * sends
        if p.stage:
            # ZeRO 3: before every pass; ZeRO 1 and 2: once, after the update.
            gathers = both * count if p.stage >= 3 else 1.0
            seconds["gather"] = gathers * c.comm(gather_calls(held, w, p))
        if train and p.stage:
            scatters = count if p.stage >= 2 else 1
            seconds["scatter"] = scatters * c.comm(scatter_calls(held, w, p))
        if train:
            seconds["gradient"] = c.comm(replica_calls(held, w, p))
            seconds["tied"] = c.comm(tied_calls(w, p, self.stage))
        return {name: value for name, value in seconds.items() if value > 0}


def _sum(parts: Sequence[Part]) -> Part:
    total = Part()
    for part in parts:
        total = total + part
    return total
