"""Times of calls, each predicted once, and their split into computation and communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...features.devices.device import HOST_BANDWIDTH
from ...features.operators.op import Op
from .calls import CommCall, Estimate, Network, OpLatency
from .plan import Group


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step.

    Attributes:
        compute: Computation.
        exposed: Communication that computation does not hide.
        host: Waiting for the host, which launches kernels more slowly than they run.
    """

    compute: float = 0.0
    exposed: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.exposed + self.host

    @property
    def computing(self) -> float:
        """Computation, launches included: what communication may hide behind."""
        return self.compute + self.host

    def waiting(self, exposed: float) -> Part:
        """The part with other exposed communication."""
        return replace(self, exposed=exposed)

    def __add__(self, other: Part) -> Part:
        """Sum of the parts."""
        return Part(
            self.compute + other.compute, self.exposed + other.exposed, self.host + other.host
        )

    def times(self, factor: float) -> Part:
        """All parts multiplied."""
        return Part(self.compute * factor, self.exposed * factor, self.host * factor)


@dataclass(frozen=True)
class StepEffects:
    """What a step costs beyond its operators and collectives taken alone.

    Factors multiply the time of a class of calls; 1 and 0 leave everything as it is.

    Attributes:
        product: Of matrix products.
        attention: Of attention.
        experts: Of grouped products of experts.
        memory: Of passes over memory.
        inside: Of collectives within a box.
        between: Of collectives that leave it.
        launch_s: Seconds in which the host launches one kernel; 0 where a graph is replayed.
        collective_s: Seconds in which the host prepares a collective of activations.
        hop_s: Seconds that handing a micro-batch to the next stage takes beside its transfer.
    """

    product: float = 1.0
    attention: float = 1.0
    experts: float = 1.0
    memory: float = 1.0
    inside: float = 1.0
    between: float = 1.0
    launch_s: float = 0.0
    collective_s: float = 0.0
    hop_s: float = 0.0

    def of(self, call: Op) -> float:
        """Factor of an operator."""
        return float(getattr(self, call.kind))


class Costs:
    """Times of operators and collectives.

    Args:
        latency: Of operators.
        network: Of collectives.
        host_bandwidth: Bytes/s between device and host, for offloading.
        contention: Share of a device that a collective takes from what runs beside it, 0 to 1.
        effects: What a step costs beyond its calls.
        box: Devices of a box; collectives whose ranks span more leave it. 0 for one box.
    """

    def __init__(
        self,
        latency: OpLatency,
        network: Network,
        host_bandwidth: float = HOST_BANDWIDTH,
        contention: float = 0.0,
        effects: StepEffects | None = None,
        box: int = 0,
    ) -> None:
        self._latency = latency
        self._network = network
        self.host_bandwidth = host_bandwidth
        self.contention = contention
        self.effects = effects or StepEffects()
        self.box = box
        self.ops: dict[Op, np.ndarray] = {}
        self.links: dict[tuple[str, float, Group], Estimate] = {}

    def with_effects(self, effects: StepEffects, box: int) -> Costs:
        """Costs under other effects, with the times that are known already."""
        other = Costs(
            self._latency, self._network, self.host_bandwidth, self.contention, effects, box
        )
        other.ops, other.links = self.ops, self.links
        return other

    def prepare(self, calls: Iterable[Op]) -> None:
        """Predict all new operators in one batch."""
        # ``dict.fromkeys`` drops duplicates but keeps the order, so that results are reproducible.
        new = [c for c in dict.fromkeys(calls) if c not in self.ops]
        if new:
            self.ops.update(zip(new, self._latency(new), strict=True))

    def compute(self, calls: Sequence[Op]) -> float:
        """Return the seconds of operators that run one after another."""
        self.prepare(calls)
        return float(sum(self.ops[c][0] * self.effects.of(c) for c in calls))

    def part(self, calls: Sequence[Op], exposed: float = 0.0, collectives: int = 0) -> Part:
        """Operators one after the other, and what the host takes longer to launch them.

        Launches are asynchronous, so the host's time counts only where it is the longer one.

        Args:
            calls: Operators.
            exposed: Seconds of communication among them.
            collectives: How many collectives that is.
        """
        compute = self.compute(calls)
        own = self.effects
        launching = sum(c.launches for c in calls) * own.launch_s + collectives * own.collective_s
        host = max(0.0, launching - compute - exposed)
        return Part(compute, exposed, host)

    def link(self, call: CommCall) -> float:
        """Return the seconds of a collective, all its executions."""
        if not call.needed:
            return 0.0
        outside = self.leaves_box(call.group)
        factor = self.effects.between if outside else self.effects.inside
        if outside:
            call = replace(call, size=call.size * call.across(self.box))
        return self.estimate(call.kind, call.size, call.group).seconds * call.times * factor

    def leaves_box(self, group: Group) -> bool:
        """Whether the ranks of a group span more than a box."""
        # By the last rank of the group that begins at rank 0: the ends of a pipeline may lie in one
        # box although twice their distance exceeds it.
        return bool(self.box) and (group.size - 1) * group.stride >= self.box

    def estimate(self, kind: str, size: float, group: Group) -> Estimate:
        """One collective with its interval, asked for once."""
        key = (kind, size, group)
        if key not in self.links:
            self.links[key] = self._network(kind, size, group)
        return self.links[key]

    def comm(self, calls: Iterable[CommCall]) -> float:
        """Return the seconds of collectives that run one after another."""
        return sum(self.link(call) for call in calls)
