"""Kernels of two versions of a program, and which of them are the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...features.ir.program import DTYPES
from ...features.table.columns import INDEX
from ...features.table.row import rows

if TYPE_CHECKING:
    from ...features.kernels.kernel import Kernel
    from ..program.prediction import KernelEstimate

#: Largest difference of the times, in logarithms, of two kernels that do the same work but are not
#: written alike (other layouts, constants) and count as the same. Engineering choice.
SAME_TIME = 0.02


class Place(NamedTuple):
    """Where a kernel came from.

    Attributes:
        op: StableHLO op.
        file: Name of the file, without folders: two versions lie in different ones.
        line: 0 if it is not known.
    """

    op: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel of one version. Times are of one execution, in microseconds.

    Attributes:
        name: As the compiler calls it.
        text: What tells it from kernels that are written in another way: a digest of its HLO.
        work: What it does: kind, op, element type, FLOPs, bytes read and written, and the type that
            its products are computed in (TF32 or FP32 of f32). Kernels of equal work err alike.
        us: Predicted time.
        below: Distance of the lower end of its 90 % interval in logarithms, positive.
        above: That of the upper end.
        times: Executions in a run.
        places: Where it came from; the first is what it mainly came from.
        module: Modules that it belongs to, joined by slashes, or empty.
        files: Names of the files of the places, and their paths.
    """

    name: str
    text: str
    work: tuple[str, str, str, float, float, float, str]
    us: float
    below: float
    above: float
    times: float
    places: tuple[Place, ...]
    module: str
    files: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """Kind of kernel."""
        return self.work[0]

    @property
    def opcode(self) -> str:
        """HLO opcode."""
        return self.work[1]

    @property
    def dtype(self) -> str:
        """Element type that it computes in."""
        return self.work[2]

    @property
    def flops(self) -> float:
        """Floating-point operations of all executions."""
        return self.work[3] * self.times

    @property
    def bytes(self) -> float:
        """Bytes that all executions read and write."""
        return (self.work[4] + self.work[5]) * self.times

    @property
    def total_us(self) -> float:
        """Microseconds of all executions."""
        return self.us * self.times


def pieces_of(kernels: Sequence[Kernel], estimates: Sequence[KernelEstimate]) -> list[Piece]:
    """The kernels of a program that take time.

    Args:
        kernels: Of the lowered program.
        estimates: Their predictions, in the same order.
    """
    found = []
    rates = rows(kernels)[:, INDEX["matrix_dtype"]].astype(int).tolist()
    for kernel, own, rate in zip(kernels, estimates, rates, strict=True):
        # Half of an asynchronous pair, and kernels without work, take none.
        if not kernel.takes_time or own.latency_us <= 0.0:
            continue
        named = [(source.file.rsplit("/", 1)[-1], source) for source in kernel.sources]
        places = (Place(source.op, name, source.line) for name, source in named)
        moved = (kernel.bytes_in, kernel.bytes_out)
        work = (own.kind, kernel.opcode, kernel.dtype, own.flops, *moved, DTYPES[rate])
        found.append(
            Piece(
                own.name,
                kernel.hash,
                work,
                own.latency_us,
                log(own.latency_us / max(own.lo_us, 1e-3 * own.latency_us)),
                log(max(own.hi_us, own.latency_us) / own.latency_us),
                own.multiplicity,
                tuple(dict.fromkeys(places)),
                own.module,
                tuple({name: source.file for name, source in named}.items()),
            )
        )
    return found


@dataclass(frozen=True)
class Matched:
    """Which kernels of two versions are the same.

    Attributes:
        both: Pairs of an old and a new kernel that are the same.
        old: Kernels that only the old version has.
        new: Kernels that only the new version has.
    """

    both: tuple[tuple[Piece, Piece], ...]
    old: tuple[Piece, ...]
    new: tuple[Piece, ...]


