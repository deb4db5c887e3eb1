"""Times of calls, each predicted once, and their split into computation and communication."""

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
        compute: Time spent in operators.
        exposed: Time in communication that no computation hides.
    """

    compute: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.compute + self.exposed

    def __add__(self, other: Part) -> Part:
        """Sum of both parts."""
        return Part(self.compute + other.compute, self.exposed + other.exposed)

    def times(self, factor: float) -> Part:
        """Return the part with both times multiplied."""
        return Part(self.compute * factor, self.exposed * factor)


class Costs:
    """Times of operators and collectives.

    Args:
        latency: Predicts operators.
        network: Predicts collectives.
        host_bandwidth: Bytes/s between device and host, for offloading; by default the nominal rate
            of PCI Express 4.0 x16 in one direction.
        contention: Share of a device, 0 to 1, that a collective takes from the kernels beside it.
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
        """Predict all new operators in one batch."""
        # ``dict.fromkeys`` drops duplicates but keeps the order, so that results are reproducible.
        new = [c for c in dict.fromkeys(calls) if c not in self.ops]
        if new:
            self.ops.update(zip(new, self._latency(new), strict=True))

    def compute(self, calls: Sequence[OpCall]) -> float:
        """Return the seconds of operators that run one after another."""
        self.prepare(calls)
        return float(sum(self.ops[c][0] for c in calls))

    def link(self, call: CommCall) -> float:
        """Return the seconds of a collective, all its executions."""
        if not call.needed:
            return 0.0
        # Keyed without the name: equal collectives of different purposes take the same time.
        key = (call.kind, call.size, call.group)
        if key not in self.links:
            self.links[key] = self._network(call.kind, call.size, call.group)
        return self.links[key].seconds * call.times

    def comm(self, calls: Iterable[CommCall]) -> float:
        """Return the seconds of collectives that run one after another."""
        return sum(self.link(call) for call in calls)
