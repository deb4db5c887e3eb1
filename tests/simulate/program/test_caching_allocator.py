"""The caching allocator by its documented rules, sizes computed by hand."""

import random

import pytest

from opcast.simulate.program.caching_allocator import CachingAllocator

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # A rest of at most 1 MiB is not split off.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (300 * MIB + 1, 300 * MIB + 512, 302 * MIB),
    ],
)
def test_sizes_are_rounded_as_the_pools_have_them(size, block, segment):
    own = CachingAllocator()
    assert own.allocate(size).size == own.allocated == block
    assert own.reserved == own.pinned == segment


def test_freed_blocks_serve_what_fits_them_best():
    own = CachingAllocator()
    large, small = own.allocate(64 * MIB), own.allocate(32 * MIB)
    own.release(large)
    own.release(small)
    assert (own.allocated, own.reserved, own.pinned) == (0, 96 * MIB, 0)
    # Best fit: the segment of 32 MiB, of which the rest is split off.
    first = own.allocate(30 * MIB)
    assert (first.segment, first.size, own.reserved) == (32 * MIB, 30 * MIB, 96 * MIB)
    # The rest serves the next request.
    second = own.allocate(2 * MIB)
    assert second.segment == 32 * MIB and own.pinned == 32 * MIB
    # What fits nowhere needs a segment of its own, though 64 MiB are free.
    own.allocate(65 * MIB)
    assert own.reserved == (96 + 66) * MIB and own.peak_reserved == own.reserved


def test_free_neighbours_become_one_block():
    own = CachingAllocator()
    parts = [own.allocate(4 * MIB) for _ in range(5)]
    assert own.reserved == 20 * MIB
    for part in (parts[1], parts[3], parts[2]):
        own.release(part)
    assert own.allocate(12 * MIB).segment == 20 * MIB
    assert own.reserved == 20 * MIB


def test_fragments_keep_segments():
    own = CachingAllocator()
    held = []
    for _ in range(10):
        held.append(own.allocate(6 * MIB))
        own.release(own.allocate(13 * MIB))
    # Two of 6 MiB and a hole fit a segment of 20 MiB; the others of 13 MiB are kept.
    assert own.allocated == 60 * MIB
    assert own.reserved > own.pinned >= 60 * MIB


def test_nothing_is_lost_in_any_order():
    own, held, draw = CachingAllocator(), [], random.Random(0)
    for _ in range(3000):
        if held and draw.random() < 0.5:
            own.release(held.pop(draw.randrange(len(held))))
        else:
            held.append(own.allocate(draw.choice([100, 10**5, 10**6, 3 * 10**6, 5 * 10**7])))
        assert sum(b.size for b in held) == own.allocated <= own.pinned <= own.reserved
    for block in held:
        own.release(block)
    assert own.allocated == own.pinned == 0
    assert own.peak_allocated <= own.peak_pinned <= own.peak_reserved == own.reserved
