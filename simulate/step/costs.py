"""Costs of operators and collectives: interfaces of the models, and predicted times, cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import HOST_BANDWIDTH
from ...features.operators.op import Op
from .plan import Group


@dataclass(frozen=True, slots=True)
class CommCall:
    """One collective in which a device takes part.

    Attributes:
        name: Purpose, such as ``tensor``.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``alltoall``, or ``send_recv``
            from each device to its neighbour in the group.
        size: Bytes as counted by nccl-tests: the buffer of an all-reduce or transfer, the full
            buffer of a gather or scatter, one device's send buffer of an all-to-all.
        group: Participating devices.
        times: Number of executions.
        copies: Experts per token, for an all-to-all that sends tokens to experts.
        boxes: Maximum number of boxes that hold these experts; 0 for no limit.
    """

    name: str
    kind: str
    size: float
    group: Group
    times: float = 1.0
    copies: int = 1
    boxes: int = 0

    def across(self, box: int) -> float:
        """Fraction of the bytes that cross boxes if each box receives a token only once.

        Dispatchers send a token once to every box that needs it and copy it inside (DeepSeek-V3
        2024, section 3.2.2). ``copies`` draws from ``b`` boxes hit ``b (1 - (1 - 1/b)^copies)`` of
        them; with box-limited routing ``b`` is the limit (section 2.1.2).

        Args:
            box: Devices per box.
        """
        boxes = -(-self.group.size * self.group.stride // box)
        if self.copies <= 1 or boxes <= 1:
            return 1.0
        drawn = min(boxes, self.boxes or boxes)
        return drawn * (1.0 - (1.0 - 1.0 / drawn) ** self.copies) / self.copies

    @property
    def needed(self) -> bool:
        """Whether any bytes are sent."""
        return self.group.size > 1 and self.size > 0 and self.times > 0


@dataclass(frozen=True)
class Message:
    """Collectives of the same purpose, kind and group, with their time.

    Attributes:
        name: Purpose, as in :class:`CommCall`.
        kind: Kind, as there.
        group: Participating devices.
        size: Total bytes, counted as there.
        seconds: Total predicted time.
    """

    name: str
    kind: str
    group: Group
    size: float
    seconds: float


class OpLatency(Protocol):
    """Latency model of operators on the target device."""

    def __call__(self, calls: Sequence[Op]) -> np.ndarray:
        """Seconds and the bounds of the interval, shape ``(n, 3)``."""


class Network(Protocol):
    """Latency model of collectives in the target cluster."""

    def __call__(self, kind: str, size: float, group: Group) -> Interval:
        """Time of one collective; ``size`` as in :class:`CommCall`."""


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step.

    Attributes:
        compute: Computation.
        exposed: Communication that is not hidden behind computation.
        host: Stalls because the host launches kernels more slowly than they run.
    """

    compute: float = 0.0
    exposed: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.compute + self.exposed + self.host

    @property
    def computing(self) -> float:
        """Computation including launches, behind which communication may hide."""
        return self.compute + self.host

    def waiting(self, exposed: float) -> Part:
        """Copy with a different exposed communication."""
        return replace(self, exposed=exposed)

    def __add__(self, other: Part) -> Part:
        """Sum of two parts."""
        return Part(
            self.compute + other.compute, self.exposed + other.exposed, self.host + other.host
        )

    def times(self, factor: float) -> Part:
        """Multiply all three."""
        return Part(self.compute * factor, self.exposed * factor, self.host * factor)


#: A part that takes no time.
NOTHING = Part()


