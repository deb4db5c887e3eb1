"""Collectives that a device takes part in, and what prices them and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...features.operators.op import Op
from .plan import Group


@dataclass(frozen=True, slots=True)
class CommCall:
    """One collective that a device takes part in.

    Attributes:
        name: Its purpose, such as ``tensor``.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``alltoall`` or ``send_recv``.
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
