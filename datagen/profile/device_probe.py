"""Measures a device: peaks, memory levels, floor, gaps and dispatch, in less than a minute.

Durations are those of single kernels in profiler traces, which exclude the host's dispatch. Rates
come from medians over repeats; a peak is the best over several sizes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ProfileError
from ...features.devices.device import DeviceSpec, MemoryLevel, local_device_name, usable_cores
from ...features.devices.identity import (
    ANCHORS,
    CACHE_BYTES,
    MEASURED,
    SAME_CLASS,
    SINGLE_THREAD,
)
from ...features.ir.program import HLO_NAMES
from . import host
from .anchors import READINGS, present_anchors, typical
from .runner import Runner, wait
from .trace import trace

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

logger = logging.getLogger(__name__)

#: Sides of square products, from one that fills the device to one at its plateau; larger ones would
#: take seconds on a slow device.
_MATRIX_SIZES = {"cpu": (256, 512, 1024), "gpu": (2048, 4096, 8192), "tpu": (2048, 4096, 8192)}
# f32 comes first, because the budget may end before the others.
_MATRIX_TYPES = ("float32", "bfloat16", "float16", "float64", "int8")
_VECTOR_TYPES = ("float32", "bfloat16", "float16", "float64", "int32")
#: Multiply-adds per element of a chain: 128 FLOPs for 12 bytes are bound by arithmetic.
_CHAIN = 64
#: Elements of a chain that XLA runs on one thread, since its CPU backend gives each thread at least
#: 100,000 operations.
_THREAD_ELEMENTS = 1024
#: Largest working sets of the probe, beyond any cache: 256 MiB on a CPU, 2 GiB on a GPU.
_MEMORY_SET = {"cpu": float(1 << 28), "gpu": float(1 << 31)}
#: If a product of a type takes longer than this, the next size, with eight times the work, is
#: skipped: types without hardware support would use up the budget.
_SLOW_SECONDS = 0.1
#: Executions per median: enough to outvote three disturbed ones.
_REPEATS = 7
#: Approximate resolution of the profiler's clock, in seconds; a floor of 0 would divide by zero.
_MIN_FLOOR = 1e-7


def probe_device(budget_s: float) -> DeviceSpec:
    """Measure JAX's default device.

    Args:
        budget_s: Seconds after which no further size or type is started.

    Returns:
        The device, with every rate that could be measured in time.

    Raises:
        ProfileError: The profiler shows no kernel.
    """
    import jax

    end = time.monotonic() + budget_s
    device = jax.devices()[0]
    platform = device.platform
    memory = host.memory_bytes()
    # Before and after everything else, so that together they cover the time of the ceilings.
    anchors = [present_anchors(READINGS // 2)]
    about = _described(device)
    # Memory first, with 60 % of the budget: programs depend on its curve more than on rare types.
    levels = _memory_levels(platform, memory, end - 0.4 * budget_s)
    launches = [_floor_and_gap()]
    # f32 first: with little time left the rarer types fall back on it.
    matrix = _rates(_MATRIX_TYPES, lambda t: _matrix_rate(t, platform, end), end)
    vector = _rates(_VECTOR_TYPES, lambda t: _vector_rate(t, platform), end)
    launches.append(_floor_and_gap())
    anchors.append(present_anchors(READINGS // 2))
    if platform == "cpu":
        # Once more, at another time: a virtual processor that shares its core runs at half its
        # speed for seconds, and a ceiling is what the machine reaches at its best.
        _raise(matrix, {HLO_NAMES["float32"]: _matrix_rate("float32", platform, math.inf)})
        _raise(vector, {HLO_NAMES["float32"]: _vector_rate("float32", platform)})
        about[SINGLE_THREAD] = max(float(str(about[SINGLE_THREAD])), _single_thread_rate())
    launches.append(_floor_and_gap())
    # Single readings on a shared machine differ by a factor of two within seconds, gaps by more.
    floor, gap = np.median(launches, axis=0).tolist()
    return DeviceSpec(
        name=local_device_name(),
        platform=platform,
        peak_flops=matrix,
        vector_flops=vector,
        levels=levels,
        floor=floor,
        launch_gap=gap,
        dispatch=_dispatch(),
        core_count=int(getattr(device, "core_count", 0) or usable_cores()),
        clock_hz=host.clock_hz(),
        memory_bytes=memory,
        source=MEASURED,
        extra=about | {ANCHORS: typical(anchors)},
    )


def probe_ceilings() -> DeviceSpec:
    """Measure f32 rates, one thread and main memory of JAX's default device, within seconds.

    Sufficient to check that the device performs as before (``identity.compare_ceilings``), but not
    to predict with.

    Raises:
        ProfileError: The profiler shows no kernel.
    """
    import jax

    device = jax.devices()[0]
    platform = device.platform
    memory = host.memory_bytes()
    # At most an eighth of the memory, which leaves room for copies on a small host.
    working_set = min(_MEMORY_SET.get(platform, _MEMORY_SET["gpu"]), memory / 8 or math.inf)
    matrix, vector = _matrix_rate("float32", platform, math.inf), _vector_rate("float32", platform)
    bandwidth = _memory_rate(working_set)
    if not (matrix and vector and bandwidth):
        raise ProfileError("the profiler shows no kernel of this machine's ceilings")
    return DeviceSpec(
        name=local_device_name(),
        platform=platform,
        peak_flops={"f32": matrix},
        vector_flops={"f32": vector},
        levels=(MemoryLevel(memory, bandwidth),),
        floor=_MIN_FLOOR,
        source=MEASURED,
        extra=_described(device),
    )


def _described(device: jax.Device) -> dict[str, object]:
    """Entries of a description besides the rates used for predictions."""
    import jax

    about: dict[str, object] = {"device_kind": device.device_kind, "jax": jax.__version__}
    if device.platform == "cpu":
        about[SINGLE_THREAD] = _single_thread_rate()
        about[CACHE_BYTES] = max(_cache_capacities(), default=0.0)
    return about


def _single_thread_rate() -> float:
    return _chain_rate("float32", _THREAD_ELEMENTS, repeats=200)


def _raise(rates: dict[str, float], again: Mapping[str, float]) -> None:
    """Keep the better of two measurements of the same rates."""
    for dtype, rate in again.items():
        rates[dtype] = max(rates.get(dtype, 0.0), rate)


def _rates(dtypes: Sequence[str], measure: Callable[[str], float], end: float) -> dict[str, float]:
    rates: dict[str, float] = {}
    for dtype in dtypes:
        # At least one rate, whatever the time: a device without any cannot be described.
        if rates and time.monotonic() > end:
            break
        try:
            rate = measure(dtype)
        except Exception as error:  # compilers reject types with various exceptions
            logger.info("%s cannot be measured: %s", dtype, error)
            continue
        if rate > 0:
            rates[HLO_NAMES[dtype]] = rate
    return rates


def _kernel_seconds(
    function: Callable[..., jax.Array],
    *args: jax.Array,
    repeats: int = _REPEATS,
    donate: bool = False,
) -> float:
    """Median seconds of each kernel of a function, summed; 0 without events."""
    import jax

    compiled = jax.jit(function, donate_argnums=(0,) if donate else ()).lower(*args).compile()
    runner = Runner(
        lambda arrays: [compiled(*arrays)], lambda _: args, aliases=[(0, 0)] if donate else []
    )
    # The first execution warms up. About a second in all, but at least three executions.
    once = min(runner.step() for _ in range(2))
    repeats = max(3, min(repeats, int(1.0 / max(once, 1e-6))))
    durations = trace(lambda: [runner.step() for _ in range(repeats)])
    return sum(float(np.median(seconds)) for seconds in durations.values() if seconds)


def _array(shape: tuple[int, ...], dtype: str) -> jax.Array:
    import jax
    import jax.numpy as jnp

    # Without this JAX would silently turn float64 into float32.
    with jax.enable_x64(True):
        return wait(jnp.ones(shape, dtype))


def _matrix_rate(dtype: str, platform: str, end: float) -> float:
    import jax
    import jax.numpy as jnp

    best = 0.0
    for n in _MATRIX_SIZES.get(platform, _MATRIX_SIZES["gpu"]):
        # int8 products accumulate in int32 on every matrix unit; int8 results would overflow.
        accumulate = jnp.int32 if dtype == "int8" else None

        def product(a: jax.Array, b: jax.Array, out: DTypeLike | None = accumulate) -> jax.Array:
            return jax.lax.dot(a, b, preferred_element_type=out)

        with jax.enable_x64(True):
            a, b = _array((n, n), dtype), _array((n, n), dtype)
            seconds = _kernel_seconds(product, a, b)
        if seconds > 0:
            best = max(best, 2.0 * n**3 / seconds)
        if seconds > _SLOW_SECONDS or time.monotonic() > end:
            break
    return best


def _vector_rate(dtype: str, platform: str) -> float:
    """Rate of a long chain of multiply-adds on data that fits into a near cache."""
    # 256 KiB in f32 on a CPU, as large as a core's L2; an accelerator needs 2^24 elements to fill
    # its threads, and the chain's intensity makes up for the traffic.
    return _chain_rate(dtype, 1 << (16 if platform == "cpu" else 24), repeats=15)


def _chain_rate(dtype: str, size: int, repeats: int) -> float:
    import jax

    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = x * y + y
        return x

    with jax.enable_x64(True):
        x, y = _array((size,), dtype), _array((size,), dtype)
        seconds = _kernel_seconds(chain, x, y, repeats=repeats)
    return 2.0 * _CHAIN * size / seconds if seconds > 0 else 0.0


def _memory_levels(platform: str, memory: float, end: float) -> tuple[MemoryLevel, ...]:
    # Powers of two from a set inside the first level to one beyond the last cache: 64 KiB to
    # 256 MiB on a CPU, 2 MiB to 2 GiB elsewhere.
    top = 28 if platform == "cpu" else 31
    bottom = 16 if platform == "cpu" else 21
    sizes: list[float] = []
    rates: list[float] = []
    for power in range(bottom, top + 1):
        working_set = float(1 << power)
        # Seven points suffice for a curve if time is short.
        if working_set > memory / 8 > 0 or (len(rates) > 6 and time.monotonic() > end):
            break
        rate = _memory_rate(working_set)
        if rate > 0:
            sizes.append(working_set)
            rates.append(rate)
    if not rates:
        raise ProfileError("the profiler shows no kernel that moves data")
    capacities = _cache_capacities() if platform == "cpu" else []
    return levels_from_curve(sizes, rates, capacities, memory or sizes[-1])


def _memory_rate(working_set: float) -> float:
    """Bytes/s of an element-wise kernel on a working set; 0 without events."""
    count = int(working_set) // 12  # x and y are read, z is written, 4 bytes each
    x, y = _array((count,), "float32"), _array((count,), "float32")
    # In place, since fresh pages for a result cost more than moving the data.
    seconds = _kernel_seconds(_axpy, x, y, donate=True)
    return 12.0 * count / seconds if seconds > 0 else 0.0


def _axpy(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * 1.5 + y


def _cache_capacities() -> list[float]:
    """Bytes of the caches from L2 outwards, summed over the cores of this process."""
    # L1 is left out: there, instructions determine a kernel's time.
    cores = usable_cores()
    caches = sorted(host.cpu_caches().items())
    return [size * max(1, cores // shared) for level, (size, shared) in caches if level >= 2]


def levels_from_curve(
    sizes: Sequence[float], rates: Sequence[float], capacities: Sequence[float], memory: float
) -> tuple[MemoryLevel, ...]:
    """Derive memory levels from bandwidth against working-set size.

    Args:
        sizes: Working sets in bytes, increasing.
        rates: Bandwidth in bytes/s at each.
        capacities: Bytes of the caches, smallest first; empty to find one cache from the curve.
        memory: Bytes of main memory.

    Returns:
        Levels with falling bandwidth. The rate of a cache is the best among the working sets that
        fill an eighth to three quarters of it, as it is shared with other data; that of memory is
        the median of the sets beyond twice the last cache.
    """
    caches = list(capacities) or _knee(sizes, rates)
    levels: list[MemoryLevel] = []
    below = 0.0
    for capacity in caches:
        low = max(below, capacity / 8)
        # From an eighth of the level, or the level below, up to three quarters: fuller sets already
        # miss, because code and other data share the cache.
        inside = [r for s, r in zip(sizes, rates, strict=True) if low < s <= 0.75 * capacity]
        if inside:
            levels.append(MemoryLevel(capacity, float(max(inside))))
            below = capacity
    # Without a set beyond the caches, the largest one is used.
    beyond = [r for s, r in zip(sizes, rates, strict=True) if s > 2 * below] or list(rates[-1:])
    levels.append(MemoryLevel(memory, float(np.median(beyond[-3:]))))
    kept = levels[-1:]
    # From the outermost inwards, each compared with the next one kept. The last cache must be
    # faster than memory by more than noise (5 %); nearer ones by more than the difference between
    # two readings of one rate. On a shared machine one probe found an L2 of 131 GB/s within an L3
    # of 85 GB/s, and another none: an unstable level moves all features relative to the nearest
    # one.
    for level in reversed(levels[:-1]):
        least = 1.05 if len(kept) == 1 else SAME_CLASS
        if level.bandwidth > least * kept[0].bandwidth:
            kept.insert(0, level)
    return tuple(kept)


def _knee(sizes: Sequence[float], rates: Sequence[float]) -> list[float]:
    """The largest working set that runs well above the bandwidth of memory."""
    if len(rates) < 3:
        return []
    # The geometric mean of cache and memory bandwidth marks the transition. The last fast set is
    # assumed to fill three quarters of the cache, as in ``levels_from_curve``; without a ratio of
    # 1.3 the curve shows no cache (engineering estimates; not fitted).
    halfway = float(np.sqrt(max(rates) * np.median(rates[-2:])))
    fast = [s for s, r in zip(sizes, rates, strict=True) if r > halfway]
    return [max(fast) / 0.75] if fast and max(rates) > 1.3 * rates[-1] else []


def _floor_and_gap() -> tuple[float, float]:
    """The smallest duration of a kernel, and the gap from one kernel to the next."""
    # Minimal kernels: eight additions, and products so short that gaps dominate.
    small = _array((32, 32), "float32")
    floor = _kernel_seconds(lambda x: x + 1.0, _array((8,), "float32"), repeats=200)
    # Dependent kernels: wall time beyond their durations is gaps and dispatch; the difference
    # between two lengths cancels the dispatch.
    (idle_a, count_a), (idle_b, count_b) = (_chain_idle(small, length) for length in (8, 72))
    gap = (idle_b - idle_a) / max(count_b - count_a, 1)
    return max(floor, _MIN_FLOOR), max(gap, 0.0)


def _chain_idle(x: jax.Array, length: int) -> tuple[float, int]:
    """Idle seconds, and number of kernels, of a chain of products (which are not fused)."""
    import jax

    def chain(y: jax.Array) -> jax.Array:
        for _ in range(length):
            y = y @ y
        return y

    compiled = jax.jit(chain).lower(x).compile()
    walls: list[float] = []
    durations = trace(lambda: walls.append(_wall(compiled, x, repeats=50)))
    busy = sum(float(np.median(seconds)) for seconds in durations.values() if seconds)
    return walls[0] - busy, len(durations)


def _dispatch() -> float:
    """Wall time of a near-empty program, from the call until its result is ready."""
    import jax

    x = _array((1,), "float32")
    return _wall(jax.jit(lambda x: x + 1.0).lower(x).compile(), x)


def _wall(compiled: Callable[..., object], *args: jax.Array, repeats: int = 200) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(compiled(*args))
        samples.append(time.perf_counter() - start)
    return float(np.median(samples))
