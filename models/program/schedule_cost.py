"""Cost terms of a schedule: sum, critical path, makespan, overheads, shares by kind.

Includes default overheads beyond the kernels, for platforms without measured programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import KINDS, Kernel, LoweredProgram
from ...features.operators.physics import resident_share
from ...features.table.columns import CODE, INDEX
from ...features.table.roofline import compute_seconds, main_bytes, peaks
from ...features.table.row import rows
from ...simulate.program.list_schedule import Timeline, critical_path, list_schedule

#: Least predicted time of a program (s); keeps logarithms finite for empty programs.
SMALLEST = 1e-7
#: Largest buffer that glibc keeps for reuse (DEFAULT_MMAP_THRESHOLD_MAX of malloc.c).
_KEPT_BYTES = 32 * 2**20
#: Bytes of a page, and seconds of a first touch: 12,500 faults took 20 ms on a virtual machine with
#: two cores of an AMD EPYC, and 16,384 of a result 33; bare metal takes less.
_PAGE, _FAULT_S = 4096, 2e-6
#: Most kernels of a computation that XLA:CPU runs one after the other on the calling thread,
#: without a task for each (``execute_sequential_num_thunks_threshold`` of its ThunkExecutor, from
#: memory).
_SEQUENTIAL = 8
#: Most bytes that a kernel finds in the first cache of its core in each iteration: usually 32 KiB.
_FIRST_CACHE = 32 * 2**10
#: Least seconds of a kernel that is called in line: loops over three to eight kernels of 64 to 512
#: numbers took 0.03 to 0.15 µs for each on a virtual machine of an AMD EPYC.
INLINE_S = 3e-8


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """Times of a program in seconds, including loop iterations.

    Attributes:
        total: Sum over all kernels without overlap; an asynchronous pair counts once.
        critical: Longest chain of dependent kernels.
        makespan: Time on the device's workers, in schedule order, with one communication channel.
        executions: Executions of kernels that take time, those called in line in a loop once.
        gaps: Executions times the device's gap between kernels.
        floors: Executions times the device's floor.
        dispatch: The device's dispatch time.
        loop_share: Share of ``total`` inside loops.
        iterations: Most executions of one kernel.
        shares: Share of ``total`` by kind, in the order of ``KINDS``.
        concentration: Sum of the squared shares of ``total`` by distinct kernel: 1 for a single
            kernel, ``1 / n`` for ``n`` equal shares. All executions of a kernel share its error.
    """

    total: float
    critical: float
    makespan: float
    executions: float
    gaps: float
    floors: float
    dispatch: float
    loop_share: float
    iterations: float
    shares: tuple[float, ...]
    concentration: float = 1.0

    def together(self, correlation: float) -> float:
        """``sqrt(ρ + (1 - ρ) Σ w²)``: error of the sum relative to fully correlated kernels.

        Args:
            correlation: Correlation ``ρ`` of the log errors of two kernels, from 0 to 1.
        """
        # Var(Σ e) of errors with equal correlation: ρ (Σ σ)² + (1 - ρ) Σ σ², over (Σ σ)².
        return sqrt(correlation + (1.0 - correlation) * self.concentration)

    @property
    def baseline(self) -> float:
        """Physics only: kernels one after the other, gaps between them, and the dispatch."""
        return self.total + self.gaps + self.dispatch


def schedule_cost(
    latency_s: np.ndarray, lowered: LoweredProgram, device: DeviceSpec
) -> ScheduleCost:
    """Costs of a program from the latency of one execution of each kernel.

    Args:
        latency_s: Seconds, in schedule order, shape ``(n_kernels,)``.
        lowered: The schedule.
        device: Device it runs on: a CPU runs independent kernels on its cores at once, others run
            them one after the other next to one stream of communication.
    """
    kernels = lowered.kernels
    counts = np.array([k.multiplicity for k in kernels], np.float64)
    times = durations(latency_s, kernels) * counts
    total = max(float(times.sum()), SMALLEST)
    by_kind = dict.fromkeys(KINDS, 0.0)
    for kernel, time in zip(kernels, times.tolist(), strict=True):
        by_kind[kernel.kind] = by_kind.get(kernel.kind, 0.0) + time
    takes_time = np.array([k.takes_time for k in kernels], bool)
    # Kernels that are called in line have no overhead after the first iteration.
    own_runs = np.where(inline(kernels, device), np.minimum(counts, 1.0), counts)
    executions = float(own_runs[takes_time].sum())
    looped = sum(t for k, t in zip(kernels, times.tolist(), strict=True) if k.scope)
    return ScheduleCost(
        total=total,
        critical=max(critical_path(times, reads(kernels)), SMALLEST),
        makespan=max(timeline(times, kernels, device).makespan, SMALLEST),
        executions=executions,
        gaps=executions * device.launch_gap,
        floors=executions * device.floor,
        dispatch=device.dispatch,
        loop_share=looped / total,
        iterations=float(counts.max(initial=1.0)),
        shares=tuple(by_kind[kind] / total for kind in KINDS),
        concentration=_concentration(times, kernels),
    )


def timeline(times: np.ndarray, kernels: Sequence[Kernel], device: DeviceSpec) -> Timeline:
    """Place kernels on a device's workers, with one channel for asynchronous copies.

    Args:
        times: Seconds of all executions of each kernel, shape ``(n_kernels,)``.
        kernels: Kernels in schedule order.
        device: Device that they run on.
    """
    # XLA's CPU runtime executes independent kernels on a pool of threads; GPUs and TPUs run one
    # compute stream, with asynchronous copies beside it.
    workers = max(1, device.core_count) if device.platform == "cpu" else 1
    channel = [k.async_role == "start" for k in kernels]
    return list_schedule(times, reads(kernels), workers, channel)


def inline(kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Mask of kernels that XLA:CPU calls in line in every iteration of a loop, shape ``(n,)``.

    They belong to a short body and have few bytes. What was measured of such a kernel alone is
    mostly its start, which the loop does not pay.
    """
    if device.platform != "cpu":
        return np.zeros(len(kernels), bool)
    bodies = Counter(k.scope for k in kernels if k.takes_time)
    return np.array(
        [
            bool(k.scope) and bodies[k.scope] <= _SEQUENTIAL and k.bytes <= _FIRST_CACHE
            for k in kernels
        ],
        bool,
    )


