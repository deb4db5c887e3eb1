"""Output tiles of a library's matrix products: how long they take on the matrix units.

A core works on one tile at a time. The operands of each step of the reduction have to reach its
matrix unit, which takes as long as the products themselves for a square tile of about 120 elements
a side on every architecture: makers widen that way with the unit. Smaller tiles are slower in
proportion. A tile has a prologue and an epilogue that nothing overlaps, and waves are whole.

All constants that name no format are a joint fit to bf16 products of A100, H100 and RTX PRO 6000
under three frameworks, with each chip left out of the fit in turn: the estimate alone then errs by
12, 10 to 13 and 11 to 17 % there, and by 7 to 9 % on products in fp16 of A100 and A40.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from .autotuned_gemm import PAIRED
from .columns import Machine, OpTable, distinct
from .fitted import fitted

FIT = fitted("library_tiles")

#: Output tiles (rows, columns) that libraries have kernels for.
TILES = tuple(
    (rows, columns)
    for rows in (16.0, 32.0, 64.0, 128.0, 256.0)
    for columns in (32.0, 64.0, 128.0, 256.0)
    if 1024 <= rows * columns <= 32768
)
#: Parts of a reduction, and their least depth.
SPLITS, SPLIT_DEPTH = (1.0, 2.0, 4.0, 8.0, 16.0), 128
_A100_RATE = 2048.0
#: Products that are compared at a time: 85 tilings of them take 90 KB, so that what is computed of
#: them stays in a core's cache.
TOGETHER = 128


@dataclass(frozen=True)
class Kernels:
    """What sets a library's kernels for a format apart.

    Attributes:
        split: Whether deep reductions are split among idle cores.
        rows: Fewest rows of a tile.
        columns: Fewest columns of a tile.
        share: Share of ``matrix_share`` that the inner loop reaches.
        step: Cycles a tile needs for each element of depth beyond the products, which no other tile
            hides.
        paired: What takes the place of these kernels where pairs of cores share a tile, if it is
            not the same.
    """

    split: bool = True
    rows: float = 16.0
    columns: float = 32.0
    share: float = 1.0
    step: float = 0.08
    paired: Kernels | None = None


#: cuBLAS and what splits reductions as it does.
SPLITTING = Kernels()
#: CUTLASS's kernels whose matrix unit fetches its operands from shared memory by itself.
_WHOLE = Kernels(split=False, share=0.95, step=0.3)
#: By (dtype, framework), empty for any: CUTLASS's and DeepGEMM's kernels do not split; scales of
#: blocks are multiplied by the vector unit; kernels of 4-bit floats have large tiles alone. Read
#: off the tables of Hopper (fp8) and RTX PRO 6000 (fp8, nvfp4). Data-centre Blackwell applies
#: scales in the matrix unit (PTX ISA, ``tcgen05.mma`` with block scaling), and passes no operands
#: through registers as RTX PRO 6000 does: an estimate by those of Hopper, not fitted.
KERNELS: dict[tuple[str, ...], Kernels] = {
    ("fp8", "vllm"): _WHOLE,
    ("fp8", "sglang"): Kernels(split=False, share=0.9, step=0.35),
    ("fp8_block", ""): Kernels(split=False, share=0.75, step=0.65, paired=_WHOLE),
    ("nvfp4", ""): Kernels(
        split=False,
        rows=128.0,
        columns=64.0,
        share=0.93,
        step=2.0,
        paired=Kernels(split=False, rows=128.0, columns=64.0, share=0.95, step=0.3),
    ),
    ("int8_sq", ""): Kernels(split=False, step=0.3),
}


_MENU = (SPLITTING, *KERNELS.values())


@dataclass(frozen=True)
class Tiling:
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


def library_tiles(
    table: OpTable,
    size: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    peak: np.ndarray,
    machine: Machine,
) -> Tiling:
    """Find the fastest tiling of each product.

    Args:
        table: ``n`` products.
        size: Their ``b``, ``m``, ``n`` and ``k``, shape ``(n,)`` each.
        peak: Dense FLOP/s of their type, shape ``(n,)``.
        machine: Their devices.
    """
    n = len(table)
    found = Tiling(*(np.full(n, value) for value in (np.inf, 1.0, 1.0, 1.0, 0.0, 0.0)))
    raw = peak / machine.cores / machine.clock
    width = table.activation_bytes
    share = FIT.matrix_share * _power_share(table)
    paired = table.of_device([float(d.architecture in PAIRED) for d in table.devices]) > 0
    for kernels, pairs, at in _by_kernels(table, paired):
        chosen = _Rows(
            tuple(values[at] for values in size),
            raw[at],
            raw[at] * share[at] * kernels.share,
            width[at],
            machine.cores[at],
            machine.clock[at],
            machine.cache_bandwidth[at],
            pairs,
        )
        _fastest(found, at, kernels, chosen)
    return found


def _by_kernels(table: OpTable, paired: np.ndarray) -> Iterator[tuple[Kernels, bool, np.ndarray]]:
    """Give kernels, whether pairs of cores share their tiles, and positions of their rows."""
    code, pairs = table.rows.combined(("dtype", "backend"))
    kinds = [KERNELS.get(pair, KERNELS.get((pair[0], ""), SPLITTING)) for pair in pairs]
    menu = np.array([_MENU.index(kernels) for kernels in kinds], np.intp)[code]
    # Both in one number, so that only what there is of the two is gone through.
    code, both = distinct(2 * menu + paired)
    for place, (kernels, shared) in enumerate((_MENU[own // 2], own % 2 == 1) for own in both):
        yield (
            (kernels.paired or kernels) if shared else kernels,
            shared,
            np.flatnonzero(code == place),
        )


def _power_share(table: OpTable) -> np.ndarray:
    """Return the share of the peak's clock that the power limit leaves; 1 if it is not known."""
    shares = [
        min(
            (d.power_w / (d.matrix_peak("bf16") / 1e12) / FIT.power_w) ** FIT.power_exponent,
            FIT.most_power,
        )
        if d.power_w
        else 1.0
        for d in table.devices
    ]
    return table.of_device(shares)


