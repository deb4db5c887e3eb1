"""Physics of convolutions, as the matrix products that libraries make of them."""

from __future__ import annotations

import numpy as np

from .columns import OpTable
from .fitted import fitted
from .gemm import _waves, tile_seconds
from .physics import (
    Physics,
    combine,
    fill,
    least_seconds,
    log2,
    resident_share,
    stream_seconds,
)


def conv(table: OpTable) -> Physics:
    """Estimate a square, dense 2-D convolution in NCHW without bias.

    It counts as an implicit product ``m = batch × out²``, ``n = cout``, ``k = cin × ksize²``
    (Chetlur et al., cuDNN: Efficient Primitives for Deep Learning, 2014). A 3 × 3 filter of stride
    1 may run as a Winograd transform with 2.25 times fewer products (Lavin and Gray, 2016).
    """
    batch, cin, cout, size, inside, stride, pad = table.numbers(
        "batch", "cin", "cout", "ksize", "insize", "stride", "pad"
    )
    mc, peak = (
        table.machine(multiprocessors=True),
        np.minimum(table.matrix_peak(), table.power_rate()),
    )
    out = np.maximum(np.floor((inside + 2 * pad - size) / stride) + 1, 1)
    m, n, k = batch * out**2, cout, cin * size**2
    one = np.ones(len(m))
    # All published convolutions are in fp32, four bytes an element.
    moved = 4 * (batch * cin * inside**2 + cin * cout * size**2 + m * n)
    t_tiles, waves, tile_use = tile_seconds(one, m, n, k, peak, mc)
    t_compute = 2 * m * n * k / peak
    winograd = (size == 3) & (stride == 1)
    # F(2 × 2, 3 × 3) saves 2.25 times the products, but its transforms cost vector work, and
    # libraries do not always choose it: 1.6 is an engineering estimate.
    t_tiles = np.where(winograd, t_tiles / 1.6, t_tiles)
    resident = resident_share(moved, mc.cache, 1.0, 0.5)
    t_memory = stream_seconds(moved, resident, mc)
    floor = np.full(len(m), fitted("products").eager_floor_s)
    base = floor + combine(t_tiles, t_memory)
    features = {
        # Shares of the parts in the estimate, as for products (gemm.py).
        "log_tiles_base": log2(t_tiles / base),
        "log_memory_base": log2(t_memory / base),
        "floor_base": floor / base,
        "log_cycles": log2(base * mc.clock),
        "log_intensity": log2(t_compute / t_memory),
        "log_waves": log2(waves),
        "wave_fill": fill(waves),
        "tile_use": tile_use,
        "resident": resident,
        # Sizes as a product, then as a convolution: libraries choose the algorithm by both.
        "log_m": log2(m),
        "log_n": log2(n),
        "log_k": log2(k),
        "log_batch": log2(batch),
        "log_cin": log2(cin),
        "log_size": log2(inside),
        "log_out": log2(out),
        "ksize": size,
        "stride": stride,
        "pad": pad,
        "winograd": winograd * 1.0,
        # Alignments that vectorised loads and tiles of output channels ask for.
        "cin_of_4": (cin % 4 == 0) * 1.0,
        "cin_of_32": (cin % 32 == 0) * 1.0,
        "cout_of_32": (cout % 32 == 0) * 1.0,
        "out_of_8": (out % 8 == 0) * 1.0,
        "cout_fill": cout / (np.ceil(cout / 64) * 64),
        **_waves(one, m, n, mc),
        "log_moved_cache": np.clip(log2(moved / mc.cache), -10, 10),
        "log_balance": log2(peak / mc.bandwidth),
        "log_cores": log2(mc.cores),
    }
    # The bound has to hold for whichever algorithm the library chose.
    t_least = least_seconds(moved, resident, mc)
    t_peak = 2 * m * n * k / table.matrix_peak() / np.where(winograd, 2.25, 1.0)
    roofline = np.maximum(t_peak, t_least)
    return Physics(
        base,
        roofline,
        t_peak > t_least,
        floor,
        2 * m * n * k,
        moved,
        features,
        specific=("log_moved_cache", "log_balance", "log_cores"),
        keys=("log_tiles_base", "log_memory_base", "log_m", "log_n", "log_k", "ksize", "stride"),
    )
