"""Features of a kernel's context: what is still in the cache, loops, neighbours, position.

The same kernel takes a different time in another program: an operand may still be cached because
its producer has just written it, a loop may keep its working set in the cache, another kernel may
run concurrently. These effects depend on the schedule rather than the kernel.

The *reuse distance* of an operand is the number of bytes that kernels touch between its producer's
end and its use, including the operand (Mattson et al., IBM Systems Journal 9, 1970, with bytes for
pages): it is still in a cache of that size or more. Loop bodies appear in the schedule once, so a
distance counts the bytes of a loop once, however often it runs.

The largest of these effects is computed rather than learned: :func:`loop_factors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import KINDS, Kernel, LoweredProgram
from ...features.table.columns import INDEX
from ...features.table.roofline import compute_seconds, memory_seconds
from ...features.table.row import rows
from .schedule_cost import SMALLEST, durations, timeline

#: Fractions of the last-level cache for the reuse features: from the size of an inner cache level
#: to certain eviction. Engineering estimates; the trees choose among them.
CACHE_PARTS = (1 / 32, 1 / 4, 1.0, 4.0)
#: Default bytes of last-level cache: 32 MB, in the range of server CPUs. Engineering estimate.
DEFAULT_CACHE = 32e6
#: Time per byte that a product reads from main memory, relative to streaming at full bandwidth: a
#: matrix is packed row by row on few threads, and each new page is a TLB miss. Between the best
#: values for 66 products in loops of ``datagen/datasets/cpu`` (2) and for those of 20 loops written
#: for it, eleven of them in ``tests/bench/loop_products.py`` (4 to 6).
COLD = 3.0
#: Features of a kernel in its program, all dimensionless or logarithms.
CONTEXT = (
    "log_reuse",
    "log_nearest_reuse",
    *(f"cached_{part:g}" for part in CACHE_PARTS),
    "from_previous",
    "from_kernels",
    "log_next_use",
    "users",
    "log_program_bytes",
    "log_peak_memory",
    "log_loop_bytes",
    "loop_depth",
    "log_multiplicity",
    "beside",
    "overlap",
    "log_previous",
    "log_next",
    "previous_bytes",
    "position",
    "time_before",
    "log_latency",
    "log_share",
    "log_total",
    "log_kernels",
    "log_copies",
    "log_bytes",
    "log_intensity",
    "written_share",
    "log_ratio",
    *(f"is_{kind}" for kind in KINDS),
)
#: Reuse distance of a program input, relative to the cache (log2): 4096 times the cache, beyond the
#: reach of any schedule.
_FAR = 12.0


def context_features(
    latency_s: np.ndarray, base_s: np.ndarray, lowered: LoweredProgram, device: DeviceSpec
) -> np.ndarray:
    """Features of every kernel of a program.

    Args:
        latency_s: Predicted seconds of one execution, in schedule order, shape ``(n,)``.
        base_s: Roofline plus floor of one execution, in seconds, shape ``(n,)``.
        lowered: The schedule.
        device: Device it runs on.

    Returns:
        float32, columns as in :data:`CONTEXT`, shape ``(n, len(CONTEXT))``.
    """
    kernels = lowered.kernels
    if not kernels:
        return np.zeros((0, len(CONTEXT)), np.float32)
    cache = device.cache_bytes or DEFAULT_CACHE
    columns = [
        *_reuse(kernels, cache),
        *_sizes(lowered, cache),
        *_beside(latency_s, kernels, device),
        *_neighbours(latency_s, kernels, cache),
        *_own(kernels, cache),
    ]
    kinds = np.array([k.kind for k in kernels])
    columns += [np.log(np.maximum(latency_s, SMALLEST) / np.maximum(base_s, SMALLEST))]
    columns += [kinds == kind for kind in KINDS]
    return np.stack([np.asarray(c, np.float32) for c in columns], axis=1)


def loop_factors(kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Factors on the latency of products in loops, whose operands stay in a CPU's caches.

    A product outside a loop reads its matrices from main memory, like most products in the training
    data; in a loop it does so in the first iteration, and later reads them from the cache that
    holds the working set of an iteration. With the arithmetic ``c`` (and the floor), the bytes read
    ``b``, and the time per byte ``m`` from main memory and ``h`` for the working set of the loop,

        factor = (c + b h') / (c + b COLD m),    h' = h (1 + (COLD - 1) s)

    where ``s``, from 0 to 1, is the position of ``h`` between the fastest cache's time and ``m``: a
    loop that spills over the last cache does not change its products.

    Args:
        kernels: ``n`` kernels of one program.
        device: Device it runs on.

    Returns:
        From 0 to 1, shape ``(n,)``; 1 for all other kernels, and on other platforms.
    """
    factors = np.ones(len(kernels))
    if device.platform != "cpu":
        return factors
    own = [i for i, k in enumerate(kernels) if k.scope and k.multiplicity > 1 and _reuses(k)]
    if not own:
        return factors
    row = rows([kernels[i] for i in own])
    # A sliced operand is a different part of its array in each iteration.
    whole = row[:, INDEX["n_dynamic_slice"]] == 0
    matrix_s, vector_s = compute_seconds(row, device)
    arithmetic = matrix_s + vector_s + device.floor
    size = row[:, INDEX["bytes_in"]]
    sets = np.array([_touched(kernels, kernels[i].scope) for i in own])
    hot = memory_seconds(sets, device) / np.maximum(sets, 1.0)
    # The same function at both extremes: a set within the first level, and one beyond the last.
    fastest, cold = (
        float(memory_seconds(np.array([s]), device)[0]) / s
        for s in (1.0, 8.0 * device.levels[-1].capacity)
    )
    # A device described without caches has a single speed: loops gain nothing.
    spilled = (hot - fastest) / (cold - fastest) if cold > fastest else np.ones(len(own))
    later = arithmetic + size * hot * (1.0 + (COLD - 1.0) * spilled)
    first = arithmetic + size * cold * COLD
    runs = np.array([kernels[i].multiplicity for i in own])
    share = 1.0 / runs + (1.0 - 1.0 / runs) * np.minimum(later / first, 1.0)
    factors[own] = np.where(whole, share, 1.0)
    return factors


