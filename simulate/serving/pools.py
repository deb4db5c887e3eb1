"""What pools of replicas are: what one does under load, how they scale, devices that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: What a policy holds at its target: requests in flight of a replica (Ray Serve's ongoing requests,
#: Knative's concurrency), share of what it serves at most, or requests that wait in the whole pool
#: for each replica.
SCALED_BY = ("concurrency", "utilisation", "queue")
#: Places of a curve that are looked up in a step.
PLACES = 200


@dataclass(frozen=True)
class Curve:
    """What one replica does at shares of what it serves at most.

    Attributes:
        capacity: Requests a second that it serves at most.
        shares: Shares of it, increasing, shape ``(p,)``.
        in_flight: Requests that it holds at each.
        waiting: Those of them that wait for others.
        cut: Requests that an interruption cuts off.
        watts: Of its devices; zeros where power is not known.
        room: Requests that it takes beyond those that it holds at full load.
        slack: Seconds that requests may wait longer and still keep the SLO, sorted, shape
            ``(p, n)``; negative for those that do not keep it anyway.
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
        """Values of the curve at equal distances from no load to all that is served."""
        at = np.linspace(0.0, 1.0, PLACES + 1)
        known = np.interp(at, self.shares, values)
        # Below the least load that was simulated, requests are in proportion to it.
        return [float(v) for v in known * np.minimum(at / self.shares[0], 1.0)]

    def good(self, share: np.ndarray, wait: np.ndarray) -> np.ndarray:
        """Share of the requests that keep the SLO.

        Args:
            share: Of what is served at most, shape ``(n,)``.
            wait: Seconds that they wait before an engine takes them, shape ``(n,)``.
        """
        kept = [1.0 - np.searchsorted(row, wait) / len(row) for row in self.slack]
        at = np.clip(np.interp(share, self.shares, np.arange(len(self.shares))), 0, None)
        low = np.minimum(at.astype(int), len(kept) - 1)
        high = np.minimum(low + 1, len(kept) - 1)
        own, each = np.array(kept), np.arange(len(share))
        found: np.ndarray = (1.0 - at + low) * own[low, each] + (at - low) * own[high, each]
        return found

    def within(self, asked: float) -> float:
        """Most requests a second of which a share keeps the SLO; 0 if it never does."""
        at = np.linspace(self.shares[0], 1.0, PLACES + 1)
        kept = self.good(at, np.zeros(len(at))) >= asked
        return self.capacity * float(at[kept].max()) if kept.any() else 0.0


@dataclass(frozen=True)
class Scaling:
    """A policy, as of Ray Serve: a wish that lasts for a delay is granted.

    Attributes:
        metric: One of :data:`SCALED_BY`.
        target: Its value for each replica.
        up_s: Seconds that more replicas are wished for before they start.
        down_s: The same of fewer.
    """

    metric: str = "utilisation"
    target: float = 0.7
    up_s: float = 30.0
    down_s: float = 600.0


@dataclass(frozen=True)
class Spot:
    """Interruptions of one replica.

    Attributes:
        rate_per_h: In an hour.
        notice_s: Seconds before the devices are gone, in which no new request is taken.
        replacement_s: Until other devices are there.
    """

    rate_per_h: float
    notice_s: float = 0.0
    replacement_s: float = 0.0


@dataclass(frozen=True)
class Pool:
    """Equal replicas of one model.

    Attributes:
        model: Position of the model that it serves.
        warm: What a replica does.
        cold: The same until its cache of prompts is filled; ``None`` without one.
        least: Fewest replicas.
        most: Most of them.
        initial: Those at the beginning, warm.
        scaling: Policy.
        provision_s: Until devices are there.
        start_s: Until a replica on them serves: weights, and the engine's start.
        warm_s: After that, until its cache is filled.
        devices: Of a replica.
        kind: Of devices.
        spot: Interruptions, if any.
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
    """Devices that pools share, by kind, in nodes: a replica of one node's devices stays in one.

    Args:
        counts: Devices of each kind.
        of_node: Devices of a node of each kind.
    """

    def __init__(self, counts: Mapping[str, int], of_node: Mapping[str, int]) -> None:
        self.of_node = of_node
        self.free: dict[str, list[int]] = {}
        for kind, count in counts.items():
            each = of_node[kind]
            rest = [count % each] if count % each else []
            self.free[kind] = [each] * (count // each) + rest

    def take(self, kind: str, devices: int) -> list[tuple[int, int]] | None:
        """Nodes for a replica and what it takes of each; ``None`` where they do not suffice."""
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
            # The fullest node that has room, so that whole ones stay whole.
            found.append((min(fits)[1], part))
        for at, taken in found:
            free[at] -= taken
        return found

    def give(self, kind: str, places: Sequence[tuple[int, int]]) -> None:
        """Devices of a replica that ends."""
        for at, taken in places:
            self.free[kind][at] += taken
