"""How far apart the uses of a tensor lie, which decides whether a cache still has it.

Tables of operators time a kernel again and again on the same tensors, so that all of a small one's
traffic is served by the last cache. In a program a kernel finds there what others touched just
before it, however small it is itself. What it reads is there if less than the cache was moved
since; what it writes never reaches memory if its last reader comes as soon, since PyTorch's
allocator gives its block to the next tensor.

The distance between two uses is what kernels between them move (Mattson et al., IBM Systems Journal
9, 1970, with bytes for pages, each counted as often as it is moved), and twice the tensor itself:
while one byte of it waits, another kernel writes or reads the rest, and moves about as much beside
it. What else these two kernels move is left out, so that to fuse kernels never lengthens a
distance. Programs run one after the other: what outlives one was last touched in the run before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple


class Use(NamedTuple):
    """Traffic of a kernel to one memory.

    Attributes:
        memory: Its number.
        bytes: Bytes read or written; 0 if only that it is touched is known.
        written: Whether they are written.
    """

    memory: int
    bytes: float
    written: bool


class Stream(NamedTuple):
    """Bytes of a kernel, and how far the other use of them lies.

    Attributes:
        bytes: Traffic.
        distance: Of reads to the use before, of writes to the last one, bytes.
    """

    bytes: float
    distance: float


def streams(
    uses: Sequence[Sequence[Use]], moved: Sequence[float], kept: Collection[int]
) -> list[tuple[Stream, ...]]:
    """Say how far the uses of each kernel's tensors lie from one another.

    Args:
        uses: Of ``n`` kernels, in order.
        moved: Traffic of each, bytes.
        kept: Memory that outlives the program.

    Returns:
        Streams of each kernel, whose bytes add up to its traffic; none where they are not known.
    """
    starts = [0.0, *accumulate(moved)]
    total = starts[-1]
    # Of each memory the kernel that touches it last, and the one that touched it last so far.
    last = {use.memory: i for i, own in enumerate(uses) for use in own}
    before: dict[int, int] = {}
    found = []
    for i, (own, size) in enumerate(zip(uses, moved, strict=True)):
        # As much of a tensor as the kernel moves: a norm may read it twice, a look-up not all.
        whole = sum(use.bytes for use in own)
        scale = size / whole if whole else 0.0
        parts = []
        for use in own:
            end, known = last[use.memory], before.get(use.memory)
            if use.written:
                gone = use.memory not in kept and end > i
                far = starts[end] - starts[i + 1] if gone else total
            elif known is None:
                # Touched last in the run before.
                far = starts[i] + total - starts[end + 1]
            else:
                far = starts[i] - starts[known + 1]
            if use.bytes:
                parts.append(Stream(use.bytes * scale, max(far, 0.0) + 2.0 * use.bytes))
        found.append(tuple(parts))
        before |= dict.fromkeys((use.memory for use in own), i)
    return found
