"""Runs of equal blocks in a sequence of ops, found as periods in what the ops do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: Runs of fewer blocks are not looked for by default. It must not exceed the least of
#: ``MIN_LAYERS`` in ``lower.py``, less one: the first or last layer may differ.
MIN_LAYERS = 6
#: Most periods that are tried, the most frequent gaps between equal ops first. Chosen by judgement:
#: it bounds the search, and the period of a layer is among the commonest gaps.
_MAX_PERIODS = 400
#: Fewest ops of a layer; shorter periods are more likely chains of equal elementwise ops.
_MIN_PERIOD = 3

#: What an operand reads: result ``number`` of op ``op``, or argument ``number`` if ``op`` is -1.
Read = tuple[int, int]


@dataclass(frozen=True)
class OpTable:
    """Ops of a function in order, without its return.

    Attributes:
        signatures: What each op does: opcode, attributes, types, bodies.
        reads: What each op reads.
    """

    signatures: Sequence[Hashable]
    reads: Sequence[Sequence[Read]]


@dataclass(frozen=True)
class Run:
    """Equal blocks of ops.

    Attributes:
        start: First op.
        period: Ops of a block.
        count: Blocks.
        tail: Ops of one more block that is cut off.
    """

    start: int
    period: int
    count: int
    tail: int = 0

    @property
    def stop(self) -> int:
        """One past the last op of the last whole block."""
        return self.start + self.period * self.count

    def place(self, op: int) -> tuple[int, int] | None:
        """Return the block and offset of an op; ``None`` if it lies elsewhere."""
        if not self.start <= op < self.stop:
            return None
        return divmod(op - self.start, self.period)


def find_runs(table: OpTable, least: int = MIN_LAYERS) -> list[Run]:
    """Find all runs of at least a number of blocks, for likely periods; they may overlap."""
    codes = _codes(table.signatures)
    return [run for period in _periods(codes, least) for run in _runs_of(codes, period, least)]


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(s, len(known)) for s in signatures], dtype=np.int64)


def _periods(codes: np.ndarray, least: int) -> list[int]:
    """List likely periods: gaps between neighbouring equal ops, the commonest first."""
    # Sorted by what they do, in order of place: neighbours are successive equal ops.
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    gaps = np.diff(order)[same]
    counts = Counter(gaps[gaps >= _MIN_PERIOD].tolist())
    return [gap for gap, n in counts.most_common(_MAX_PERIODS) if n >= least - 1]


def _runs_of(codes: np.ndarray, period: int, least: int) -> Iterator[Run]:
    """Yield stretches in which every op equals the one a period later."""
    equal = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
    edges = np.flatnonzero(np.diff(equal.astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        blocks, tail = divmod(stop - start, period)
        # k periods in which each op equals the next are k + 1 equal blocks.
        if blocks + 1 >= least:
            yield Run(start, period, blocks + 1, tail)


def likely_counts(candidates: Sequence[Run]) -> list[int]:
    """Rank numbers of layers by how many ops would belong to them."""
    covered: Counter[int] = Counter()
    for layers in {run.count for run in candidates}:
        near = [r for r in candidates if layers - 1 <= r.count <= layers + 1]
        covered[layers] = sum(r.stop - r.start for r in disjoint(near))
    # Five candidates: a wrong one costs a failed labelling, which is cheap.
    return sorted(covered, key=lambda layers: (-covered[layers], -layers))[:5]


def disjoint(candidates: Sequence[Run], count: int = 0) -> list[Run]:
    """Choose runs that do not overlap, the longest first, and list them in order of place.

    Args:
        candidates: Runs that may overlap.
        count: Number of blocks of the runs that come before all others; 0 for none. A chain of
            equal ops, such as the squares of all gradients, repeats with several periods.
    """
    chosen: list[Run] = []
    for run in sorted(
        candidates, key=lambda r: (bool(count) and r.count != count, r.start - r.stop, r.period)
    ):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)
