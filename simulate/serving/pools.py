"""Replica pools: behaviour of a replica under load, autoscaling policies, and shared devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Autoscaling metrics: requests in flight per replica (Ray Serve's ongoing requests, Knative's
#: concurrency), utilisation as a fraction of capacity, or waiting requests of the pool per replica.
SCALED_BY = ("concurrency", "utilisation", "queue")
#: Intervals of the lookup table of a curve.
PLACES = 200


@dataclass(frozen=True)
class Curve:
    """Behaviour of one replica as a function of its utilisation.

    Attributes:
        capacity: Maximum throughput in requests per second.
        shares: Simulated utilisations (fractions of the capacity), increasing, shape ``(p,)``.
        in_flight: Requests in flight at each, shape ``(p,)``.
        waiting: Those of them that wait for others, shape ``(p,)``.
        cut: Requests that an interruption cuts off, shape ``(p,)``.
        watts: Power of the devices, shape ``(p,)``; zeros if unknown.
        slack: Additional wait in seconds with which each request still meets the SLO, sorted, shape
            ``(p, n)``; negative for requests that miss it anyway.
        room: Requests accepted beyond those in flight at full load.
    """

    capacity: float
    shares: np.ndarray
    in_flight: np.ndarray
    waiting: np.ndarray
    cut: np.ndarray
    watts: np.ndarray
    slack: np.ndarray
    room: float = 0.0

    def table(self, values: np.ndarray) -> list[float]:
        """Lookup table of the curve over ``PLACES + 1`` equidistant utilisations from 0 to 1."""
        at = np.linspace(0.0, 1.0, PLACES + 1)
        known = np.interp(at, self.shares, values)
        # Below the lowest simulated load, quantities are proportional to it.
        return [float(v) for v in known * np.minimum(at / self.shares[0], 1.0)]

    def good(self, share: np.ndarray, wait: np.ndarray) -> np.ndarray:
        """Fraction of the requests that meet the SLO, shape ``(n,)``.

        Args:
            share: Utilisations, shape ``(n,)``.
            wait: Seconds of waiting before an engine accepts the requests, shape ``(n,)``.
        """
        kept = [1.0 - np.searchsorted(row, wait) / len(row) for row in self.slack]
        at = np.clip(np.interp(share, self.shares, np.arange(len(self.shares))), 0, None)
        low = np.minimum(at.astype(int), len(kept) - 1)
        high = np.minimum(low + 1, len(kept) - 1)
        own, each = np.array(kept), np.arange(len(share))
        found: np.ndarray = (1.0 - at + low) * own[low, each] + (at - low) * own[high, each]
        return found

    def within(self, asked: float) -> float:
        """Highest rate in requests per second at which a fraction ``asked`` meets the SLO, or 0."""
        at = np.linspace(self.shares[0], 1.0, PLACES + 1)
        kept = self.good(at, np.zeros(len(at))) >= asked
        return self.capacity * float(at[kept].max()) if kept.any() else 0.0


@dataclass(frozen=True)
class Scaling:
    """Autoscaling policy as in Ray Serve: a change is made once it was wanted for some time.

    Attributes:
        metric: One of :data:`SCALED_BY`.
        target: Target of the metric per replica.
        up_s: Seconds for which more replicas must be wanted before they start.
        down_s: Seconds for which fewer must be wanted before replicas stop.
    """

    metric: str = "utilisation"
    target: float = 0.7
    up_s: float = 30.0
    down_s: float = 600.0


@dataclass(frozen=True)
class Spot:
    """Spot interruptions of one replica.

    Attributes:
        rate_per_h: Interruptions per hour.
        notice_s: Seconds of notice, during which the replica accepts no new requests.
        replacement_s: Seconds until replacement devices are available.
    """

    rate_per_h: float
    notice_s: float = 0.0
    replacement_s: float = 0.0


@dataclass(frozen=True)
class Pool:
    """Identical replicas of one model.

    Attributes:
        model: Index of the served model.
        warm: Behaviour of a replica.
        cold: Behaviour until its prefix cache is filled; ``None`` without a prefix cache.
        least: Minimum number of replicas.
        most: Maximum number of replicas.
        initial: Warm replicas at the start.
        scaling: Autoscaling policy.
        provision_s: Seconds until devices are available.
        start_s: Seconds from there until the replica serves (weights loaded, engine started).
        warm_s: Seconds from there until its prefix cache is filled.
        devices: Devices per replica.
        kind: Kind of its devices.
        spot: Interruptions; ``None`` for none.
    """

    model: int
    warm: Curve
    cold: Curve | None
    least: int
    most: int
    initial: int
    scaling: Scaling
    provision_s: float
    start_s: float
    warm_s: float
    devices: int
    kind: str
    spot: Spot | None = None


class Nodes:
    """Devices shared by pools, in nodes of each kind; a replica that fits one node stays in it.

    Args:
        counts: Number of devices of each kind.
        of_node: Devices per node of each kind.
    """

    def __init__(self, counts: Mapping[str, int], of_node: Mapping[str, int]) -> None:
        self.of_node = of_node
        self.free: dict[str, list[int]] = {}
        for kind, count in counts.items():
            each = of_node[kind]
            rest = [count % each] if count % each else []
            self.free[kind] = [each] * (count // each) + rest

    def take(self, kind: str, devices: int) -> list[tuple[int, int]] | None:
        """Allocate a replica: nodes and devices taken from each; ``None`` if they lack room."""
        free = self.free.get(kind)
        if free is None:
            return []
        each = self.of_node[kind]
        whole, part = divmod(devices, each)
        found = [(at, each) for at, left in enumerate(free) if left == each][:whole]
        if len(found) < whole:
            return None
        if part:
            used = {at for at, _ in found}
            fits = [(left, at) for at, left in enumerate(free) if left >= part and at not in used]
            if not fits:
                return None
            # The fullest node with room, so that whole nodes stay free.
            found.append((min(fits)[1], part))
        for at, taken in found:
            free[at] -= taken
        return found

    def give(self, kind: str, places: Sequence[tuple[int, int]]) -> None:
        """Release the devices of a replica."""
        for at, taken in places:
            self.free[kind][at] += taken