def _reuses(kernel: Kernel) -> bool:
    """Whether a kernel is a product, which reads matrices that a loop does not change."""
    # Other kernels mostly read the previous kernel's output, in a loop or not: correcting them
    # would increase their error.
    return kernel.kind in ("gemm", "conv")


def _touched(kernels: Sequence[Kernel], scope: tuple[str, ...]) -> float:
    """Bytes that an iteration of a loop touches, inner loops once."""
    return sum(k.bytes for k in kernels if k.scope[: len(scope)] == scope)


def _reuse(kernels: Sequence[Kernel], cache: float) -> list[np.ndarray]:
    """Origin and reuse distance of operands, and the distance to the result's next use."""
    count = len(kernels)
    touched = np.cumsum([0.0] + [k.bytes for k in kernels])
    features = np.zeros((count, 3 + len(CACHE_PARTS) + 1))
    # Inputs of the program have no producer here: they count as cold.
    features[:, 0] = features[:, 1] = _FAR
    next_use, users = np.full(count, -1), np.zeros(count)
    for i, kernel in enumerate(kernels):
        made = [j for j in kernel.operands if 0 <= j < i and kernels[j].kind != "control"]
        for j in made:
            next_use[j] = i if next_use[j] < 0 else next_use[j]
            users[j] += 1
        if not made:
            continue
        # Bytes touched since the producer ended, plus the operand itself, which must also fit.
        size = np.array([kernels[j].bytes_out for j in made])
        distance = touched[i] - touched[np.array(made) + 1] + size
        # A kernel may read less of its operands than was written (slices), or other inputs: the
        # larger total keeps the shares at most 1.
        share = size / max(size.sum(), kernel.bytes_in, 1.0)
        log = _log_ratio(distance, cache)
        features[i, 0] = (log * share).sum() + _FAR * (1 - share.sum())
        features[i, 1] = log.min()
        features[i, 2:-2] = [share[distance <= part * cache].sum() for part in CACHE_PARTS]
        features[i, -2] = share[np.array(made) == i - 1].sum()
        features[i, -1] = share.sum()
    # A result that is never used again counts as used infinitely far ahead.
    until = np.where(next_use >= 0, touched[next_use] - touched[np.arange(count) + 1], np.inf)
    ahead = np.where(next_use >= 0, _log_ratio(np.where(next_use >= 0, until, 1.0), cache), _FAR)
    return [*features.T, ahead, np.log1p(users)]


