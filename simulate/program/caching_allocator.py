"""PyTorch's caching allocator for device memory, replayed block by block.

The rules and constants are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings
(no expandable segments, no limit of splitting), which AMD's builds share: sizes are rounded; a
freed block is kept, merged with its free neighbours, and reused for the request it fits best.
"""

from __future__ import annotations

from bisect import bisect_left, insort

#: Sizes are multiples of this many bytes (``kMinBlockSize``).
BLOCK = 512
#: Largest size in the pool of small blocks (``kSmallSize``); remainders of large blocks are split
#: off above this size.
SMALL = 1 << 20
#: Segment size for small blocks (``kSmallBuffer``).
SMALL_SEGMENT = 2 << 20
#: Sizes of at least this get separate segments (``kMinLargeAlloc``).
LARGE = 10 << 20
#: Segment size for blocks between these (``kLargeBuffer``).
LARGE_SEGMENT = 20 << 20
#: Segments of large blocks are multiples of this (``kRoundLarge``).
ROUND_LARGE = 2 << 20


class Block:
    """A part of a segment.

    Attributes:
        size: Bytes.
        small: Whether it belongs to the pool of small blocks.
        segment: Bytes of its segment.
        address: Address, which distinguishes blocks of one size.
        free: Whether it is not in use.
        before: Previous block in the segment.
        after: Next block in the segment.
    """

    __slots__ = ("address", "after", "before", "free", "segment", "size", "small")

    def __init__(self, size: int, small: bool, segment: int, address: int) -> None:
        self.size, self.small, self.segment, self.address = size, small, segment, address
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Sort key of the best-fit search."""
        return self.size, self.address

    @property
    def whole(self) -> bool:
        """Whether it is the whole segment."""
        return self.size == self.segment


class CachingAllocator:
    """Allocator for one stream of one device.

    Attributes:
        allocated: Bytes of blocks in use, as ``torch.cuda.memory_allocated`` counts them.
        reserved: Bytes of segments, as ``torch.cuda.memory_reserved`` counts them.
        pinned: Bytes of segments with a block in use, which remain when the allocator returns free
            segments to the driver, as it does before it runs out of memory.
        peak_allocated: Maximum of ``allocated``.
        peak_reserved: Maximum of ``reserved``.
        peak_pinned: Maximum of ``pinned``.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.pinned = 0
        self.peak_allocated = self.peak_reserved = self.peak_pinned = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}
        self._end = 0

    def allocate(self, size: int) -> Block:
        """Allocate a block of at least ``size`` bytes."""
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        if block.whole:
            self.pinned += block.segment
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_pinned = max(self.peak_pinned, self.pinned)
        return block

    def release(self, block: Block) -> None:
        """Free a block, which is kept for later requests."""
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._merge(block, other)
        if block.whole:
            self.pinned -= block.segment
        self._keep(block)

    def _best(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        return self._blocks.pop(pool.pop(at)[1]) if at < len(pool) else None

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            whole = SMALL_SEGMENT
        elif size < LARGE:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // ROUND_LARGE) * ROUND_LARGE
        block = Block(whole, small, whole, self._end)
        self._end += whole
        self.reserved += whole
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.small, block.segment, block.address + size)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._keep(rest)

    def _merge(self, block: Block, other: Block) -> None:
        """Merge a free neighbour into a block."""
        pool = self._free[other.small]
        del pool[bisect_left(pool, other.key)]
        del self._blocks[other.address]
        if other is block.before:
            block.before, block.address = other.before, other.address
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _keep(self, block: Block) -> None:
        insort(self._free[block.small], block.key)
        self._blocks[block.address] = block
