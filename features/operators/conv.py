"""Physics of convolutions: eager calls as products, tuned libraries by algorithm.

Libraries for convolutions in one to three dimensions, forward and both gradients, time several
algorithms and keep the fastest. Each algorithm is estimated separately; the estimate is their soft
minimum. The ratios to it are features, from which a regressor learns when a library has an
algorithm and how well it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .columns import OpTable
from .gemm import SHOWN
from .machine import Machine
from .physics import (
    Physics,
    combine,
    fill,
    fills,
    fitted,
    least_seconds,
    log2,
    logs,
    multiples,
    resident_share,
    stream_seconds,
)
from .schema import DTYPES
from .tiles import tile_seconds, tile_waves

FIT = fitted("convolutions")
_COSTS = FIT.tables["costs"]
#: Smallest fraction of a matrix unit for which algorithms on it are considered; below it they never
#: pay. Rates of the same unit in two formats differ by rounding.
_LEAST = 0.05
#: Slowdown of matrix-unit algorithms where the matrix unit is no faster than the vector unit.
#: Engineering estimate, small enough that a change of one per cent in the rate causes no jump.
_PARTLY = 3.7
#: Directions in column ``op``: the result, the gradient of the input, that of the weights.
DIRECTIONS = ("fwd", "bwd_data", "bwd_weights")
#: Largest reduction of multiplications by a Winograd transform of 3 × 3 filters (Lavin and Gray,
#: Fast Algorithms for Convolutional Neural Networks, 2016): kernels with larger tiles save a factor
#: of 4.
WINOGRAD_SAVING = 4.0
#: Exponent of the soft minimum over algorithms; sharp, because only one of them runs.
_SHARPNESS = 6.0


def conv(table: OpTable) -> Physics:
    """Estimate a square, dense 2-D convolution in NCHW without bias.

    It is treated as an implicit product ``m = batch × out²``, ``n = cout``, ``k = cin × ksize²``
    (Chetlur et al., cuDNN: Efficient Primitives for Deep Learning, 2014). A 3 × 3 filter with
    stride 1 may run as a Winograd transform with 2.25 times fewer products (Lavin and Gray, 2016).
    """
    batch, cin, cout, size, inside, stride, pad = table.numbers(
        "batch", "cin", "cout", "ksize", "insize", "stride", "pad"
    )
    mc = table.machine(multiprocessors=True)
    peak = np.minimum(table.matrix_peak(), table.power_rate())
    out = np.maximum(np.floor((inside + 2 * pad - size) / stride) + 1, 1)
    m, n, k = batch * out**2, cout, cin * size**2
    product = (np.ones(len(m)), m, n, k)
    # All published convolutions are in fp32, four bytes per element.
    moved = 4 * (batch * cin * inside**2 + cin * cout * size**2 + m * n)
    t_tiles, waves, tile_use = tile_seconds(product, peak, mc)
    t_compute = 2 * m * n * k / peak
    winograd = (size == 3) & (stride == 1)
    # F(2 × 2, 3 × 3) saves a factor of 2.25 in products, but its transforms cost vector work and
    # libraries do not always choose it: 1.6 is an engineering estimate.
    t_tiles = np.where(winograd, t_tiles / 1.6, t_tiles)
    resident = resident_share(moved, mc.cache, 1.0, 0.5)
    t_memory = stream_seconds(moved, resident, mc)
    floor = np.full(len(m), fitted("products").eager_floor_s)
    base = floor + combine(t_tiles, t_memory)
    features = {
        # Contribution of each part to the estimate, as for products (gemm.py).
        **logs(tiles_base=t_tiles / base, memory_base=t_memory / base),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=waves),
        "wave_fill": fill(waves),
        "tile_use": tile_use,
        "resident": resident,
        # Sizes as a product, then as a convolution: libraries choose the algorithm by both.
        **logs(m=m, n=n, k=k, batch=batch, cin=cin, size=inside, out=out),
        "ksize": size,
        "stride": stride,
        "pad": pad,
        "winograd": winograd * 1.0,
        # Alignments required by vectorised loads and tiles of output channels.
        **multiples(cin=(cin, (4, 32)), cout=(cout, (32,)), out=(out, (8,))),
        "cout_fill": cout / (np.ceil(cout / 64) * 64),
        **tile_waves(product, mc, SHOWN),
        "log_moved_cache": np.clip(log2(moved / mc.cache), -10, 10),
        **logs(balance=peak / mc.bandwidth, cores=mc.cores),
    }
    # The bound has to hold for whichever algorithm the library chose.
    t_peak = 2 * m * n * k / table.matrix_peak() / np.where(winograd, 2.25, 1.0)
    return Physics(
        base,
        t_peak,
        least_seconds(moved, resident, mc),
        floor,
        2 * m * n * k,
        moved,
        features,
        specific=("log_moved_cache", "log_balance", "log_cores"),
        keys=("log_tiles_base", "log_memory_base", "log_m", "log_n", "log_k", "ksize", "stride"),
    )


@dataclass(slots=True)
class _Problem:
    """Sizes of ``n`` convolutions; shape ``(n,)`` each.

    Attributes:
        batch: Images.
        groups: Groups.
        cin: Input channels per group.
        cout: Output channels per group.
        inside: Input positions per image.
        outside: Output positions per image.
        taps: Weights of a filter per pair of channels.
        steps: Product of the strides.
    """

    batch: np.ndarray
    groups: np.ndarray
    cin: np.ndarray
    cout: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    taps: np.ndarray
    steps: np.ndarray


def library_conv(table: OpTable) -> Physics:
    """Estimate a convolution (:data:`DIRECTIONS`) as the fastest of a library's algorithms.

    Algorithms: an implicit product on matrix units (Chetlur et al., cuDNN: Efficient Primitives for
    Deep Learning, 2014), the same on transposed tensors, a product per image on unfolded columns,
    Winograd's transform, and direct sums on the vector unit.
    """
    one = _problem(table)
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    width = table.activation_bytes
    vector = _vector_rate(table)
    last = table.columns["channels_last"] > 0
    direction = {name: table.is_("op", name) for name in DIRECTIONS}
    m, n, k = _product(one, direction)
    flops = 2 * one.batch * one.outside * one.cout * one.groups * one.cin * one.taps
    x = width * one.batch * one.groups * one.cin * one.inside
    y = width * one.batch * one.groups * one.cout * one.outside
    w = width * one.groups * one.cin * one.cout * one.taps
    moved = x + w + y
    resident = resident_share(moved, mc.cache, 1.0, 0.5)
    t_memory = stream_seconds(moved, resident, mc)
    t_tiles, waves, use = tile_seconds((one.groups, m, n, k), peak, mc)
    t_sums = flops / vector
    ways = _ways(table, one, direction, (t_tiles, t_memory, t_sums, x + y), mc)
    stacked = np.stack(list(ways.values()))
    base = np.asarray((stacked**-_SHARPNESS).sum(axis=0) ** (-1 / _SHARPNESS))
    launches = np.array([_COSTS[name][0] for name in ways])[stacked.argmin(axis=0)] * 1e-6
    # The soft minimum is below the fastest algorithm, whose share of launches is kept.
    floor = launches * base / stacked.min(axis=0)
    numbers = table.columns
    features = {
        # Contribution of each part to the estimate, as for products (gemm.py).
        **logs(tiles_base=t_tiles / base, memory_base=t_memory / base),
        "floor_base": floor / base,
        **logs(sums_base=t_sums / base),
        # How much slower than the estimate each algorithm is; unavailable ones are far slower.
        **{f"log_{name}_base": np.minimum(log2(way / base), 20.0) for name, way in ways.items()},
        **logs(
            cycles=base * mc.clock,
            flop_cycles=flops / peak * mc.clock,
            intensity=flops / peak / t_memory,
            waves=waves,
        ),
        "wave_fill": fill(waves),
        "tile_use": use,
        "resident": resident,
        **{f"is_{name}": values * 1.0 for name, values in direction.items()},
        **{f"dtype_{d}": table.is_("dtype", d) * 1.0 for d in DTYPES["conv_nd"]},
        # Sizes as a product, then as a convolution: libraries choose the algorithm by both.
        **logs(m=m, n=n, k=k, batch=one.batch, groups=one.groups),
        "depthwise": ((one.cin == 1) & (one.groups > 1)) * 1.0,
        **logs(cin=one.cin, cout=one.cout, inside=one.inside, outside=one.outside),
        **logs(col=one.taps * one.outside / one.inside),
        "width_in": log2(numbers["w"]),
        **{name: numbers[name] for name in _SHOWN},
        "dilated": (numbers["dil_h"] * numbers["dil_w"] * numbers["dil_d"] > 1) * 1.0,
        "spatial": numbers["ndim"],
        "channels_last": last * 1.0,
        **_alignment(one, m, n, k),
        "log_moved_cache": np.clip(log2(moved / mc.cache), -10, 10),
        **logs(balance=peak / mc.bandwidth, matrix_vector=peak / vector, cores=mc.cores),
    }
    # The bound has to hold for whichever algorithm the library chose.
    t_peak = flops / np.maximum(peak, vector) / np.where(_has_winograd(table), WINOGRAD_SAVING, 1.0)
    return Physics(
        base,
        t_peak,
        least_seconds(moved, resident, mc),
        floor,
        flops,
        moved,
        features,
        specific=("log_moved_cache", "log_balance", "log_cores"),
        keys=("log_tiles_base", "log_memory_base", "log_m", "log_n", "log_k"),
    )


#: Columns used as features unchanged.
_SHOWN = ("kh", "kw", "kd", "stride_h", "stride_w", "stride_d", "pad_h", "pad_w")


def _problem(table: OpTable) -> _Problem:
    numbers = table.columns
    inside, outside = np.ones(len(table)), np.ones(len(table))
    taps, steps = np.ones(len(table)), np.ones(len(table))
    for axis in "dhw":
        size, filters, stride, pad, hole = (
            numbers[name]
            for name in (axis, f"k{axis}", f"stride_{axis}", f"pad_{axis}", f"dil_{axis}")
        )
        reach = (filters - 1) * hole + 1
        outside = outside * np.maximum(np.floor((size + 2 * pad - reach) / stride) + 1, 1)
        inside, taps, steps = inside * size, taps * filters, steps * stride
    groups = numbers["groups"]
    return _Problem(
        numbers["n"],
        groups,
        numbers["c"] / groups,
        numbers["k"] / groups,
        inside,
        outside,
        taps,
        steps,
    )


def _product(
    one: _Problem, direction: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``m``, ``n`` and ``k`` of one group's implicit product, shape ``(n,)`` each."""
    pixels = one.batch * one.outside
    m, n, k = pixels, one.cout, one.cin * one.taps
    data, weights = direction["bwd_data"], direction["bwd_weights"]
    # Each input position meets only the taps that match its offset within the stride.
    m = np.where(data, one.batch * one.inside, m)
    n = np.where(data, one.cin, n)
    k = np.where(data, one.cout * np.maximum(one.taps / one.steps, 1), k)
    m = np.where(weights, one.cout, m)
    n = np.where(weights, one.cin * one.taps, n)
    return m, n, np.where(weights, pixels, k)


