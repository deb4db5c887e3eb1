"""Output tiles of the products of serving frameworks' libraries, on the matrix units.

The operands of each step of the reduction have to reach a core's matrix unit, which takes as long
as the products themselves for a square tile of about 120 elements a side on every architecture:
makers widen that way with the unit. Smaller tiles are slower in proportion. A tile has a prologue
and an epilogue that nothing overlaps, and waves are whole.

All constants that name no format are a joint fit to bf16 products of A100, H100 and RTX PRO 6000
under three frameworks, with each chip left out of the fit in turn: the estimate alone then errs by
12, 10 to 13 and 11 to 17 % there, and by 7 to 9 % on products in fp16 of A100 and A40.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ..devices.device import DeviceSpec
from .columns import OpTable
from .machine import Machine
from .physics import fitted
from .tiles import LIBRARY_DEPTH, PAIRED, SIDES, SPLITS, Sizes

FIT = fitted("library_tiles")

#: Output tiles (rows, columns) that libraries have kernels for.
TILES = tuple(t for t in product(SIDES, SIDES[1:]) if 1024 <= t[0] * t[1] <= 32768)
_A100_RATE = 2048.0
#: Products that are compared at a time: 85 tilings of them take 90 KB, so that what is computed of
#: them stays in a core's cache.
TOGETHER = 128


class Kernels(NamedTuple):
    """What sets a library's kernels for a format apart (``kernels`` in ``fitted.yaml``).

    Attributes:
        parts: Most parts that deep reductions are split into among idle cores.
        rows: Fewest rows of a tile.
        columns: Fewest columns of a tile.
        share: Share of ``matrix_share`` that the inner loop reaches.
        step: Cycles a tile needs for each element of depth beyond the products, which no other tile
            hides.
    """

    parts: float
    rows: float
    columns: float
    share: float
    step: float

    @classmethod
    @cache
    def of(cls, dtype: str, framework: str, pairs: bool) -> Kernels:
        """Those of a format in a framework, on cores that share tiles in pairs or alone."""
        for name in ("paired_kernels", "kernels") if pairs else ("kernels",):
            for key in (f"{dtype} {framework}", dtype):
                if key in FIT.tables[name]:
                    return cls(*FIT.tables[name][key])
        return cls(*FIT.tables["kernels"]["any"])


class Tiling(NamedTuple):
    """The fastest tiling of ``n`` products, shape ``(n,)`` each.

    Attributes:
        seconds: Its time.
        waves: Tiles over cores.
        use: Share of the tiles' area that is wanted.
        split: Parts of the reduction.
        side: Its ``side``, in powers of two.
        step_s: Time of the steps that nothing hides.
    """

    seconds: np.ndarray
    waves: np.ndarray
    use: np.ndarray
    split: np.ndarray
    side: np.ndarray
    step_s: np.ndarray


def library_tiles(table: OpTable, size: Sizes, peak: np.ndarray, machine: Machine) -> Tiling:
    """Find the fastest tiling of each product.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        peak: Dense FLOP/s of their type, shape ``(n,)``.
        machine: Their devices.
    """
    mc, raw = machine, peak / machine.cores / machine.clock
    share = FIT.matrix_share * table.of_device(_power_share)
    width = table.activation_bytes
    rows = np.stack([*size, raw, raw * share, width, mc.cores, mc.clock])
    rows = np.concatenate((rows, (mc.cache_bandwidth, mc.width)))
    code, named = table.rows.combined(("dtype", "backend"))
    kinds = [(Kernels.of(*names, pairs), pairs) for names in named for pairs in (False, True)]
    menu = list(dict.fromkeys(kinds))
    paired = table.is_on(lambda device: device.architecture in PAIRED)
    # Only what there is of kernels, with and without pairs, is gone through.
    place = np.array([menu.index(kind) for kind in kinds], np.intp)[2 * code + paired]
    found = np.empty((len(Tiling._fields), len(table)))
    for which, (kernels, pairs) in enumerate(menu):
        at = np.flatnonzero(place == which)
        for first in range(0, len(at), TOGETHER):
            some = at[first : first + TOGETHER]
            found[:, some] = _fastest(rows[:, some], kernels, pairs)
    return Tiling(*found)


def _power_share(device: DeviceSpec) -> float:
    """Share of the peak's clock that the power limit leaves; 1 if it is not known."""
    if not device.power_w:
        return 1.0
    watts = device.power_w / (device.matrix_peak("bf16") / 1e12)
    return float(min((watts / FIT.power_w) ** FIT.power_exponent, FIT.most_power))


@cache
def _tilings(kernels: Kernels, pairs: bool) -> tuple[np.ndarray, ...]:
    """Heights, widths and sides of the tiles to choose from, shape ``(t, 1)`` each, and splits."""
    tiles = [t for t in TILES if t[0] >= kernels.rows and t[1] >= kernels.columns]
    high, across = (np.array(sides)[:, None] for sides in zip(*tiles, strict=True))
    # Of a pair's 256 columns each core receives half.
    received = np.where(across == 256, across / 2, across) if pairs else across
    side = high * across / (high + received)
    return high, across, side, np.array([s for s in SPLITS if s <= kernels.parts])


def _fastest(rows: np.ndarray, kernels: Kernels, pairs: bool) -> Tiling:
    """Compare all tiles and splits of products at once.

    Args:
        rows: Their sizes, what a core's matrix unit does in a clock at its peak and what it
            sustains, bytes of an operand, cores, clock, rate of the cache and how much wider cores
            are than measured ones, shape ``(11, n)``.
        kernels: What runs them.
        pairs: Whether cores share tiles in pairs.
    """
    high, across, side, splits = _tilings(kernels, pairs)
    b, m, n, k, raw, rate, width, cores, clock, cache_rate, wider = rows
    wide = raw * width / 2
    # Bytes of one step that a core can take limit wide units, however large their registers.
    needed = FIT.side * np.maximum(1.0, wide / wider / FIT.ingress / 64.0)
    written = FIT.epilogue * (wide / _A100_RATE) ** FIT.epilogue_exponent
    tiles = b * np.ceil(m / high) * np.ceil(n / across)
    step = 2 * high * across / (rate * kernels.share) * (1 + (needed / side) ** 8) ** 0.125
    fixed = FIT.prologue + 2 * high * across / written
    # From here on shape (tiles, splits, n).
    parts = splits[:, None]
    waves = tiles[:, None] * parts / cores
    seconds = np.ceil(waves) * (k / parts * step[:, None] + fixed[:, None]) / clock
    # Whole reductions have nothing to add up, and are never too shallow.
    added = FIT.adding_s + parts * b * m * n * 4 / cache_rate
    added = np.where(k / parts < LIBRARY_DEPTH, np.inf, added)
    added[0] = 0.0
    seconds += added
    count, place = len(splits), np.arange(len(m))
    # The first of several that are equally fast: smaller tiles, fewer splits.
    best = seconds.reshape(-1, len(m)).argmin(axis=0)
    tile, split = best // count, best % count
    return Tiling(
        seconds[tile, split, place],
        waves[tile, split, place],
        b * m * n / (tiles[tile, place] * high[tile, 0] * across[tile, 0]),
        splits[split],
        np.log2(side[tile, 0]),
        k * kernels.step / clock,
    )
