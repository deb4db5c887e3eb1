"""Output tiles of serving frameworks' product libraries on matrix units.

In each step of the reduction the operands have to reach a core's matrix unit. For a square tile of
about 120 elements a side that takes as long as the products, on every architecture, because vendors
widen this path together with the unit. Smaller tiles are slower in proportion. A tile has a
prologue and an epilogue that nothing overlaps, and the number of waves is whole.

Constants that are not specific to a format are a joint fit to bf16 products of A100, H100 and RTX
PRO 6000 under three frameworks. With each chip left out of the fit in turn, the error of the
estimate alone is 12, 10 to 13 and 11 to 17 % there, and 7 to 9 % on fp16 products of A100 and A40.
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
from .tiles import LIBRARY_DEPTH, SIDES, SPLITS, Sizes

FIT = fitted("library_tiles")

#: Output tiles (rows, columns) that libraries have kernels for.
TILES = tuple(t for t in product(SIDES, SIDES[1:]) if 1024 <= t[0] * t[1] <= 32768)
#: 16-bit operations per clock of an A100 core.
_A100_RATE = 2048.0
#: Products compared at a time: 85 tilings of each take 90 KB, so that intermediate results stay in
#: a core's cache.
TOGETHER = 128


class Kernels(NamedTuple):
    """Properties of a library's kernels for a format (``kernels`` in ``fitted.yaml``).

    Attributes:
        parts: Most splits of a deep reduction among idle cores.
        rows: Fewest rows of a tile.
        columns: Fewest columns of a tile.
        share: Fraction of ``matrix_share`` that the inner loop reaches.
        step: Cycles per tile and element of depth, in addition to the products, which no other tile
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
        """Look up a format in a framework, for cores that share tiles in pairs or not."""
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
        use: Fraction of the tiles' area that holds results.
        split: Number of splits of the reduction.
        side: Base-2 logarithm of ``rows · columns / (rows + columns)``.
        step_s: Seconds of the steps that nothing hides.
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
        peak: Dense FLOP/s of their dtype, shape ``(n,)``.
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
    paired = table.is_on(lambda device: device.rules.paired_cores)
    # Only the combinations of kernels and pairing that occur are evaluated.
    place = np.array([menu.index(kind) for kind in kinds], np.intp)[2 * code + paired]
    found = np.empty((len(Tiling._fields), len(table)))
    for which, (kernels, pairs) in enumerate(menu):
        at = np.flatnonzero(place == which)
        for first in range(0, len(at), TOGETHER):
            some = at[first : first + TOGETHER]
            found[:, some] = _fastest(rows[:, some], kernels, pairs)
    return Tiling(*found)


def _power_share(device: DeviceSpec) -> float:
    """Return the fraction of the peak's clock that the power limit leaves; 1 if unknown."""
    if not device.power_w:
        return 1.0
    watts = device.power_w / (device.matrix_peak("bf16") / 1e12)
    return float(min((watts / FIT.power_w) ** FIT.power_exponent, FIT.most_power))


@cache
def _tilings(kernels: Kernels, pairs: bool) -> tuple[np.ndarray, ...]:
    """Return candidate heights, widths and sides of tiles, shape ``(t, 1)`` each, and splits."""
    tiles = [t for t in TILES if t[0] >= kernels.rows and t[1] >= kernels.columns]
    high, across = (np.array(sides)[:, None] for sides in zip(*tiles, strict=True))
    # Each core of a pair receives half of 256 columns.
    received = np.where(across == 256, across / 2, across) if pairs else across
    side = high * across / (high + received)
    return high, across, side, np.array([s for s in SPLITS if s <= kernels.parts])


def _fastest(rows: np.ndarray, kernels: Kernels, pairs: bool) -> Tiling:
    """Compare all tiles and splits of several products at once.

    Args:
        rows: Shape ``(11, n)``: ``b``, ``m``, ``n`` and ``k``; operations per clock of a core's
            matrix unit at its peak and sustained; bytes of an operand; cores; clock; cache
            bandwidth; and core width relative to the widest measured core.
        kernels: The kernels that run them.
        pairs: Whether cores share tiles in pairs.
    """
    high, across, side, splits = _tilings(kernels, pairs)
    b, m, n, k, raw, rate, width, cores, clock, cache_rate, wider = rows
    wide = raw * width / 2
    # Wide units are limited by the bytes a core can receive per step, whatever its registers.
    needed = FIT.side * np.maximum(1.0, wide / wider / FIT.ingress / 64.0)
    written = FIT.epilogue * (wide / _A100_RATE) ** FIT.epilogue_exponent
    tiles = b * np.ceil(m / high) * np.ceil(n / across)
    step = 2 * high * across / (rate * kernels.share) * (1 + (needed / side) ** 8) ** 0.125
    fixed = FIT.prologue + 2 * high * across / written
    # Shape (tiles, splits, n) from here on.
    parts = splits[:, None]
    waves = tiles[:, None] * parts / cores
    seconds = np.ceil(waves) * (k / parts * step[:, None] + fixed[:, None]) / clock
    # An unsplit reduction has nothing to add up and is never too shallow.
    added = FIT.adding_s + parts * b * m * n * 4 / cache_rate
    added = np.where(k / parts < LIBRARY_DEPTH, np.inf, added)
    added[0] = 0.0
    seconds += added
    count, place = len(splits), np.arange(len(m))
    # The first of equally fast ones: smaller tiles, fewer splits.
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