def _ways(
    table: OpTable,
    one: _Problem,
    direction: dict[str, np.ndarray],
    times: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    mc: Machine,
) -> dict[str, np.ndarray]:
    """Return the seconds of each algorithm, infinite where unavailable, shape ``(n,)`` each.

    Args:
        table: The convolutions.
        one: Their sizes.
        direction: Rows of each of :data:`DIRECTIONS`.
        times: Seconds of the tiles, of the traffic and of the sums on the vector unit, and bytes of
            input and output.
        mc: Their devices.
    """
    tiles, memory, sums, images = times
    numbers = table.columns
    last = numbers["channels_last"] > 0
    # How much of a matrix unit the chip has for the format: none at the vector unit's rate, a full
    # one at twice that, as on nearly all measured chips; in between, its algorithms take longer.
    matrix = np.clip(np.log2(table.matrix_peak() / _vector_rate(table)), 0.0, 1.0)
    longer = _PARTLY ** (1 - matrix)
    flat = numbers["ndim"] < 3
    dense = one.groups == 1
    plain = (one.taps == 1) & (one.steps == 1)
    early = table.is_on(lambda device: not device.rules.untuned_convolutions)
    turn = 2 * images / mc.bandwidth
    columns = table.activation_bytes * one.groups * one.cin * one.taps * one.outside * one.batch
    summing = direction["bwd_weights"]
    never = np.full(len(table), np.inf)

    def only(where: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        return np.where(where, seconds, never)

    def cost(way: tuple[float, ...], work: np.ndarray) -> np.ndarray:
        return np.asarray(way[0] * 1e-6 + way[1] * work + way[2] * memory)

    # The product at the rate of the instructions that these kernels use.
    wider = np.where(early, 1.0, 2.0)
    slow = tiles * np.where(table.activation_bytes < 4, wider, 1.0)
    padded = sums * np.maximum(FIT.group_channels / one.cout, 1.0)
    alone = cost(_COSTS["single"], tiles) ** matrix
    alone = alone * cost(_COSTS["single_vector"], tiles) ** (1 - matrix)
    images_us = one.batch * np.where(summing, FIT.each_sum, FIT.each_image)
    unfolded = _COSTS["unfolded"][0] + FIT.each_unfolded * one.batch
    return {
        "turned": only(
            (matrix > _LEAST) & flat & dense & ~last,
            (cost(_COSTS["turned"][:3], slow) + _COSTS["turned"][3] * turn) * longer,
        ),
        "straight": only(
            (matrix > _LEAST) & flat & dense & last, cost(_COSTS["straight"], slow) * longer
        ),
        "single": only(flat & early, alone),
        "batched": only(plain, cost(_COSTS["batched"], tiles) + images_us * 1e-6),
        "unfolded": unfolded * 1e-6
        + combine(_COSTS["unfolded"][1] * tiles, _COSTS["unfolded"][2] * columns / mc.bandwidth),
        "winograd": only(_has_winograd(table), cost(_COSTS["winograd"], sums)),
        "grouped": only(
            flat & ~dense & ~table.is_("dtype", "bf16"), cost(_COSTS["grouped"], padded)
        ),
        "direct": only(flat & dense & early, cost(_COSTS["direct"], sums)),
        "general": only(flat & early, cost(_COSTS["general"], sums)),
        "naive": cost(_COSTS["naive"], sums),
    }


def _vector_rate(table: OpTable) -> np.ndarray:
    """Return the FLOP/s of the vector unit without paired instructions, shape ``(n,)``."""
    paired = table.is_on(lambda device: device.rules.untuned_convolutions)
    return np.asarray(table.vector_peak() / (1 + paired))


def _has_winograd(table: OpTable) -> np.ndarray:
    numbers = table.columns
    square = (numbers["kh"] == 3) & (numbers["kw"] == 3) & (numbers["kd"] == 1)
    near = (numbers["stride_h"] <= 2) & (numbers["stride_w"] <= 2)
    dense = (numbers["groups"] == 1) & (numbers["dil_h"] == 1) & (numbers["dil_w"] == 1)
    return np.asarray(square & near & dense & ~table.is_("dtype", "bf16"))


def _alignment(one: _Problem, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> dict[str, np.ndarray]:
    """Return alignment features for vectorised loads and tiles of channels."""
    features: dict[str, np.ndarray] = {}
    for name, size in (("cin", one.cin), ("cout", one.cout)):
        features |= multiples(**{name: (size, (4, 8, 32))})
        features[f"{name}_fill"] = size / (np.ceil(size / 64) * 64)
    tiles = (64, 128, 256)
    return (
        features
        | fills(m=(m, tiles), n=(n, tiles), k=(k, tiles))
        | multiples(inside=(one.inside, (4,)), outside=(one.outside, (4,)))
    )
