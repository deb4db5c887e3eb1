"""Output tiles of matrix products: how long the fastest of those that a library has takes.

A core works on one tile at a time, and waves of tiles are whole. Which tiles and splits of the
reduction there are, and what a tile costs, differs by library; the fastest is taken.
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
#: Tiles (rows, columns) with the share of the matrix peak that their inner loops reach: small ones
#: reload operands from shared memory more often for each product. Sizes are CUTLASS's usual ones;
#: shares are engineering estimates. Of calls of single products, and of grouped ones.
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
#: Least depth of one split of the reduction of these: shallower ones spend their time on the
#: prologue and on adding up partial results. Engineering estimates.
SPLIT_DEPTH, GROUPED_DEPTH = 256, 512
#: Parts of a reduction, and their least depth in libraries.
SPLITS, LIBRARY_DEPTH = (1.0, 2.0, 4.0, 8.0, 16.0), 128


def fastest(ways: Iterable[tuple[np.ndarray | float, ...]]) -> tuple[np.ndarray, ...]:
    """Return of each row the values of the way whose first value is the least.

    Args:
        ways: Values of two ways or more, each of shape ``(n,)`` or a number; of equal ones the
            first counts.
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
    """Return seconds and number of the tiles of products, shape ``(n,)`` each.

    Tiles that do not fill the device split the reduction among idle cores.

    Args:
        tile: Its rows and columns, and the share of the peak that it reaches.
        size: ``b``, ``m``, ``n`` and ``k`` of the products.
        peak: Dense FLOP/s.
        cores: Of the device.
        most: Most parts that the depth of the reduction allows.
    """
    rows, columns, share = tile
    b, m, n, k = size
    tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
    split = np.clip(np.floor(cores / tiles), 1, most)
    # Below one wave, splitting shortens the only wave; a tile is never faster than its split.
    runs = np.where(tiles < cores, 1 / split, quantised(tiles / cores))
    return runs * rows * columns * k * 2 / (peak / cores) / share, tiles


def tile_seconds(size: Sizes, peak: np.ndarray, mc: Machine) -> tuple[np.ndarray, ...]:
    """Return the time of the fastest of :data:`TILES` in seconds, its waves, and their used share.

    All have shape ``(n,)``.
    """
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
    """Return the time of grouped products by the best tile, which they share, and its tiles.

    Args:
        products: ``b``, ``m``, ``n`` and ``k`` of those that follow each other, of the same ``m``.
        peak: Dense FLOP/s of their type.
        mc: Their devices.

    Returns:
        Seconds, tiles of the first product, and share of the tiles' rows that are used, ``(n,)``.
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
    """Return waves of tiles as features, whichever of them is fastest.

    So a model can learn that a library chose another one.
    """
    b, m, n, _ = size
    # All tiles at once, shape (tiles, n): of a single product each call takes as long as a number.
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
#: Side of the square tiles of which a result has to have fewer than half of the cores for its
#: reduction to be split. On H100 and MI300X no larger result reads as a split one.
SPARSE_TILE = 64
#: Architectures on which two cores share a tile's operands, each holding half of one of them
#: (tcgen05 with ``cta_group::2``, PTX ISA): a core has a tile of 128 × 256 and receives 128 + 128.
PAIRED = ("blackwell", "blackwell-ultra")


def autotuned_tiles(
    table: OpTable,
    size: Sizes,
    peak: np.ndarray,
    machine: Machine,
    start: np.ndarray,
    memory: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Find the fastest tiling of products that XLA autotunes.

    For each step of the reduction a core needs the rows and columns of the tile's edges from the L2
    cache, and the matrix unit's time for their product; whichever takes longer sets the pace. Small
    tiles are bound by the way into the core, large ones by the matrix unit, and on a chip whose
    matrix units are twice as fast the tile has to be twice as large for the same share of the peak.
    A split reduction is two kernels, the second of which adds up the parts.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        peak: Dense FLOP/s of their type, shape ``(n,)``.
        machine: Their devices.
        start: Seconds of a kernel without work, shape ``(n,)``.
        memory: Seconds of the traffic, which tiles overlap, shape ``(n,)``.

    Returns:
        Seconds of all tiles and of adding up parts, without the starts of kernels; waves; used
        share of the tiles; and kernels of a call, shape ``(n,)`` each.
    """
    b, m, n, k = size
    width, out = table.activation_bytes, np.maximum(table.activation_bytes, 2.0)
    paired = table.is_on(lambda d: d.architecture in PAIRED)
    hopper = table.is_on(lambda d: d.architecture == "hopper")
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
            # Of a pair's 256 columns each core receives half.
            edges = rows + np.where(paired & (columns == 256), columns / 2, columns)
            received = edges * width / (ingress * port)
            # The slower of the two sets the pace; a sharp soft maximum keeps the estimate smooth.
            step = combine(2.0 * rows * columns / rate, received, power=8.0)
            # Sums of parts are f32.
            epilogue = AUTOTUNED.epilogue * port
            written = rows * columns * (out if parts == 1 else 4.0) / epilogue
            waves = tiles * parts / machine.cores
            total = np.ceil(waves) * (step * k / parts + written)
            if parts > 1:
                # The parts are in the cache still; it delivers at least what the memory does.
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


#: Output tiles of tuned libraries: all pairs of these sizes that a core's registers hold and that
#: keep it busy.
SIDES = (16.0, 32.0, 64.0, 128.0, 256.0)
TUNED_TILES = tuple(t for t in product(SIDES, SIDES) if 512 <= t[0] * t[1] <= 256 * 128)


def tuned_tiles(
    table: OpTable, size: Sizes, rate: np.ndarray, mc: Machine
) -> tuple[np.ndarray, ...]:
    """Find the fastest tiling of a library's hundreds of kernels.

    An output tile takes, for each step of the reduction, the larger of the matrix unit's time and
    that of its operands' way into the core; deep products are split among idle cores.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        rate: FLOP/s that matrix units sustain, shape ``(n,)``.
        mc: Their devices.

    Returns:
        Seconds, waves, used share of the tiles and parts of the reduction, ``(n,)`` each.
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
