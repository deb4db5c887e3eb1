"""Costs of collective algorithms inside one dimension of a topology.

Every function takes a dimension and the bytes that each rank contributes, and returns ``(latency,
transfer)`` in seconds: time that does not depend on the bytes, and time that does. In the formulas
``n`` is the size of the dimension, ``b`` the bytes of a rank, ``B`` its bandwidth, ``a`` its
latency, ``c`` the number of pipeline chunks. The caller adds the launch cost. The closed forms are
checked against a message-level simulation (docs/clusters.md).

Sources: [T] Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in
MPICH*, IJHPCA 19 (2005); [P] Patarasuk, Yuan, *Bandwidth optimal all-reduce algorithms for clusters
of workstations*, JPDC 69 (2009); [S] Sanders, Speck, Träff, *Two-tree algorithms for full bandwidth
broadcast, reduction and scan*, Parallel Computing 35 (2009); [G] Graham et al., *Scalable
Hierarchical Aggregation Protocol (SHArP)*, COMHPC (2016); [C] Chan, Heimlich, Purkayastha, van de
Geijn, *Collective communication: theory, practice, and experience*, CCPE 19 (2007).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from ..clusters.topology import Dimension
from .trees import Cost, chunk_count, flow_rate, leaves, shard_bytes, tree

#: Collectives that :func:`direct` implements.
DIRECT_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def _passed_on(dim: Dimension, edges: int, size: float) -> Cost:
    """Time of messages that every rank forwards, ``edges`` times in all.

    Every ``radix``-th edge crosses between leaves of a fat tree and costs two latencies. If that
    edge is slower than the others, messages may queue at it; the slower of the two cases counts.
    """
    rate = flow_rate(dim)
    if leaves(dim) == 1:
        return edges * dim.latency, edges * size / rate
    # One lap round the ring crosses each leaf's boundary once; a partial lap is rounded up, since
    # the slowest message is one that starts right before a boundary.
    whole, rest = divmod(edges, dim.size)
    far = whole * leaves(dim) + ceil(rest / dim.radix)
    latency = (edges + far) * dim.latency
    # Without queueing a message pays each edge at that edge's rate.
    travel = far * size / rate + (edges - far) * size / dim.rate
    # With queueing the uplink is busy throughout, and all but two of the latencies pass while it
    # sends; the factor is 0 if the uplink is as fast as a port and nothing queues.
    return latency, max(
        travel, edges * size / rate - (latency - 2 * dim.latency) * (rate < dim.rate)
    )


def ring(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Ring: each rank sends to its neighbour.

    - all-gather ``(n-1) a + (n-1) b / B``, reduce-scatter ``(n-1) a + (n-1)/n b / B``, all-reduce
      one after the other: ``2 (n-1) a + 2 (n-1)/n b / B`` [P, T];
    - broadcast, a pipelined chain: ``(n-1) a + (n-2+c)/c b / B`` [C];
    - all-to-all on a physical ring, blocks forwarded in both directions: in step ``k`` those for
      ranks at distance ``k`` or more; ``floor(n/2) a + floor(n^2/4) b/n / B``, the load of a link.
    """
    n, rate = dim.size, flow_rate(dim)
    if kind in ("all_gather", "reduce_scatter", "all_reduce"):
        steps = (2 if kind == "all_reduce" else 1) * (n - 1)
        return _passed_on(dim, steps, shard_bytes(kind, dim, size))
    if kind == "broadcast":
        chunks = chunk_count(size)
        # Each boundary between leaves adds a second latency.
        latency = (n - 1 + leaves(dim) - 1) * dim.latency
        # Edges inside a leaf run at the port's rate, not at the slower uplink's.
        near = (n - leaves(dim)) * (1 / dim.rate - 1 / rate) if leaves(dim) > 1 else 0.0
        return latency, ((n - 2 + chunks) / rate + near) * size / chunks
    # Without physical neighbours an all-to-all is direct; see :func:`direct`.
    if kind == "all_to_all" and dim.kind == "ring":
        return n // 2 * dim.latency, (n * n // 4) * size / n / rate
    return None