def _concentration(times: np.ndarray, kernels: Sequence[Kernel]) -> float:
    """Sum of squared shares by distinct kernel; 1 without any time."""
    # Executions of one kernel share its error, so they form one term of the sum.
    by_hash: dict[str, float] = {}
    for kernel, time in zip(kernels, times.tolist(), strict=True):
        by_hash[kernel.hash] = by_hash.get(kernel.hash, 0.0) + time
    total = sum(by_hash.values())
    return sum((time / total) ** 2 for time in by_hash.values()) if total > 0 else 1.0


def durations(latency_s: np.ndarray, kernels: Sequence[Kernel]) -> np.ndarray:
    """Time that each kernel occupies its worker, one execution, shape ``(n_kernels,)``.

    An asynchronous pair counts once, on its start, with the longer of its times.
    """
    times = np.array(latency_s, np.float64)
    for index, kernel in enumerate(kernels):
        if kernel.takes_time:
            continue
        if kernel.async_peer >= 0:
            # Start and done describe one transfer, whose time may be on either.
            times[kernel.async_peer] = max(times[kernel.async_peer], times[index])
        times[index] = 0.0
    return times


def reads(kernels: Sequence[Kernel]) -> list[tuple[int, ...]]:
    """Positions that each kernel waits for: its operands, and for a done its start."""
    return [(*k.operands, k.async_peer) if k.async_role == "done" else k.operands for k in kernels]


def first_touch_s(lowered: LoweredProgram, device: DeviceSpec) -> float:
    """Upper limit of the seconds for touching new pages in each run; 0 except on CPUs.

    XLA:CPU allocates all temporaries of a program as one buffer, and each result as another, except
    those in the place of donated arguments. A large buffer is requested from and returned to the
    system, so that every run faults on each of its pages.
    """
    if device.platform != "cpu" or lowered.peak_memory_bytes <= _KEPT_BYTES:
        return 0.0
    if (module := lowered.module) is None:
        if not lowered.hlo:
            return 0.0
        # Imported here: the readers take a while, and steps on clusters have no program.
        from ...features.ir.hlo_reader import parse_hlo

        module = parse_hlo(lowered.hlo)
    entry = module.entry_computation
    outside = sum(op.result_bytes for op in (*entry.parameters, entry.root_op))
    donated = {index for index, _ in module.aliases}
    results = [r.nbytes for i, r in enumerate(entry.root_op.results) if i not in donated]
    buffers = (lowered.peak_memory_bytes - outside, *results)
    return sum(size for size in buffers if size > _KEPT_BYTES) / _PAGE * _FAULT_S


