"""Physics of convolutions in one to three dimensions, forward and both gradients, by algorithm.

A library times several algorithms and keeps the fastest. Each is estimated on its own, their soft
minimum is the estimate, and their ratios to it are features, so that a regressor learns when a
library has an algorithm and how well it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .columns import Machine, OpTable
from .fitted import fitted
from .gemm import tile_seconds
from .physics import (
    Physics,
    combine,
    fill,
    least_seconds,
    log2,
    resident_share,
    stream_seconds,
)

FIT = fitted("convolutions")
_COSTS = FIT.tables["costs"]
#: Directions, by the column ``op``: the result, the gradient of the input, that of the weights.
DIRECTIONS = ("fwd", "bwd_data", "bwd_weights")
#: Products that a Winograd transform with 3 × 3 filters saves at best (Lavin and Gray, Fast
#: Algorithms for Convolutional Neural Networks, 2016); kernels of larger tiles save 4.
WINOGRAD_SAVING = 4.0
#: Architectures whose vector rate is that of pairs of instructions, which these kernels, written
#: for earlier chips, do not form.
DUAL_ISSUE = ("cdna3", "cdna4")
#: Architectures whose matrix units multiply 16-bit numbers at twice the rate by instructions that
#: kernels written for earlier chips do not use (CDNA 3 instruction set).
WIDER = ("cdna3", "cdna4")
#: Architectures for which the library has no implicit products in one kernel: no row of MIOpen's
#: tables of MI300X was won by one, while they win a third of those of MI250X.
TURNED_ONLY = ("cdna3", "cdna4")
#: Power of the soft minimum over algorithms: a sharp one, since only one runs.
_SHARPNESS = 6.0


@dataclass(slots=True)
class _Problem:
    """Sizes of ``n`` convolutions; shape ``(n,)`` each.

    Attributes:
        batch: Images.
        groups: Groups.
        cin: Input channels of a group.
        cout: Output channels of a group.
        inside: Input positions of an image.
        outside: Output positions of an image.
        taps: Weights of a filter, per pair of channels.
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
    """Estimate a convolution of :data:`DIRECTIONS` as the fastest of a library's algorithms.

    The algorithms: an implicit product on matrix units (Chetlur et al., cuDNN: Efficient Primitives
    for Deep Learning, 2014), the same on transposed tensors, a product of each image's unfolded
    columns, Winograd's transform, and direct sums on the vector unit.
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
    t_tiles, waves, use = tile_seconds(one.groups, m, n, k, peak, mc)
    t_sums = flops / vector
    ways = _ways(table, one, direction, (t_tiles, t_memory, t_sums, x + y), mc)
    stacked = np.stack(list(ways.values()))
    base = np.asarray((stacked**-_SHARPNESS).sum(axis=0) ** (-1 / _SHARPNESS))
    launches = np.array([_COSTS[name][0] for name in ways])[stacked.argmin(axis=0)] * 1e-6
    # The soft minimum lies below the fastest; the share of launches is the latter's.
    floor = launches * base / stacked.min(axis=0)
    numbers = table.columns
    features = {
        # Shares of the parts in the estimate, as for products (gemm.py).
        "log_tiles_base": log2(t_tiles / base),
        "log_memory_base": log2(t_memory / base),
        "floor_base": floor / base,
        "log_sums_base": log2(t_sums / base),
        # How much slower than the estimate each algorithm is; absent ones are far slower.
        **{f"log_{name}_base": np.minimum(log2(way / base), 20.0) for name, way in ways.items()},
        "log_cycles": log2(base * mc.clock),
        "log_flop_cycles": log2(flops / peak * mc.clock),
        "log_intensity": log2(flops / peak / t_memory),
        "log_waves": log2(waves),
        "wave_fill": fill(waves),
        "tile_use": use,
        "resident": resident,
        **{f"is_{name}": values * 1.0 for name, values in direction.items()},
        **{f"dtype_{d}": table.is_("dtype", d) * 1.0 for d in ("fp32", "fp16", "bf16")},
        # The product that it is, then the convolution: libraries choose the algorithm by both.
        "log_m": log2(m),
        "log_n": log2(n),
        "log_k": log2(k),
        "log_batch": log2(one.batch),
        "log_groups": log2(one.groups),
        "depthwise": ((one.cin == 1) & (one.groups > 1)) * 1.0,
        "log_cin": log2(one.cin),
        "log_cout": log2(one.cout),
        "log_inside": log2(one.inside),
        "log_outside": log2(one.outside),
        "log_col": log2(one.taps * one.outside / one.inside),
        "width_in": log2(numbers["w"]),
        "kh": numbers["kh"],
        "kw": numbers["kw"],
        "kd": numbers["kd"],
        "stride_h": numbers["stride_h"],
        "stride_w": numbers["stride_w"],
        "stride_d": numbers["stride_d"],
        "pad_h": numbers["pad_h"],
        "pad_w": numbers["pad_w"],
        "dilated": (numbers["dil_h"] * numbers["dil_w"] * numbers["dil_d"] > 1) * 1.0,
        "spatial": numbers["ndim"],
        "channels_last": last * 1.0,
        **_alignment(one, m, n, k),
        "log_moved_cache": np.clip(log2(moved / mc.cache), -10, 10),
        "log_balance": log2(peak / mc.bandwidth),
        "log_matrix_vector": log2(peak / vector),
        "log_cores": log2(mc.cores),
    }
    t_least = least_seconds(moved, resident, mc)
    # The bound has to hold for whichever algorithm the library chose.
    t_peak = flops / np.maximum(peak, vector) / np.where(_has_winograd(table), WINOGRAD_SAVING, 1.0)
    return Physics(
        base,
        np.maximum(t_peak, t_least),
        t_peak > t_least,
        floor,
        flops,
        moved,
        features,
        specific=("log_moved_cache", "log_balance", "log_cores"),
        keys=("log_tiles_base", "log_memory_base", "log_m", "log_n", "log_k"),
    )


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
    # Each input position meets only the taps that its place within the stride lets it.
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
    """Return the seconds of each algorithm, infinite where there is none, shape ``(n,)`` each.

    Args:
        table: The convolutions.
        one: Their sizes.
        direction: Which of :data:`DIRECTIONS` each is.
        times: Seconds of the tiles, of the traffic and of the sums on the vector unit, and bytes of
            input and output.
        mc: Their devices.
    """
    tiles, memory, sums, images = times
    numbers = table.columns
    last = numbers["channels_last"] > 0
    matrix = table.matrix_peak() > 1.5 * _vector_rate(table)
    flat = numbers["ndim"] < 3
    dense = one.groups == 1
    plain = (one.taps == 1) & (one.steps == 1)
    early = table.of_device([float(d.architecture not in TURNED_ONLY) for d in table.devices]) > 0
    turn = 2 * images / mc.bandwidth
    columns = table.activation_bytes * one.groups * one.cin * one.taps * one.outside * one.batch
    summing = direction["bwd_weights"]
    never = np.full(len(table), np.inf)

    def only(where: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        return np.where(where, seconds, never)

    def cost(way: tuple[float, ...], work: np.ndarray) -> np.ndarray:
        return np.asarray(way[0] * 1e-6 + way[1] * work + way[2] * memory)

    # The product at the rate of the instructions that these kernels use.
    wider = table.of_device([1.0 + float(d.architecture in WIDER) for d in table.devices])
    slow = tiles * np.where(table.activation_bytes < 4, wider, 1.0)
    padded = sums * np.maximum(FIT.group_channels / one.cout, 1.0)
    alone = np.where(matrix, cost(_COSTS["single"], tiles), cost(_COSTS["single_vector"], tiles))
    images_us = one.batch * np.where(summing, FIT.each_sum, FIT.each_image)
    unfolded = _COSTS["unfolded"][0] + FIT.each_unfolded * one.batch
    return {
        "turned": only(
            matrix & flat & dense & ~last,
            cost(_COSTS["turned"][:3], slow) + _COSTS["turned"][3] * turn,
        ),
        "straight": only(matrix & flat & dense & last, cost(_COSTS["straight"], slow)),
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
    """Return the FLOP/s of the vector unit without pairs of instructions, shape ``(n,)``."""
    paired = table.of_device([float(d.architecture in DUAL_ISSUE) for d in table.devices])
    return np.asarray(table.vector_peak() / (1 + paired))


def _has_winograd(table: OpTable) -> np.ndarray:
    numbers = table.columns
    square = (numbers["kh"] == 3) & (numbers["kw"] == 3) & (numbers["kd"] == 1)
    near = (numbers["stride_h"] <= 2) & (numbers["stride_w"] <= 2)
    dense = (numbers["groups"] == 1) & (numbers["dil_h"] == 1) & (numbers["dil_w"] == 1)
    return np.asarray(square & near & dense & ~table.is_("dtype", "bf16"))


def _alignment(one: _Problem, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> dict[str, np.ndarray]:
    """Alignments that vectorised loads and tiles of channels ask for."""
    features: dict[str, np.ndarray] = {}
    for name, size in (("cin", one.cin), ("cout", one.cout)):
        for step in (4, 8, 32):
            features[f"{name}_of_{step}"] = (size % step == 0) * 1.0
        features[f"{name}_fill"] = size / (np.ceil(size / 64) * 64)
    for name, size in (("m", m), ("n", n), ("k", k)):
        for tile in (64, 128, 256):
            features[f"{name}_fill_{tile}"] = size / (np.ceil(size / tile) * tile)
    for name, size in (("inside", one.inside), ("outside", one.outside)):
        features[f"{name}_of_4"] = (size % 4 == 0) * 1.0
    return features