@dataclass(frozen=True)
class StepEffects:
    """Costs of a step beyond its operators and collectives in isolation.

    Factors multiply the time of a class of calls; 1 and 0 have no effect.

    Attributes:
        product: Factor on matrix products.
        attention: Factor on attention.
        experts: Factor on grouped products of experts.
        memory: Factor on memory-bound operators.
        inside: Factor on collectives within a box.
        between: Factor on collectives across boxes.
        launch_s: Seconds for the host to launch one kernel; 0 with a captured graph.
        collective_s: Seconds for the host to prepare a collective of activations.
        hop_s: Seconds to hand a micro-batch to the next stage, in addition to its transfer.
        decomposed: Fraction of the time of products behind which tensor-parallel collectives of
            their operands and results are pipelined in pieces; 0 for no overlap.
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
    decomposed: float = 0.0

    def of(self, call: Op) -> float:
        """Factor of an operator."""
        return float(getattr(self, call.kind))


class Costs:
    """Predicted times of operators and collectives.

    Args:
        latency: Latency model of operators.
        network: Latency model of collectives.
        host_bandwidth: Bytes/s between device and host, for offloading.
        contention: Fraction of its time by which a collective slows concurrent kernels, 0 to 1.
        effects: Costs of a step beyond its calls.
        box: Devices per box; collectives that span more leave the box. 0 for a single box.
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
        self.links: dict[tuple[str, float, Group], Interval] = {}

    def with_effects(self, effects: StepEffects, box: int) -> Costs:
        """Costs under other effects, which share the predictions made so far."""
        other = copy(self)
        other.effects, other.box = effects, box
        return other

    def at_bound(self, side: int) -> Costs:
        """Costs with collectives in a box at a bound of their intervals.

        Args:
            side: Position of the bound in an :class:`Interval`.
        """

        def network(kind: str, size: float, group: Group) -> Interval:
            found = self.estimate(kind, size, group)
            return found if self.leaves_box(group) else found._replace(value=found[side])

        other = copy(self)
        other._network, other.links = network, {}
        return other

    def prepare(self, calls: Iterable[Op]) -> None:
        """Predict all new operators in one batch."""
        # ``dict.fromkeys`` drops duplicates but keeps the order, so that results are reproducible.
        new = [c for c in dict.fromkeys(calls) if c not in self.ops]
        if new:
            self.ops.update(zip(new, self._latency(new), strict=True))

    def compute(self, calls: Sequence[Op]) -> float:
        """Seconds of operators that run one after another."""
        self.prepare(calls)
        return float(sum(self.ops[c][0] * self.effects.of(c) for c in calls))

    def part(self, calls: Sequence[Op], exposed: float = 0.0, collectives: int = 0) -> Part:
        """Time of consecutive operators, including host stalls.

        Launches are asynchronous, so the host's time counts only where it exceeds the device's.

        Args:
            calls: Operators.
            exposed: Seconds of communication among them.
            collectives: Number of these collectives.
        """
        compute = self.compute(calls)
        own = self.effects
        launching = sum(c.launches for c in calls) * own.launch_s + collectives * own.collective_s
        host = max(0.0, launching - compute - exposed)
        return Part(compute, exposed, host)

    def link(self, call: CommCall) -> float:
        """Seconds of all executions of a collective."""
        if not call.needed:
            return 0.0
        group = call.group._replace(size=2) if call.kind == "send_recv" else call.group
        outside = self.leaves_box(group)
        factor = self.effects.between if outside else self.effects.inside
        size = call.size * (call.across(self.box) if outside else 1.0)
        return self.estimate(call.kind, size, group).value * call.times * factor

    def leaves_box(self, group: Group) -> bool:
        """Whether the ranks of a group span more than one box."""
        # Judged by the group that starts at rank 0: the two ends of a pipeline may share a box
        # although twice their distance exceeds it.
        return bool(self.box) and (group.size - 1) * group.stride >= self.box

    def estimate(self, kind: str, size: float, group: Group) -> Interval:
        """Time of one collective with its interval, cached."""
        key = (kind, size, group)
        if key not in self.links:
            self.links[key] = self._network(kind, size, group)
        return self.links[key]

    def comm(self, calls: Iterable[CommCall]) -> float:
        """Seconds of collectives that run one after another."""
        return sum(self.link(call) for call in calls)

    def messages(self, calls: Iterable[CommCall]) -> tuple[Message, ...]:
        """Collectives with their times, without those that send nothing."""
        return tuple(
            Message(c.name, c.kind, c.group, c.size * c.times, self.link(c))
            for c in calls
            if c.needed
        )
