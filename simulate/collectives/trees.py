"""Trees for broadcast and for all-reduce; sources are listed in ``one_dimension``."""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil, log2

from ..clusters.topology import Dimension

#: Largest group whose tree is simulated rank by rank, at a cost proportional to its ranks; larger
#: ones use the closed form for powers of two (engineering choice).
MOST_FOLLOWED = 256
#: Seconds that do not depend on the bytes, and seconds that do.
Cost = tuple[float, float]
#: Bytes of a pipeline chunk: one of the 8 slots (``NCCL_STEPS``) of NCCL's buffer, which is
#: 4 MiB by default (``NCCL_BUFFSIZE`` in NCCL's user guide).
CHUNK_BYTES = 2.0**19
#: With this many chunks each further pipeline stage adds 1/64 of the transfer, less than 2 %; more
#: chunks would only make the message-level reference slower (engineering choice).
MOST_CHUNKS = 64
#: With fewer chunks a pipeline gains too little and the buffer is sent whole (engineering
#: estimate; not fitted).
LEAST_CHUNKS = 4


def tree(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Trees, on switches and fat trees without oversubscription.

    - Broadcast along a binomial tree: ``ceil(log2 n) (a + b / B)`` for powers of two [T]. Rank
      ``i`` is reached after as many sends as ``i`` has binary digits, and after one latency for
      each digit that is 1.
    - All-reduce along two binary trees with half of the bytes each, up and down; a rank that has
      children in one is a leaf in the other, so that all send and receive equally [S]. The first
      chunk is simulated up and down, child by child; each further one adds twice a chunk's time.
      For powers of two with ``h = log2 n``, ``2 h a + (2c+2h-3)/c b / B`` on a switch; beyond
      :data:`MOST_FOLLOWED` ranks this applies to all sizes, with two latencies between leaves.
    """
    # Many flows of a tree share the uplinks of an oversubscribed leaf, for which there is no closed
    # form here; the algorithm is not offered there.
    if dim.kind not in ("switch", "fat_tree") or dim.oversubscription > 1:
        return None
    radix = dim.radix if leaves(dim) > 1 else 0
    if kind == "broadcast":
        ways = [(hops * dim.latency, k * size / dim.rate) for k, hops in _farthest(dim.size, radix)]
        return max(ways, key=sum)
    # Up to three ranks a ring takes no more steps: 2 (n-1) against 2 ceil(log2 n).
    if kind == "all_reduce" and dim.size > 3:
        chunks = chunk_count(size)
        time = size / chunks / dim.rate
        levels = ceil(log2(dim.size))
        if dim.size > MOST_FOLLOWED:
            # Levels whose partners lie under different leaves pay the spine's second latency.
            far = levels - int(log2(radix)) if radix else 0
            filled = 2 * (chunks - 1) + 2 * levels - 1
            return 2 * (levels + far) * dim.latency, filled * time
        # Half a chunk, since each tree carries half of the bytes.
        first = _there_and_back(dim.size, radix, dim.latency, time / 2)
        # Only the split into latency and transfer depends on this; their sum is ``first`` + rest.
        latency = 2 * levels * dim.latency
        return latency, first - latency + 2 * (chunks - 1) * time
    return None


@cache
def _farthest(n: int, radix: int) -> list[tuple[int, int]]:
    """For each number of sends that reaches a rank, the maximum number of latencies on the way."""
    hops, most = [0] * n, dict[int, int]()
    for i in range(1, n):
        # The parent of rank i is i without its highest bit.
        sends = i.bit_length()
        parent = i - (1 << (sends - 1))
        hops[i] = hops[parent] + (2 if radix and i // radix != parent // radix else 1)
        most[sends] = max(most.get(sends, 0), hops[i])
    return list(most.items())


# Groups repeat within a sweep, and simulating a tree costs more than any formula.
@lru_cache(maxsize=4096)
def _there_and_back(n: int, radix: int, latency: float, time: float) -> float:
    """Seconds of half a chunk, ``time`` on a link, up and down the slower of the two trees."""
    parents = binary_tree(n)
    children: list[list[int]] = [[] for _ in range(n)]
    for place, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(place)
    # Breadth first from the root: parents before children, and the reverse when rising.
    order = [n - 1]
    for place in order:
        order += children[place]

    # The second tree is the first one shifted by one rank, so that leaves and interiors swap.
    def one(shift: int) -> float:
        def hop(a: int, b: int) -> float:
            far = radix and (a + shift) % n // radix != (b + shift) % n // radix
            return latency * (2 if far else 1)

        risen = [0.0] * n
        for place in reversed(order):
            free = 0.0
            # Children share the parent's receiving port: they are received in order of readiness.
            for start, delay in sorted((risen[c], hop(place, c)) for c in children[place]):
                free = max(free, start + delay) + time
            risen[place] = free
        fallen = {n - 1: risen[n - 1]}
        for place in order:
            for i, child in enumerate(children[place]):
                fallen[child] = fallen[place] + (i + 1) * time + hop(place, child)
        return max(fallen.values())

    return max(one(0), one(1))


def binary_tree(n: int) -> list[int]:
    """Parents of ``n`` places, -1 for the root: place ``n-1`` above an in-order binary tree.

    Places with even numbers below ``n-1`` have no children; shifted by one, the tree has its leaves
    where the other one has none [S].
    """
    parents = [-1] * n

    def grow(low: int, high: int, parent: int) -> None:
        if low < high:
            # The left subtree is complete, with 2^k - 1 places, so that interior nodes fall on odd
            # places and the shifted tree is complementary.
            middle = low + (1 << ((high - low).bit_length() - 1)) - 1
            parents[middle] = parent
            grow(low, middle, middle)
            grow(middle + 1, high, middle)

    grow(0, n - 1, n - 1)
    return parents


def chunk_count(size: float) -> int:
    """Number of chunks into which a pipeline splits ``size`` bytes."""
    chunks = min(ceil(size / CHUNK_BYTES), MOST_CHUNKS)
    return chunks if chunks >= LEAST_CHUNKS else 1


def leaves(dim: Dimension) -> int:
    """Number of leaf switches of a fat tree; 1 for every other kind."""
    return dim.size // dim.radix if dim.kind == "fat_tree" else 1


def shard_bytes(kind: str, dim: Dimension, size: float) -> float:
    """One rank's share: its contribution to a gather, otherwise ``1/n`` of the buffer."""
    return size if kind == "all_gather" else size / dim.size


def flow_rate(dim: Dimension) -> float:
    """Bytes/s of a flow from each rank to its neighbour in a ring over all ranks.

    A physical ring sends half of the bytes in each direction, so its full rate counts. A fully
    connected dimension uses one link of ``n - 1``. Of a leaf's ranks only one has its neighbour
    under another leaf, so the links to the spine carry a single flow.
    """
    if dim.kind == "fully_connected":
        return dim.rate / max(dim.size - 1, 1)
    if leaves(dim) > 1:
        return min(dim.rate, dim.radix * dim.rate / dim.oversubscription)
    return dim.rate
