"""Reuse distances of tensors: what the kernels of a PyTorch program find in the cache.

The reuse distance of a tensor decides whether a cache still holds it. Operator tables repeat a
kernel on the same tensors, so the last cache serves all traffic of a small one. In a program, a
kernel finds there what others touched just before. A read hits if less than the cache size was
moved since the last use. A write never reaches memory if its last reader follows as soon, since
PyTorch's allocator gives the block to the next tensor.

The distance between two uses is the traffic of the kernels between them (Mattson et al., IBM
Systems Journal 9, 1970, with bytes for pages, each counted as often as it is moved) plus twice the
tensor itself, or its list if the kernels go over lists: while one byte waits, the rest is written
or read, with about as much other traffic. Other traffic of these two kernels is left out, so that
fusion never lengthens a distance. Programs run repeatedly: memory that outlives one was last
touched in the run before.

Random indices that select a row again find it in the cache as often as the cache holds the table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from ...features.operators.physics import resident_share


class Use(NamedTuple):
    """Traffic of a kernel to one piece of memory.

    Attributes:
        memory: Number of the memory.
        bytes: Bytes read or written; 0 if the amount is unknown.
        written: Whether the bytes are written.
        start: Position of the first byte in the memory.
        again: Bytes that random indices select once more (:func:`looked_up_again`).
        between: Bytes that lie between two such selections, or all of a list's tensors.
    """

    memory: int
    bytes: float
    written: bool
    start: float = 0.0
    again: float = 0.0
    between: float = 0.0

    def covers(self, other: Use) -> bool:
        """Return whether another use of the same memory is of a part of this one, if known."""
        end, last = self.start + self.bytes, other.start + other.bytes
        return not self.bytes or (self.start <= other.start and last <= end)


class Stream(NamedTuple):
    """Bytes of a kernel with their reuse distance.

    Attributes:
        bytes: Traffic.
        distance: Bytes moved since the previous use (reads) or until the last use (writes).
        again: Whether random indices select them once more, beyond the kernel's traffic; the
            distance is the size of the table.
    """

    bytes: float
    distance: float
    again: bool = False

    def held(self, cache: float) -> float:
        """Return the share that is in a cache of some bytes."""
        if self.again:
            return min(cache / max(self.distance, 1.0), 1.0)
        # The fitted hit rate of the tables' own passes (features/operators/pointwise.py).
        return float(resident_share(np.array(self.distance), np.array(max(cache, 1.0)), 1.1, 0.5))


def streams(
    uses: Sequence[Sequence[Use]], moved: Sequence[float], kept: Collection[int]
) -> list[tuple[Stream, ...]]:
    """Compute the reuse distances of each kernel's traffic.

    Args:
        uses: Memory uses of ``n`` kernels, in order.
        moved: Traffic of each kernel in bytes.
        kept: Memory that outlives the program.

    Returns:
        Streams of each kernel, whose bytes add up to its traffic; none if unknown. Bytes that are
        selected again follow.
    """
    starts = [0.0, *accumulate(moved)]
    total = starts[-1]
    # The last kernel that touches each memory, and the latest one so far.
    last = {use.memory: i for i, own in enumerate(uses) for use in own}
    before: dict[int, list[tuple[int, Use]]] = {}
    found = []
    for i, (own, size) in enumerate(zip(uses, moved, strict=True)):
        # Scaled to the kernel's traffic: a norm may read a tensor twice, a look-up only a part.
        whole = sum(use.bytes for use in own)
        scale = size / whole if whole else 0.0
        parts = []
        for use in own:
            end, earlier = last[use.memory], before.get(use.memory, [])
            known = next((at for at, one in reversed(earlier) if one.covers(use)), None)
            if known is None and any(one.written for _, one in earlier):
                # Written in parts.
                known = earlier[-1][0]
            if use.written:
                gone = use.memory not in kept and end > i
                far = starts[end] - starts[i + 1] if gone else total
            elif known is None:
                # Last touched in the previous run.
                far = starts[i] + total - starts[end + 1]
            else:
                far = starts[i] - starts[known + 1]
            if use.bytes:
                alike = max(use.bytes, use.between)
                parts.append(Stream(use.bytes * scale, max(far, 0.0) + 2.0 * alike))
        again = [Stream(use.again, use.between, again=True) for use in own if use.again]
        if again and not parts:
            parts.append(Stream(size, inf))
        found.append((*parts, *again))
        for use in own:
            before.setdefault(use.memory, []).append((i, use))
    return found


@dataclass(frozen=True)
class Rates:
    """Seconds of an empty pass, and per byte from the last cache and from main memory."""

    launch: float
    cache: float
    main: float

    def seconds(self, parts: Sequence[Stream], capacity: float) -> float:
        """Return the seconds of a pass with some streams, for a cache of some bytes."""
        # What is selected again is read from the cache while other bytes come from main memory.
        far = 0.0
        for part in parts:
            held = part.held(capacity)
            far += part.bytes * ((1.0 - held) * self.main + held * self.cache * (not part.again))
        return self.launch + max(far, self.cache * sum(s.bytes for s in parts))
