"""What prices operators and collectives, and times of calls, each predicted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ...features.devices.device import HOST_BANDWIDTH
from ...features.operators.op import Op
from .plan import Group


@dataclass(frozen=True, slots=True)
class CommCall:
    """One collective that a device takes part in.

    Attributes:
        name: Its purpose, such as ``tensor``.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``alltoall``, or ``send_recv``
            from each device to its neighbour in the group.
        size: Bytes as nccl-tests counts them: the buffer of an all-reduce or transfer, the full
            buffer of a gather or scatter, one device's send buffer of an all-to-all.
        group: Devices that take part.
        times: How often.
        copies: Of an all-to-all that sends each token to several experts: to how many.
        boxes: Most boxes that these lie in; 0 for any number.
    """

    name: str
    kind: str
    size: float
    group: Group
    times: float = 1.0
    copies: int = 1
    boxes: int = 0

    def across(self, box: int) -> float:
        """Share of the bytes that cross from box to box where a box gets each token once.

        Dispatchers send a token once to every box that needs it and copy it inside (DeepSeek-V3
        2024, section 3.2.2). ``copies`` drawn from ``b`` boxes meet ``b (1 - (1 - 1/b)^copies)`` of
        them, and routing limited to some boxes draws from these alone (section 2.1.2).

        Args:
            box: Devices of a box.
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
    """Collectives of one purpose, kind and group with their time.

    Attributes:
        name: Purpose, as of a :class:`CommCall`.
        kind: As there.
        group: Devices that take part.
        size: Bytes of all of them, counted as there.
        seconds: Predicted time of all of them.
    """

    name: str
    kind: str
    group: Group
    size: float
    seconds: float


class Estimate(NamedTuple):
    """Seconds, with both ends of a 90 % interval."""

    seconds: float
    lo: float
    hi: float

    def times(self, factor: float) -> Estimate:
        """Return the estimate with all three values multiplied."""
        return Estimate(self.seconds * factor, self.lo * factor, self.hi * factor)


class OpLatency(Protocol):
    """Latencies of operators on the device of interest."""

    def __call__(self, calls: Sequence[Op]) -> np.ndarray:
        """Seconds and both ends of the interval, shape ``(n, 3)``."""


class Network(Protocol):
    """Latencies of collectives in the cluster of interest."""

    def __call__(self, kind: str, size: float, group: Group) -> Estimate:
        """Time of one collective; ``size`` as in :class:`CommCall`."""


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


#: Of what does not run.
NOTHING = Part()


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
        decomposed: Share of the time of products beside which the collectives of tensor parallelism
            run that feed or collect them, in pieces; 0 where one waits for the other.
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
        group = call.group._replace(size=2) if call.kind == "send_recv" else call.group
        outside = self.leaves_box(group)
        factor = self.effects.between if outside else self.effects.inside
        size = call.size * (call.across(self.box) if outside else 1.0)
        return self.estimate(call.kind, size, group).seconds * call.times * factor

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

    def messages(self, calls: Iterable[CommCall]) -> tuple[Message, ...]:
        """Collectives with their times; those that send nothing are left out."""
        return tuple(
            Message(c.name, c.kind, c.group, c.size * c.times, self.link(c))
            for c in calls
            if c.needed
        )