def direct(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Direct: every rank sends to every other at once.

    All-gather ``a + (n-1) b / B``, reduce-scatter and all-to-all ``a + (n-1)/n b / B``, all-reduce
    as reduce-scatter and all-gather, broadcast ``a + (n-1) b / B`` from the root's links [T, long
    messages; C]. Between leaves of a fat tree with ``r`` ranks each, the links to the spine are
    busy for ``(n-r) oversubscription`` blocks, a rank's port for ``n-1``; ranks whose sums are
    complete early then save one block, or one latency if that is less.
    """
    n = dim.size
    # Rings and tori only have links to neighbours: a direct exchange would be forwarded.
    if dim.kind in ("ring", "torus") or kind not in DIRECT_KINDS:
        return None
    far = leaves(dim) > 1
    step = dim.latency * (2 if far else 1)
    if kind == "broadcast":
        # Copies for all other leaves share the uplinks of the root's leaf.
        beyond = (n - dim.radix) * size / flow_rate(dim) if far else 0.0
        return step, max((n - 1) * size / dim.rate, beyond)
    # The busier of a rank's port and its share of the uplinks, in blocks at the port's rate.
    blocks = max(n - 1.0, (n - dim.radix) * dim.oversubscription if far else 0.0)
    block = shard_bytes(kind, dim, size) / dim.rate
    if kind != "all_reduce":
        return step, blocks * block
    # Nothing queues at the spine, so that all ranks start the all-gather together.
    if dim.oversubscription == 1 or not far or dim.radix == 1:
        return 2 * step, 2 * blocks * block
    return 2 * step, max((2 * blocks - 1) * block, 2 * blocks * block - dim.latency)


def one_shot(kind: str, dim: Dimension, size: float) -> Cost | None:
    """All-reduce of small messages: gather every buffer, add locally; ``a + (n-1) b / B``.

    One latency instead of two, for ``n/2`` times the bytes of a ring: the "one-shot" all-reduce
    kernels of inference frameworks.
    """
    return direct("all_gather", dim, size) if kind == "all_reduce" else None


def halving_doubling(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Recursive halving and doubling between partners, for powers of two [T].

    Reduce-scatter exchanges ``b/2`` with the nearest partner, then ``b/4`` at twice the distance,
    and so on; all-gather goes the other way; all-reduce is both: ``2 log2(n) a + 2 (n-1)/n b / B``
    on a switch. A fully connected dimension has one of its ``n-1`` links in use at a time; on
    oversubscribed trees the partners would queue, so the algorithm is not offered.
    """
    n = dim.size
    whole = {"all_reduce": size, "reduce_scatter": size, "all_gather": n * size}.get(kind)
    if whole is None or n & (n - 1) or dim.kind in ("ring", "torus") or dim.oversubscription > 1:
        return None
    latency, moved, distance = 0.0, 0.0, 1
    # The largest exchange goes to the nearest partner, so that the fewest bytes cross between
    # leaves; the order does not change the sum on a switch.
    while distance < n:
        near = leaves(dim) == 1 or distance < dim.radix
        # In a fully connected dimension only the link to the current partner is in use.
        rate = dim.rate / (n - 1) if dim.kind == "fully_connected" else dim.rate
        latency += dim.latency * (1 if near else 2)
        moved += whole / (2 * distance) / rate
        distance *= 2
    passes = 2 if kind == "all_reduce" else 1
    return passes * latency, passes * moved


def in_network(kind: str, dim: Dimension, size: float) -> Cost | None:
    """All-reduce (and broadcast) inside the switches.

    - ``tree``: chunks go up the tree of switches, which add them up, and down again [G]. With
      successive link times ``s_i`` of a chunk: ``sum s_i + (c-1) max s_i`` and one latency through
      the tree.
    - ``multicast``: each rank owns ``1/n`` of the buffer, reads its sum from the switch, and writes
      it to all through the switch, so that a link carries ``b`` and ``b/n`` each way. With chunks
      of ``m = b/c`` bytes, writes of one overlapping reads of the next: ``2 a + (1 + 1/n) (c+1)
      m/B``, and for one chunk the later of its first and last owner, ``max(a + (2 + 1/n) m/B, 2 a +
      (1 + 3/n) m/B)`` (Ishii and Wells, *The NVLink-Network Switch*, Hot Chips 34, 2022).
    """
    if kind == "all_reduce" and dim.reduction == "multicast":
        return _multicast(dim, size)
    chunks = chunk_count(size)
    if kind not in ("all_reduce", "broadcast") or dim.reduction != "tree":
        return None
    chunk = size / chunks
    # One stage up to and one down from the leaf, at the port's rate; reduced data crosses to the
    # spine once per leaf, over the uplinks of all its ranks together.
    stages = [chunk / dim.rate] * 2
    if leaves(dim) > 1:
        stages += [chunk * dim.oversubscription / (dim.radix * dim.rate)] * 2
    latency = dim.latency * (2 if leaves(dim) > 1 else 1)
    return latency, sum(stages) + (chunks - 1) * max(stages)


