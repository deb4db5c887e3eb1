"""Costs of collective algorithms inside one dimension of a topology.

Every function takes a dimension and the bytes that each rank puts in, and returns ``(latency,
transfer)`` in seconds: time that does not depend on the bytes, and time that does. In the formulas
``n`` is the size of the dimension, ``b`` the bytes that a rank puts in, ``B`` its bandwidth, ``a``
its latency, ``c`` the number of chunks of a pipeline. The launch cost is added by the caller.

Sources: [T] Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in
MPICH*, IJHPCA 19 (2005); [P] Patarasuk, Yuan, *Bandwidth optimal all-reduce algorithms for clusters
of workstations*, JPDC 69 (2009); [S] Sanders, Speck, Träff, *Two-tree algorithms for full bandwidth
broadcast, reduction and scan*, Parallel Computing 35 (2009); [G] Graham et al., *Scalable
Hierarchical Aggregation Protocol (SHArP)*, COMHPC (2016); [C] Chan, Heimlich, Purkayastha, van de
Geijn, *Collective communication: theory, practice, and experience*, CCPE 19 (2007).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from .topology import Dimension

#: Seconds that do not depend on the bytes, and seconds that do.
Cost = tuple[float, float]
#: A pipeline cuts a buffer into chunks of this many bytes, into at most :data:`MOST_CHUNKS`.
CHUNK_BYTES = 65536.0
MOST_CHUNKS = 64


def chunk_count(size: float) -> int:
    """Chunks into which a pipeline cuts ``size`` bytes."""
    return min(max(ceil(size / CHUNK_BYTES), 1), MOST_CHUNKS)


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


def _ring_latency(dim: Dimension) -> float:
    """``n - 1`` steps; those between leaves of a fat tree take twice as long."""
    far = min(leaves(dim), dim.size - 1) if leaves(dim) > 1 else 0
    return (dim.size - 1 + far) * dim.latency


def ring(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Ring: each rank sends to its neighbour.

    - all-gather ``(n-1) a + (n-1) b / B``, reduce-scatter ``(n-1) a + (n-1)/n b / B``, all-reduce
      one after the other: ``2 (n-1) a + 2 (n-1)/n b / B`` [P, T];
    - broadcast, a pipelined chain: ``(n-1) a + (n-2+c)/c b / B`` [C];
    - all-to-all on a physical ring, blocks handed on both ways round: in step ``k`` those for ranks
      at distance ``k`` or more; ``floor(n/2) a + floor(n^2/4) b/n / B``, the load of its links.
    """
    n, rate = dim.size, flow_rate(dim)
    latency = _ring_latency(dim)
    if kind in ("all_gather", "reduce_scatter", "all_reduce"):
        passes = 2 if kind == "all_reduce" else 1
        moved = (n - 1) * shard_bytes(kind, dim, size) / rate
        return passes * latency, passes * moved
    if kind == "broadcast":
        chunks = chunk_count(size)
        return latency, (n - 2 + chunks) / chunks * size / rate
    if kind == "all_to_all" and dim.kind == "ring":
        return n // 2 * dim.latency, (n * n // 4) * size / n / rate
    return None


def direct(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Direct: every rank sends to every other at once.

    All-gather ``a + (n-1) b / B``, reduce-scatter and all-to-all ``a + (n-1)/n b / B``, all-reduce
    as reduce-scatter and all-gather, broadcast ``a + (n-1) b / B`` from the root's links [T, long
    messages; C]. Between leaves of a fat tree with ``r`` ranks each, the links to the spine take
    ``(n-r) oversubscription`` blocks of time where a rank's own take ``n-1``.
    """
    n = dim.size
    if dim.kind in ("ring", "torus") or kind not in DIRECT_KINDS:
        return None
    far = leaves(dim) > 1
    step = dim.latency * (2 if far else 1)
    if kind == "broadcast":
        return step, (n - 1) * size / dim.rate
    blocks = max(n - 1.0, (n - dim.radix) * dim.oversubscription if far else 0.0)
    moved = blocks * shard_bytes(kind, dim, size) / dim.rate
    return (2 * step, 2 * moved) if kind == "all_reduce" else (step, moved)


#: What :func:`direct` does.
DIRECT_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def one_shot(kind: str, dim: Dimension, size: float) -> Cost | None:
    """All-reduce of small messages: gather every buffer, add up locally; ``a + (n-1) b / B``."""
    return direct("all_gather", dim, size) if kind == "all_reduce" else None


def tree(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Trees.

    - Broadcast along a binomial tree: ``ceil(log2 n) (a + b / B)`` [T].
    - All-reduce along two binary trees with half of the bytes each; a rank that has children in one
      is a leaf in the other [S]. In a step, each rank sends and receives one chunk of both halves
      upwards, later downwards: with ``h = ceil(log2 n)`` levels ``2 h a + 2 (c+h-1)/c b / B``.
    """
    levels = ceil(log2(dim.size))
    if dim.kind not in ("switch", "fat_tree"):
        return None
    step = dim.latency * (2 if leaves(dim) > 1 else 1)
    if kind == "broadcast":
        return levels * step, levels * size / dim.rate
    if kind == "all_reduce":
        chunks = chunk_count(size)
        return 2 * levels * step, 2 * (chunks + levels - 1) / chunks * size / dim.rate
    return None