def match(old: Sequence[Piece], new: Sequence[Piece]) -> Matched:
    """Pair the kernels of two versions, each one once.

    Kernels of the same text in the same module are the same; then those of the same text anywhere;
    then those of the same work that take as long.
    """
    both: list[tuple[Piece, Piece]] = []
    left, right = list(old), list(new)
    for level in (_in_place, _written, _working):
        waiting: defaultdict[object, list[Piece]] = defaultdict(list)
        for piece in right:
            waiting[level(piece)].append(piece)
        rest = []
        for piece in left:
            queue = waiting[level(piece)]
            # Equal kernels stand in the same order in both.
            if queue and (level is not _working or abs(log(queue[0].us / piece.us)) <= SAME_TIME):
                both.append((piece, queue.pop(0)))
            else:
                rest.append(piece)
        kept = {id(piece) for queue in waiting.values() for piece in queue}
        left, right = rest, [piece for piece in right if id(piece) in kept]
    return Matched(tuple(both), tuple(left), tuple(right))


def _in_place(piece: Piece) -> object:
    return piece.text, piece.times, piece.module, tuple(place.op for place in piece.places)


def _written(piece: Piece) -> object:
    return piece.text, piece.times


def _working(piece: Piece) -> object:
    return piece.work, piece.times


class MovedLines:
    """Where lines of the old version stand in the new one.

    The files tell it where both can be read, else the kernels that both versions have.

    Args:
        old: Kernels of the old version.
        new: Kernels of the new one.
        both: Pairs of kernels that are the same.
    """

    def __init__(
        self,
        old: Iterable[Piece],
        new: Iterable[Piece],
        both: Iterable[tuple[Piece, Piece]],
    ) -> None:
        votes: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)
        for one, other in both:
            for was, now in zip(one.places, other.places, strict=False):
                if was.line and was[:2] == now[:2]:
                    votes[was.file, was.line][now.line] += 1
        self._known: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for (file, line), counts in votes.items():
            self._known[file][line] = counts.most_common(1)[0][0]
        folders = [{file: path for p in own for file, path in p.files} for own in (old, new)]
        for file in folders[0].keys() & folders[1].keys():
            if told := _lines_moved(folders[0][file], folders[1][file]):
                self._known[file] = told

    def __call__(self, place: Place) -> Place:
        """A place of the old version as the new one has it."""
        known = self._known[place.file]
        if not place.line or not known:
            return place
        # What is added or taken away moves all that follows: the nearest line before it tells.
        before = [line for line in known if line <= place.line]
        near = max(before) if before else min(known)
        return place._replace(line=max(1, place.line + known[near] - near))


def _lines_moved(old: str, new: str) -> dict[int, int]:
    """Numbers of the lines of a file in another version of it; empty if one cannot be read."""
    try:
        before, after = (Path(path).read_text(encoding="utf-8") for path in (old, new))
    except (OSError, ValueError):
        return {}
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    found: dict[int, int] = {}
    for tag, start, end, at, to in matcher.get_opcodes():
        if tag in ("equal", "replace"):
            # Lines that were changed stand for those that took their place, in order.
            pairs = zip(range(start, end), range(at, to), strict=False)
            found |= {line + 1: other + 1 for line, other in pairs}
    return found


def linked(
    old: Sequence[Piece], new: Sequence[Piece], moved: MovedLines
) -> list[tuple[list[Piece], list[Piece]]]:
    """Put the kernels together that were made of the same ops, those of each version apart.

    Args:
        old: Kernels that only the old version has.
        new: Kernels that only the new version has.
        moved: Takes places of the old version to the new one.
    """
    groups: dict[object, tuple[list[Piece], list[Piece]]] = {}
    within: tuple[dict[Place, object], dict[Place, object]] = ({}, {})
    made_of: defaultdict[object, dict[Place, None]] = defaultdict(dict)
    for side, pieces in enumerate((old, new)):
        for piece in pieces:
            places = [p if side else moved(p) for p in piece.places if p.line]
            # Without a line the op and the module are all that is known.
            key: object = places[0] if places else (piece.module, *piece.work[:2])
            groups.setdefault(key, ([], []))[side].append(piece)
            made_of[key].update(dict.fromkeys(places))
            for place in places:
                within[side].setdefault(place, key)
    # An op whose kernel only one version has was within another kernel in the other one.
    into: dict[object, object] = {}

    def end(key: object) -> object:
        while key in into:
            key = into[key]
        return key

    for key, group in groups.items():
        for side in (0, 1):
            others = (within[side].get(place) for place in made_of[key])
            other = next((own for own in others if own is not None and end(own) != key), None)
            if not group[side] and other is not None:
                into[key] = other
    for key in into:
        for own, more in zip(groups[end(key)], groups.pop(key), strict=True):
            own.extend(more)
    return list(groups.values())
