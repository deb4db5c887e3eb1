"""Times of calls, each asked for once; and the two parts that a time has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .calls import CommCall, Estimate, Network, OpCall, OpLatency
from .plan import Group


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step.

    Attributes:
        compute: Computation.
        exposed: Communication that computation does not hide.
    """

    compute: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.exposed

    def __add__(self, other: Part) -> Part:
        """Sum of both parts."""
        return Part(self.compute + other.compute, self.exposed + other.exposed)

    def times(self, factor: float) -> Part:
        """Both parts multiplied."""
        return Part(self.compute * factor, self.exposed * factor)


class Costs:
    """Times of operators and collectives.

    Args:
        latency: Of operators.
        network: Of collectives.
        host_bandwidth: Bytes/s between device and host, for offloading.
        contention: Share of a device that a collective takes from what runs beside it, 0 to 1.
    """

    def __init__(
        self,
        latency: OpLatency,
        network: Network,
        host_bandwidth: float = 32e9,
        contention: float = 0.0,
    ) -> None:
        self._latency = latency
        self._network = network
        self.host_bandwidth = host_bandwidth
        self.contention = contention
        self.ops: dict[OpCall, np.ndarray] = {}
        self.links: dict[tuple[str, float, Group], Estimate] = {}

    def prepare(self, calls: Iterable[OpCall]) -> None:
        """Ask for all operators at once."""
        new = [c for c in dict.fromkeys(calls) if c not in self.ops]
        if new:
            self.ops.update(zip(new, self._latency(new), strict=True))

    def compute(self, calls: Sequence[OpCall]) -> float:
        """Seconds of operators one after the other."""
        self.prepare(calls)
        return float(sum(self.ops[c][0] for c in calls))

    def link(self, call: CommCall) -> float:
        """Seconds of a collective, all its executions."""
        if not call.needed:
            return 0.0
        key = (call.kind, call.size, call.group)
        if key not in self.links:
            self.links[key] = self._network(call.kind, call.size, call.group)
        return self.links[key].seconds * call.times

    def comm(self, calls: Iterable[CommCall]) -> float:
        """Seconds of collectives one after the other."""
        return sum(self.link(call) for call in calls)