def halving_doubling(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Recursive halving and doubling between partners, for powers of two [T].

    Reduce-scatter exchanges ``b/2`` with the nearest partner, then ``b/4`` at twice the distance,
    and so on; all-gather goes the other way; all-reduce is both: ``2 log2(n) a + 2 (n-1)/n b / B``
    on a switch. A fully connected dimension has one of its ``n-1`` links in use at a time; far
    steps share the links to a fat tree's spine.
    """
    n = dim.size
    whole = {"all_reduce": size, "reduce_scatter": size, "all_gather": n * size}.get(kind)
    if whole is None or n & (n - 1) or dim.kind in ("ring", "torus"):
        return None
    latency, moved, distance = 0.0, 0.0, 1
    while distance < n:
        near = leaves(dim) == 1 or distance < dim.radix
        rate = dim.rate / (1.0 if near else dim.oversubscription)
        rate = rate / (n - 1) if dim.kind == "fully_connected" else rate
        latency += dim.latency * (1 if near else 2)
        moved += whole / (2 * distance) / rate
        distance *= 2
    passes = 2 if kind == "all_reduce" else 1
    return passes * latency, passes * moved


def in_network(kind: str, dim: Dimension, size: float) -> Cost | None:
    """All-reduce (and broadcast) by the switches.

    - ``tree``: chunks go up the tree of switches, which add them up, and down again [G]. With the
      times of a chunk on each link in a row ``s_i``: ``sum s_i + (c-1) max s_i`` and one latency
      through the tree.
    - ``multicast``: each rank owns ``1/n`` of the buffer, reads the sum of it from the switch, and
      writes it to all through the switch; a link carries ``b`` and ``b/n`` each way:
      ``2 a + (1 + 1/n) b / B``, plus one chunk to fill (Ishii and Wells, *The NVLink-Network
      Switch*, Hot Chips 34, 2022).
    """
    chunks = chunk_count(size)
    if kind == "all_reduce" and dim.reduction == "multicast":
        fill = (chunks + 1) / chunks
        return 2 * dim.latency, fill * (1 + 1 / dim.size) * size / dim.rate
    if kind not in ("all_reduce", "broadcast") or dim.reduction != "tree":
        return None
    chunk = size / chunks
    stages = [chunk / dim.rate] * 2
    if leaves(dim) > 1:
        stages += [chunk * dim.oversubscription / (dim.radix * dim.rate)] * 2
    latency = dim.latency * (2 if leaves(dim) > 1 else 1)
    return latency, sum(stages) + (chunks - 1) * max(stages)


def scatter_gather(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Broadcast of long messages: scatter, then direct all-gather; ``2 a + 2 (n-1)/n b / B`` [C]."""
    gather = direct("all_gather", dim, size / dim.size)
    if kind != "broadcast" or gather is None:
        return None
    far = leaves(dim) > 1
    scatter = (dim.size - 1) * size / dim.size / dim.rate
    return gather[0] + dim.latency * (2 if far else 1), gather[1] + scatter


def torus(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Rings along all axes at once: part ``p`` of the bytes takes the axes in turn from ``p`` on.

    With ``d`` axes there are ``d`` parts, so that every link is busy; a phase takes as long as its
    longest part. All-reduce is reduce-scatter and then all-gather; in a cube, both together reach
    the bound ``2 (n-1)/n b / B`` (Jain, Sabharwal, *Optimal bucket algorithms for large MPI
    collectives on torus interconnects*, ICS 2010).
    """
    if dim.kind != "torus":
        return ring(kind, dim, size)
    if kind == "all_reduce":
        halves = torus("reduce_scatter", dim, size), torus("all_gather", dim, size / dim.size)
        return _sum([h for h in halves if h])
    rings, axes = dim.rings(), len(dim.axes)
    own = [size / axes] * axes
    total: Cost = (0.0, 0.0)
    for phase in range(axes):
        costs = []
        for part in range(axes):
            axis = rings[(part + phase) % axes]
            found = ring(kind, axis, own[part]) if axis.size > 1 else (0.0, 0.0)
            if found is None:
                return None
            costs.append(found)
            own[part] *= _growth(kind, axis.size)
        total = _sum([total, max(costs, key=sum)])
    return total


def _growth(kind: str, n: int) -> float:
    return {"all_gather": float(n), "reduce_scatter": 1.0 / n}.get(kind, 1.0)


def _sum(costs: list[Cost]) -> Cost:
    return sum(c[0] for c in costs), sum(c[1] for c in costs)


#: Algorithms inside a dimension, by name.
IN_DIMENSION: dict[str, Callable[[str, Dimension, float], Cost | None]] = {
    "ring": torus,
    "direct": direct,
    "one_shot": one_shot,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "scatter_gather": scatter_gather,
    "in_network": in_network,
}