@dataclass(frozen=True)
class _Rows:
    """Products of one menu of kernels, shape ``(n,)`` each, and whether cores work in pairs.

    ``raw`` is what a core's matrix unit does in a clock at its peak, ``rate`` what it sustains.
    """

    size: tuple[np.ndarray, ...]
    raw: np.ndarray
    rate: np.ndarray
    width: np.ndarray
    cores: np.ndarray
    clock: np.ndarray
    cache: np.ndarray
    pairs: bool

    def part(self, rows: slice) -> _Rows:
        return _Rows(
            tuple(values[rows] for values in self.size),
            self.raw[rows],
            self.rate[rows],
            self.width[rows],
            self.cores[rows],
            self.clock[rows],
            self.cache[rows],
            self.pairs,
        )


@cache
def _tilings(kernels: Kernels, pairs: bool) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Heights, widths and sides of the tiles to choose from, shape ``(t, 1)`` each, and splits."""
    tiles = [t for t in TILES if t[0] >= kernels.rows and t[1] >= kernels.columns]
    high, across = (np.array(sides)[:, None] for sides in zip(*tiles, strict=True))
    # Of a pair's 256 columns each core receives half.
    received = np.where(across == 256, across / 2, across) if pairs else across
    side = high * across / (high + received)
    return (high, across, side), np.array(SPLITS if kernels.split else SPLITS[:1])


def _fastest(found: Tiling, at: np.ndarray, kernels: Kernels, rows: _Rows) -> None:
    """Fill in the products at ``at``."""
    shape, splits = _tilings(kernels, rows.pairs)
    for first in range(0, len(at), TOGETHER):
        own = slice(first, first + TOGETHER)
        _fastest_of(found, at[own], rows.part(own), shape, splits)
    found.step_s[at] = rows.size[3] * kernels.step / rows.clock


def _fastest_of(
    found: Tiling,
    at: np.ndarray,
    rows: _Rows,
    shape: tuple[np.ndarray, ...],
    splits: np.ndarray,
) -> None:
    """Compare all tiles (height, width, side, shape ``(t, 1)`` each) and splits at once."""
    b, m, n, k = rows.size
    high, across, side = shape
    wide = rows.raw * rows.width / 2
    # Bytes of one step that a core can take limit wide units, however large their registers.
    needed = FIT.side * np.maximum(1.0, wide / FIT.ingress / 64.0)
    written = FIT.epilogue * (wide / _A100_RATE) ** FIT.epilogue_exponent
    tiles = b * np.ceil(m / high) * np.ceil(n / across)
    step = 2 * high * across / rows.rate * (1 + (needed / side) ** 8) ** 0.125
    fixed = FIT.prologue + 2 * high * across / written
    # From here on shape (tiles, splits, n).
    parts = splits[:, None]
    waves = tiles[:, None] * parts / rows.cores
    seconds = np.ceil(waves) * (k / parts * step[:, None] + fixed[:, None]) / rows.clock
    # Whole reductions have nothing to add up, and are never too shallow.
    added = FIT.adding_s + parts * b * m * n * 4 / rows.cache
    added = np.where(k / parts < SPLIT_DEPTH, np.inf, added)
    added[0] = 0.0
    seconds += added
    count, place = len(splits), np.arange(len(at))
    # The first of several that are equally fast: smaller tiles, fewer splits.
    best = seconds.reshape(-1, len(at)).argmin(axis=0)
    tile, split = best // count, best % count
    found.seconds[at] = seconds[tile, split, place]
    found.waves[at] = waves[tile, split, place]
    found.use[at] = b * m * n / (tiles[tile, place] * high[tile, 0] * across[tile, 0])
    found.split[at] = splits[split]
    found.side[at] = np.log2(side[tile, 0])
