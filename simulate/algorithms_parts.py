"""What the formulas of collectives share: chunks, shares, and the rate of a flow."""

from __future__ import annotations

from math import ceil

from .topology import Dimension

#: Seconds that do not depend on the bytes, and seconds that do.
Cost = tuple[float, float]
#: A pipeline cuts a buffer into chunks of this many bytes (a slot of NCCL's buffer: an eighth of
#: 4 MiB), into at most :data:`MOST_CHUNKS`; below :data:`LEAST_CHUNKS` it is not worth it.
CHUNK_BYTES = 2.0**19
MOST_CHUNKS = 64
LEAST_CHUNKS = 4


def chunk_count(size: float) -> int:
    """Chunks into which a pipeline cuts ``size`` bytes."""
    chunks = min(ceil(size / CHUNK_BYTES), MOST_CHUNKS)
    return chunks if chunks >= LEAST_CHUNKS else 1


def leaves(dim: Dimension) -> int:
    """Leaf switches of a fat tree; 1 for every other kind."""
    return dim.size // dim.radix if dim.kind == "fat_tree" else 1


def shard_bytes(kind: str, dim: Dimension, size: float) -> float:
    """Bytes of one rank's share: what it puts into a gather, a fraction of the buffer else."""
    return size if kind == "all_gather" else size / dim.size


def flow_rate(dim: Dimension) -> float:
    """Bytes/s of a flow from each rank to its neighbour in a ring over all ranks.

    A physical ring sends half in each direction, a fully connected dimension uses one link of
    ``n - 1``, and the links of a leaf to the spine carry one flow.
    """
    if dim.kind == "fully_connected":
        return dim.rate / max(dim.size - 1, 1)
    if leaves(dim) > 1:
        return min(dim.rate, dim.radix * dim.rate / dim.oversubscription)
    return dim.rate