def least_wall(lowered: LoweredProgram, device: DeviceSpec) -> float:
    """Physical lower limit of a program's time in seconds.

    From its products at the peak of their formats, with convolutions by Winograd's F(2 × 2, r × r)
    if that has fewer multiplications (larger tiles were not seen to gain more); and from its
    arguments and results at the rate of main memory, or of the cache if they fit. On a GPU, kernels
    run one after the other, and each moves its bytes at least through the cache.
    """
    # Kernels of tables only have features, without a body whose work could be counted.
    kernels = [k for k in lowered.kernels if k.takes_time and k.body.entry]
    row = rows(kernels)
    times = np.array([k.multiplicity for k in kernels], np.float64)
    matrix, vector = peaks(row, device)
    products, other = compute_seconds(row, device, transcendental=0.0)
    # Small products may have become sums, which take at least the time on the faster unit.
    products = products / saved(row) + other * vector / np.maximum(matrix, vector)
    cache = max(level.bandwidth for level in device.levels)
    if device.platform == "gpu":
        linked = row[:, INDEX["kind"]] == CODE["kind"]["collective"]
        moved = np.where(linked, 0.0, main_bytes(row, device))
        products = np.maximum(products, moved / cache)
    entry = lowered.entry_bytes
    # A TPU refills its on-chip memory in each run.
    near = 0.0
    if device.platform != "tpu":
        near = float(resident_share(np.array(entry), np.array(max(device.cache_bytes, 1.0))))
    moving = entry * (near / cache + (1.0 - near) / device.bandwidth)
    return max(float((products * times).sum()), moving)


def saved(row: np.ndarray) -> np.ndarray:
    """Factor by which Winograd's algorithm may reduce multiplications, ``(n,)``; 1 for products.

    ``F(2, r)`` takes ``r + 1`` multiplications for two results of a window of ``r``, where the
    definition takes ``2r`` (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks,
    2016): 2.25 for 3 × 3.
    """
    rank = np.maximum(row[:, INDEX["conv_rank"]], 1.0)
    side = np.maximum(row[:, INDEX["conv_window"]], 1.0) ** (1.0 / rank)
    return np.asarray((2.0 * side / (side + 1.0)) ** rank)


@dataclass(frozen=True)
class Overhead:
    """Default overheads of a platform, and the correlation of kernel errors.

    Attributes:
        gap_low: Least fraction of the device's gap between kernels in addition to the kernels'
            times (kernels replayed as a graph).
        gap: Expected fraction.
        gap_high: Largest fraction (every kernel launched individually).
        correlation: Correlation of the log errors of two kernels of a program.
        overlap: Fraction of the schedule's possible overlap: 1 if asynchronous kernels run next to
            the others.
    """

    # Without measured programs, half of the gap is expected: between graph-replayed kernels (no
    # gap) and individual launches (full gap).
    gap_low: float = 0.0
    gap: float = 0.5
    gap_high: float = 1.0
    correlation: float = 1.0
    overlap: float = 0.0

    def wall(self, cost: ScheduleCost) -> float:
        """Expected wall time in seconds."""
        return self._busy(cost) + self.gap * cost.gaps + cost.dispatch

    def _busy(self, cost: ScheduleCost) -> float:
        return (1.0 - self.overlap) * cost.total + self.overlap * cost.makespan

    def ends(
        self, cost: ScheduleCost, low: ScheduleCost, high: ScheduleCost
    ) -> tuple[float, float]:
        """Interval bounds of the wall time, seconds.

        Args:
            cost: Cost of the predicted latencies.
            low: Cost of the lower bounds of the kernels' intervals.
            high: Cost of the upper bounds.
        """
        together = cost.together(self.correlation)
        wall = self.wall(cost)
        # Errors of the gaps add to those of the kernels: both extremes are possible at once.
        below = (
            together * max(self._busy(cost) - self._busy(low), 0.0)
            + (self.gap - self.gap_low) * cost.gaps
        )
        above = together * max(self._busy(high) - self._busy(cost), 0.0)
        return wall - below, wall + above + (self.gap_high - self.gap) * cost.gaps

    def to_dict(self) -> dict[str, float]:
        """Convert to plain data for the manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Overhead:
        """Read :meth:`to_dict`'s data."""
        return cls(**data)


#: Overheads of platforms without measured programs: on a TPU asynchronous copies run beside the
#: other kernels, and kernels are not launched from the host (docs/tpu.md).
UNMEASURED: Mapping[str, Overhead] = {
    "tpu": Overhead(gap_low=0.0, gap=0.0, gap_high=0.0, overlap=1.0)
}
