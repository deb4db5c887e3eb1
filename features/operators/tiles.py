"""Output tiles of matrix products: the time of the fastest tile that a library offers.

A core processes one tile at a time, and the number of waves is whole. Available tiles and splits of
the reduction, and the cost of a tile, differ by library; the fastest combination is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import product

import numpy as np

from .columns import OpTable
from .machine import Machine
from .physics import combine, fill, fitted, log2, quantised

AUTOTUNED, TUNED = fitted("autotuned_products"), fitted("tuned_products")

#: ``b``, ``m``, ``n`` and ``k`` of products, shape ``(n,)`` each.
Sizes = Sequence[np.ndarray]
#: Tiles (rows, columns) with the fraction of the matrix peak that their inner loops reach: small
#: ones reload operands from shared memory more often per product. Sizes are CUTLASS's usual ones,
#: fractions are engineering estimates. For calls of single products, and of grouped ones.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.94),
    (64, 128, 0.8),
    (128, 64, 0.8),
    (64, 64, 0.65),
    (32, 64, 0.4),
    (64, 32, 0.4),
    (16, 64, 0.25),
    (16, 32, 0.15),
)
GROUPED_TILES = ((16, 128, 0.25), (64, 128, 0.7), (128, 128, 0.9), (128, 256, 1.0))
#: Least depth of a split of the reduction for these tiles: shallower splits are dominated by the
#: prologue and by adding up partial results. Engineering estimates.
SPLIT_DEPTH, GROUPED_DEPTH = 256, 512
#: Numbers of splits of a reduction, and the least depth of a split in libraries.
SPLITS, LIBRARY_DEPTH = (1.0, 2.0, 4.0, 8.0, 16.0), 128


def fastest(ways: Iterable[tuple[np.ndarray | float, ...]]) -> tuple[np.ndarray, ...]:
    """Return, per row, the values of the candidate whose first value is smallest.

    Args:
        ways: At least two candidates, each with values of shape ``(n,)`` or numbers; ties go to the
            first.
    """

    def faster(
        best: tuple[np.ndarray | float, ...], way: tuple[np.ndarray | float, ...]
    ) -> tuple[np.ndarray | float, ...]:
        less = np.asarray(way[0]) < best[0]
        return tuple(np.where(less, new, old) for new, old in zip(way, best, strict=True))

    return tuple(np.asarray(values) for values in reduce(faster, ways))


def one_tile(
    tile: tuple[int, int, float],
    size: Sizes,
    peak: np.ndarray,
    cores: np.ndarray,
    most: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of products with one tile size, and their number of tiles, ``(n,)`` each.

    Tiles that do not fill the device split the reduction among idle cores.

    Args:
        tile: Rows, columns, and the fraction of the peak that the tile reaches.
        size: ``b``, ``m``, ``n`` and ``k`` of the products.
        peak: Dense FLOP/s.
        cores: Cores of the device.
        most: Most splits that the depth of the reduction allows.
    """
    rows, columns, share = tile
    b, m, n, k = size
    tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
    split = np.clip(np.floor(cores / tiles), 1, most)
    # Below one wave, splitting shortens the only wave; a tile is never faster than its split.
    runs = np.where(tiles < cores, 1 / split, quantised(tiles / cores))
    return runs * rows * columns * k * 2 / (peak / cores) / share, tiles


def tile_seconds(size: Sizes, peak: np.ndarray, mc: Machine) -> tuple[np.ndarray, ...]:
    """Return seconds, waves and used area of the fastest of :data:`TILES`, ``(n,)`` each."""
    b, m, n, k = size
    deepest = np.maximum(1, np.floor(k / SPLIT_DEPTH))

    def ways() -> Iterator[tuple[np.ndarray, ...]]:
        for tile in TILES:
            seconds, tiles = one_tile(tile, size, peak, mc.cores, deepest)
            yield seconds, tiles / mc.cores, b * m * n / (tiles * tile[0] * tile[1])

    return fastest(ways())