def _multicast(dim: Dimension, size: float) -> Cost:
    chunks, own = chunk_count(size), 1 / dim.size
    time = size / chunks / dim.rate
    if chunks > 1:
        return 2 * dim.latency, (1 + own) * (chunks + 1) * time
    first, last = (dim.latency, (2 + own) * time), (2 * dim.latency, (1 + 3 * own) * time)
    return max(first, last, key=sum)


def scatter_gather(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Broadcast of long messages: scatter, direct all-gather; ``2 a + 2 (n-1)/n b / B`` [C]."""
    # The scatter sends the root's n-1 blocks and the gather each rank's n-1: they cost the same.
    gather = direct("all_gather", dim, size / dim.size)
    if kind != "broadcast" or gather is None or leaves(dim) > 1:
        return None
    return 2 * gather[0], 2 * gather[1]


def torus(kind: str, dim: Dimension, size: float) -> Cost | None:
    """Rings along all axes at once: part ``p`` of the bytes takes the axes in turn from ``p`` on.

    With ``d`` axes there are ``d`` parts, so that every link is busy; a phase takes as long as its
    longest part. A broadcast takes one axis after the other. All-reduce is reduce-scatter and then
    all-gather; in a cube, both together reach the bound ``2 (n-1)/n b / B`` (Jain, Sabharwal,
    *Optimal bucket algorithms for large MPI collectives on torus interconnects*, ICS 2010).
    """
    if dim.kind != "torus":
        return ring(kind, dim, size)
    if kind == "all_reduce":
        halves = torus("reduce_scatter", dim, size), torus("all_gather", dim, size / dim.size)
        return _sum([h for h in halves if h])
    rings, axes = dim.rings(), len(dim.axes)
    # One axis after another; broadcasts along several edge-disjoint trees are not modelled.
    if kind == "broadcast":
        return _sum([c for r in rings if r.size > 1 and (c := ring(kind, r, size))])
    own = [size / axes] * axes
    total: Cost = (0.0, 0.0)
    for phase in range(axes):
        costs = []
        for part in range(axes):
            axis = rings[(part + phase) % axes]
            cost = ring(kind, axis, own[part]) if axis.size > 1 else (0.0, 0.0)
            if cost is None:
                return None
            costs.append(cost)
            own[part] *= _growth(kind, axis.size)
        # A phase ends with its slowest part: the axes may have different lengths.
        total = _sum([total, max(costs, key=sum)])
    return total


def _growth(kind: str, n: int) -> float:
    return {"all_gather": float(n), "reduce_scatter": 1.0 / n}.get(kind, 1.0)


def _sum(costs: list[Cost]) -> Cost:
    return sum(c[0] for c in costs), sum(c[1] for c in costs)


#: Algorithms inside a dimension, by name; ``torus`` falls back to ``ring`` for every other kind.
IN_DIMENSION: dict[str, Callable[[str, Dimension, float], Cost | None]] = {
    "ring": torus,
    "direct": direct,
    "one_shot": one_shot,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "scatter_gather": scatter_gather,
    "in_network": in_network,
}


def allowed(kind: str, dim: Dimension, size: float) -> dict[str, Cost]:
    """Costs of the algorithms for ``kind`` in the dimension's library, by name."""
    every = {name: cost(kind, dim, size) for name, cost in IN_DIMENSION.items()}
    costs = {name: cost for name, cost in every.items() if cost is not None}
    # A list such as [ring, tree] does not cover an all-to-all: then any algorithm counts, because
    # the library must have one, and rejecting it would leave the collective without a cost.
    own = {name: cost for name, cost in costs.items() if name in dim.algorithms}
    return own or costs


def fastest(kind: str, dim: Dimension, size: float) -> tuple[str, Cost]:
    """The fastest of :func:`allowed`, and its cost."""
    return min(allowed(kind, dim, size).items(), key=lambda item: sum(item[1]))