def _sizes(lowered: LoweredProgram, cache: float) -> list[np.ndarray]:
    """Working sets of the program and of the innermost loop, and how often it runs."""
    kernels = lowered.kernels
    count = len(kernels)
    every = sum(k.bytes for k in kernels)
    # A loop's working set is what its body touches in one iteration: later iterations find it in a
    # cache of that size.
    inside: dict[tuple[str, ...], float] = {}
    for kernel in kernels:
        inside[kernel.scope] = inside.get(kernel.scope, 0.0) + kernel.bytes
    return [
        np.full(count, _log_ratio(np.array(every), cache)),
        np.full(count, _log_ratio(np.array(lowered.peak_memory_bytes), cache)),
        _log_ratio(np.array([inside[k.scope] if k.scope else every for k in kernels]), cache),
        np.array([len(k.scope) for k in kernels]),
        np.log2(np.maximum([k.multiplicity for k in kernels], 1.0)),
    ]


def _beside(
    latency_s: np.ndarray, kernels: Sequence[Kernel], device: DeviceSpec
) -> list[np.ndarray]:
    """Concurrency of each kernel with others, and the hidden share of the program's time."""
    times = durations(latency_s, kernels) * np.array([k.multiplicity for k in kernels])
    # Predicted times suffice: only the order and overlap that they imply matter.
    line = timeline(times, kernels, device)
    # Integral over time of the number of running kernels: over a kernel's own span it counts the
    # kernel itself and all concurrent ones.
    edges = np.unique(np.concatenate([line.start, line.end]))
    opened = np.searchsorted(np.sort(line.start), edges, side="right")
    closed = np.searchsorted(np.sort(line.end), edges, side="right")
    busy = np.concatenate([[0.0], np.cumsum((opened - closed)[:-1] * np.diff(edges))])
    work = np.interp(line.end, edges, busy) - np.interp(line.start, edges, busy)
    others = np.where(times > 0, work / np.maximum(times, SMALLEST) - 1.0, 0.0)
    overlap = 1.0 - line.makespan / max(float(times.sum()), SMALLEST)
    return [np.clip(others, 0.0, line.workers), np.full(len(kernels), overlap)]


def _neighbours(latency_s: np.ndarray, kernels: Sequence[Kernel], cache: float) -> list[np.ndarray]:
    """Times of the kernels before and after, the position, and the share of the program."""
    count = len(kernels)
    # Neighbours are the kernels that run before and after; tuples, parameters etc. take no time.
    timed = np.array([k.takes_time for k in kernels])
    log = np.log(np.maximum(latency_s, SMALLEST))
    places = np.flatnonzero(timed)
    rank = np.cumsum(timed) - timed
    before = np.where(rank > 0, rank - 1, -1)
    after = rank + timed
    previous, following, size = np.zeros(count), np.zeros(count), np.full(count, -_FAR)
    held = before >= 0
    previous[held] = log[places[before[held]]] - log[held]
    size[held] = _log_ratio(np.array([kernels[j].bytes for j in places[before[held]]]), cache)
    more = after < len(places)
    following[more] = log[places[after[more]]] - log[more]
    times = durations(latency_s, kernels) * np.array([k.multiplicity for k in kernels])
    total = max(float(times.sum()), SMALLEST)
    copies = _copies(kernels)
    return [
        previous,
        following,
        size,
        np.arange(count) / count,
        (np.cumsum(times) - times) / total,
        log,
        np.log(np.maximum(times / total, 1e-9)),
        np.full(count, np.log(total)),
        np.full(count, np.log(max(len(places), 1))),
        np.log(copies),
    ]


def _own(kernels: Sequence[Kernel], cache: float) -> list[np.ndarray]:
    """The kernel's own size and intensity, with which the effect of the context varies."""
    size = np.array([k.bytes for k in kernels])
    flops = np.array([k.flops for k in kernels])
    written = np.array([k.bytes_out for k in kernels])
    intensity = np.log2(np.maximum(flops, 1.0) / np.maximum(size, 1.0))
    return [_log_ratio(size, cache), intensity, written / np.maximum(size, 1.0)]


def _copies(kernels: Sequence[Kernel]) -> np.ndarray:
    """Number of equal kernels in the program, including itself, shape ``(n,)``."""
    count: dict[str, int] = {}
    for kernel in kernels:
        count[kernel.hash] = count.get(kernel.hash, 0) + 1
    return np.array([count[k.hash] for k in kernels], np.float64)


def _log_ratio(size: np.ndarray, cache: float) -> np.ndarray:
    """``log2(size / cache)``, within ±12."""
    return np.asarray(np.clip(np.log2(np.maximum(size, 1.0) / cache), -_FAR, _FAR))