def grouped_tiles(
    products: Sequence[Sizes], peak: np.ndarray, mc: Machine
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the time of grouped products with the best common tile.

    Args:
        products: ``b``, ``m``, ``n`` and ``k`` of consecutive products with the same ``m``.
        peak: Dense FLOP/s of their dtype.
        mc: Their devices.

    Returns:
        Seconds, tiles of the first product, and used fraction of the tiles' rows, ``(n,)`` each.
    """
    m = products[0][1]

    def ways() -> Iterator[tuple[np.ndarray, ...]]:
        for tile in GROUPED_TILES:
            parts = [
                one_tile(tile, own, peak, mc.cores, np.maximum(1, own[3] / GROUPED_DEPTH))
                for own in products
            ]
            seconds = np.asarray(sum(own for own, _ in parts))
            yield seconds, parts[0][1], m / (np.ceil(m / tile[0]) * tile[0])

    seconds, tiles, use = fastest(ways())
    return seconds, tiles, use


def tile_waves(
    size: Sizes, mc: Machine, sides: tuple[tuple[int, int], ...]
) -> dict[str, np.ndarray]:
    """Return waves of several tile sizes as features, whichever of them is fastest.

    They let a model learn that a library chose another tile.
    """
    b, m, n, _ = size
    # All tiles at once, shape (tiles, n): for a single product each call costs as much as a scalar.
    high, across = (np.array(side, float)[:, None] for side in zip(*sides, strict=True))
    waves = b * np.ceil(m / high) * np.ceil(n / across) / mc.cores
    features = {}
    for (rows, columns), log, full in zip(sides, log2(waves), fill(waves), strict=True):
        features[f"log_waves_{rows}x{columns}"] = log
        features[f"wave_fill_{rows}x{columns}"] = full
    return features


#: Output tiles that XLA times on the device: the usual ones of cuBLAS and of its Triton
#: configurations.
AUTOTUNED_TILES = (
    *((32, 64), (64, 32), (64, 64), (64, 128)),
    *((128, 64), (128, 128), (128, 256), (256, 128)),
)
#: Side of a square tile: a reduction is split only if the result has fewer such tiles than half the
#: cores. On H100 and MI300X no larger result looks split.
SPARSE_TILE = 64


def autotuned_tiles(
    table: OpTable,
    size: Sizes,
    peak: np.ndarray,
    machine: Machine,
    start: np.ndarray,
    memory: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Find the fastest tiling of products that XLA autotunes.

    In each step of the reduction a core needs the rows and columns of the tile's edges from the L2
    cache, and the matrix unit's time for their product; the longer of the two sets the pace. Small
    tiles are bound by the bandwidth into the core, large ones by the matrix unit, so on a chip with
    matrix units twice as fast the tile has to be twice as large for the same fraction of the peak.
    A split reduction is two kernels, the second of which adds up the splits.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        peak: Dense FLOP/s of their dtype, shape ``(n,)``.
        machine: Their devices.
        start: Fixed cost of a kernel in seconds, shape ``(n,)``.
        memory: Seconds of the traffic, which overlaps with the tiles, shape ``(n,)``.

    Returns:
        Seconds of all tiles and of adding up splits, without fixed costs of kernels; waves; used
        fraction of the tiles; and kernels per call, shape ``(n,)`` each.
    """
    b, m, n, k = size
    width, out = table.activation_bytes, np.maximum(table.activation_bytes, 2.0)
    # A core of a pair has a tile of 128 × 256 and receives 128 + 128.
    paired = table.is_on(lambda d: d.rules.paired_cores)
    hopper = table.is_on(lambda d: d.rules.warp_groups)
    other = table.is_on(lambda d: d.vendor.upper() == "AMD")
    ingress = np.where(
        hopper & table.is_("dtype", "tf32"), AUTOTUNED.by_registers, AUTOTUNED.ingress
    )
    share = np.where(other, AUTOTUNED.matrix_share_amd, AUTOTUNED.matrix_share)
    rate = peak / machine.cores * share
    port = machine.clock * machine.width
    sparse = b * np.ceil(m / SPARSE_TILE) * np.ceil(n / SPARSE_TILE) <= machine.cores / 2

    def ways() -> Iterator[tuple[np.ndarray | float, ...]]:
        for (rows, columns), parts in product(AUTOTUNED_TILES, SPLITS):
            tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
            # Each core of a pair receives half of 256 columns.
            edges = rows + np.where(paired & (columns == 256), columns / 2, columns)
            received = edges * width / (ingress * port)
            # The slower of the two sets the pace; a sharp soft maximum keeps the estimate smooth.
            step = combine(2.0 * rows * columns / rate, received, power=8.0)
            # Partial sums are f32.
            epilogue = AUTOTUNED.epilogue * port
            written = rows * columns * (out if parts == 1 else 4.0) / epilogue
            waves = tiles * parts / machine.cores
            total = np.ceil(waves) * (step * k / parts + written)
            if parts > 1:
                # The partial sums are still in the cache, at least as fast as main memory.
                total = total + b * m * n * (4.0 * parts + out) / machine.bandwidth
            whole = combine(total, memory, power=4.0) + (start if parts > 1 else 0.0)
            use = b * m * n / (tiles * rows * columns)
            yield (
                np.where(sparse | (parts == 1), whole, np.inf),
                total,
                waves,
                use,
                min(parts, 2.0),
            )

    return fastest(ways())[1:]


#: Output tiles of tuned libraries: all pairs of these sizes that fit a core's registers and keep it
#: busy.
SIDES = (16.0, 32.0, 64.0, 128.0, 256.0)
TUNED_TILES = tuple(t for t in product(SIDES, SIDES) if 512 <= t[0] * t[1] <= 256 * 128)


def tuned_tiles(
    table: OpTable, size: Sizes, rate: np.ndarray, mc: Machine
) -> tuple[np.ndarray, ...]:
    """Find the fastest tiling among a library's hundreds of kernels.

    Per step of the reduction, an output tile takes the longer of the matrix unit's time and the
    transfer of its operands into the core; deep products are split among idle cores.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        rate: FLOP/s that matrix units sustain, shape ``(n,)``.
        mc: Their devices.

    Returns:
        Seconds, waves, used fraction of the tiles and number of splits, ``(n,)`` each.
    """
    b, m, n, k = size
    width = np.maximum(table.activation_bytes, table.weight_bytes)
    port = mc.clock * mc.width

    def ways() -> Iterator[tuple[np.ndarray | float, ...]]:
        for (rows, columns), split in product(TUNED_TILES, SPLITS):
            tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
            step = np.maximum(
                2 * rows * columns * mc.cores / rate,
                (rows + columns) * width / (TUNED.ingress * port),
            )
            fixed = TUNED.prologue / mc.clock + 2 * rows * columns / (TUNED.epilogue * port)
            waves = tiles * split / mc.cores
            adding = TUNED.adding_s + split * b * m * n * TUNED.adding_bytes / mc.bandwidth
            seconds = np.ceil(waves) * (step * k / split + fixed) + (adding if split > 1 else 0.0)
            allowed = (split == 1) | (k / split >= LIBRARY_DEPTH)
            use = b * m * n / (tiles * rows * columns)
            yield np.where(allowed, seconds, np.inf), waves, use, split

    return fastest(ways())
