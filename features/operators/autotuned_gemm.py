"""Physics of a product that XLA autotunes: the fastest of many tiles, each timed on the device.

A core works on one output tile at a time. For each step of the reduction it needs the rows and
columns of the tile's edges from the L2 cache, and the matrix unit's time for their product;
whichever takes longer sets the pace. Small tiles are bound by the way into the core, large ones by
the matrix unit, and on a chip whose matrix units are twice as fast the tile has to be twice as
large for the same share of the peak.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from .columns import Machine, OpTable
from .fitted import fitted
from .physics import combine

FIT = fitted("autotuned_products")

#: Output tiles (rows, columns): the usual ones of cuBLAS and of XLA's Triton configurations.
TILES = (
    (32, 64),
    (64, 32),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (128, 256),
    (256, 128),
)
#: Parts that a reduction is cut into, so that the tiles of a small result occupy all cores.
SPLITS = (1, 2, 4, 8, 16)
#: Side of the square tiles of which a result has to have fewer than half of the cores for its
#: reduction to be split. On H100 and MI300X no larger result reads as a split one.
SPARSE_TILE = 64
#: Architectures on which two cores share a tile's operands, each holding half of one of them
#: (tcgen05 with ``cta_group::2``, PTX ISA): a core has a tile of 128 × 256 and receives 128 + 128.
PAIRED = ("blackwell", "blackwell-ultra")


class Autotuned(NamedTuple):
    """The fastest tiling of each product; all of shape ``(n,)``.

    Attributes:
        seconds: Seconds of all its tiles, and of adding up parts, without the starts of kernels.
        waves: Waves of tiles.
        use: Used share of the tiles.
        kernels: Kernels of a call: 2 where the reduction is split.
    """

    seconds: np.ndarray
    waves: np.ndarray
    use: np.ndarray
    kernels: np.ndarray


def autotuned_tiles(
    table: OpTable,
    size: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    peak: np.ndarray,
    machine: Machine,
    start: np.ndarray,
    memory: np.ndarray,
) -> Autotuned:
    """Find the fastest tiling of each product.

    A split reduction is two kernels, the second of which adds up the parts.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        peak: Dense FLOP/s of their type, shape ``(n,)``.
        machine: Their devices.
        start: Seconds of a kernel without work, shape ``(n,)``.
        memory: Seconds of the traffic, which tiles overlap, shape ``(n,)``.
    """
    b, m, n, k = size
    width, out = table.activation_bytes, np.maximum(table.activation_bytes, 2.0)
    paired = table.of_device([d.architecture in PAIRED for d in table.devices]) > 0
    hopper = table.of_device([d.architecture == "hopper" for d in table.devices]) > 0
    other = table.of_device([d.vendor.upper() == "AMD" for d in table.devices]) > 0
    ingress = np.where(hopper & table.is_("dtype", "tf32"), FIT.by_registers, FIT.ingress)
    rate = peak / machine.cores * np.where(other, FIT.matrix_share_amd, FIT.matrix_share)
    sparse = b * np.ceil(m / SPARSE_TILE) * np.ceil(n / SPARSE_TILE) <= machine.cores / 2
    fastest, seconds = np.full(len(m), np.inf), np.zeros(len(m))
    waves, use, kernels = (np.ones(len(m)) for _ in range(3))
    for (rows, columns), parts in product(TILES, SPLITS):
        tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
        # Of a pair's 256 columns each core receives half.
        edges = rows + np.where(paired & (columns == 256), columns / 2, columns)
        received = edges * width / (ingress * machine.clock)
        # The slower of the two sets the pace; a sharp soft maximum keeps the estimate smooth.
        step = combine(2.0 * rows * columns / rate, received, power=8.0)
        # Sums of parts are f32.
        written = rows * columns * (out if parts == 1 else 4.0) / (FIT.epilogue * machine.clock)
        own = tiles * parts / machine.cores
        total = np.ceil(own) * (step * k / parts + written)
        if parts > 1:
            # The parts are in the cache still; a cache delivers at least what the memory does.
            total = total + b * m * n * (4.0 * parts + out) / machine.bandwidth
        whole = combine(total, memory, power=4.0) + (start if parts > 1 else 0.0)
        faster = (whole < fastest) & (sparse | (parts == 1))
        fastest = np.where(faster, whole, fastest)
        seconds = np.where(faster, total, seconds)
        waves = np.where(faster, own, waves)
        kernels = np.where(faster, min(parts, 2), kernels)
        use = np.where(faster, b * m * n / (tiles * rows * columns), use)
    return Autotuned(seconds, waves, use, kernels)
