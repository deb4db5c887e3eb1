"""Kernels of two versions of a program: matching, and descriptions of what changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..common.units import plain, size
from ..features.ir.program import BOOKKEEPING, DTYPE_BITS, DTYPES, FLOAT, FLOAT8, HALF, dtype_family
from ..features.table.columns import INDEX
from ..features.table.row import rows

if TYPE_CHECKING:
    from ..features.ir.program import Program
    from ..features.kernels.kernel import Kernel
    from .program.prediction import KernelEstimate

#: Maximum log difference of the times of two kernels that do the same work but differ in layouts or
#: constants, and still count as the same. Engineering choice.
SAME_TIME = 0.02
#: Relative changes of FLOPs and bytes that are reported. Engineering choice.
TELLING = 0.01
#: Maximum kinds of ops to report, those with the largest counts.
_MOST = 6


class Place(NamedTuple):
    """Source location of a kernel.

    Attributes:
        op: StableHLO op.
        file: Name of the file without folders, which differ between versions.
        line: Line number; 0 if unknown.
    """

    op: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel of one version. Times are per execution, in microseconds.

    Attributes:
        name: The compiler's name.
        text: Digest of the HLO.
        work: Kind, op, element type, FLOPs, bytes read and written, and the type that products are
            computed in (TF32 or FP32 for f32). Errors of kernels with equal work are equal.
        us: Predicted time.
        below: Log distance to the lower bound of the 90 % interval, positive.
        above: Log distance to the upper bound.
        times: Executions per run.
        places: Source locations, the main one first.
        module: Path of its modules, joined by slashes, or empty.
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
        """Kind of the kernel."""
        return self.work[0]

    @property
    def opcode(self) -> str:
        """HLO opcode."""
        return self.work[1]

    @property
    def dtype(self) -> str:
        """Element type of the computation."""
        return self.work[2]

    @property
    def flops(self) -> float:
        """Floating-point operations over all executions."""
        return self.work[3] * self.times

    @property
    def bytes(self) -> float:
        """Bytes read and written over all executions."""
        return (self.work[4] + self.work[5]) * self.times

    @property
    def total_us(self) -> float:
        """Microseconds over all executions."""
        return self.us * self.times


def pieces_of(kernels: Sequence[Kernel], estimates: Sequence[KernelEstimate]) -> list[Piece]:
    """Return the kernels of a program that take time.

    Args:
        kernels: Kernels of the lowered program.
        estimates: Their predictions, in the same order.
    """
    found = []
    rates = rows(kernels)[:, INDEX["matrix_dtype"]].astype(int).tolist()
    for kernel, own, rate in zip(kernels, estimates, rates, strict=True):
        # Kernels without work, and one half of an asynchronous pair, take no time.
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
    """Kernels that are the same in two versions, and those that are not.

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

    Matched are kernels with the same text in the same module; then with the same text anywhere;
    then with the same work and nearly the same time.
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
            # Equal kernels have the same order in both versions.
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
    """Map from lines of the old version to lines of the new one.

    It is derived from the files if both can be read, else from the kernels in both versions.

    Args:
        old: Kernels of the old version.
        new: Kernels of the new version.
        both: Pairs of matched kernels.
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
        """Return the location in the new version of a location in the old one."""
        known = self._known[place.file]
        if not place.line or not known:
            return place
        # An insertion or deletion shifts all that follows: take the nearest line before.
        before = [line for line in known if line <= place.line]
        near = max(before) if before else min(known)
        return place._replace(line=max(1, place.line + known[near] - near))


def _lines_moved(old: str, new: str) -> dict[int, int]:
    """Map line numbers of a file to another version of it; empty if one cannot be read."""
    try:
        before, after = (Path(path).read_text(encoding="utf-8") for path in (old, new))
    except (OSError, ValueError):
        return {}
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    found: dict[int, int] = {}
    for tag, start, end, at, to in matcher.get_opcodes():
        if tag in ("equal", "replace"):
            # Changed lines correspond to those that replaced them, in order.
            pairs = zip(range(start, end), range(at, to), strict=False)
            found |= {line + 1: other + 1 for line, other in pairs}
    return found


def linked(
    old: Sequence[Piece], new: Sequence[Piece], moved: MovedLines
) -> list[tuple[list[Piece], list[Piece]]]:
    """Group the kernels made from the same ops, separately for each version.

    Args:
        old: Kernels that only the old version has.
        new: Kernels that only the new version has.
        moved: Maps locations of the old version to the new one.
    """
    groups: dict[object, tuple[list[Piece], list[Piece]]] = {}
    within: tuple[dict[Place, object], dict[Place, object]] = ({}, {})
    made_of: defaultdict[object, dict[Place, None]] = defaultdict(dict)
    for side, pieces in enumerate((old, new)):
        for piece in pieces:
            places = [p if side else moved(p) for p in piece.places if p.line]
            # Without a line, only the op and the module identify the origin.
            key: object = places[0] if places else (piece.module, *piece.work[:2])
            groups.setdefault(key, ([], []))[side].append(piece)
            made_of[key].update(dict.fromkeys(places))
            for place in places:
                within[side].setdefault(place, key)
    # An op with its own kernel in only one version was fused into another kernel in the other.
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


def kernel_reasons(old: Sequence[Piece], new: Sequence[Piece]) -> tuple[str, ...]:
    """Describe how the kernels of some ops differ between two versions."""
    if not old or not new:
        kind = Counter(p.opcode for p in (*old, *new)).most_common(1)[0][0]
        return (f"{kind} {'removed' if old else 'added'}",)
    found = []
    widths = [_floats(pieces) for pieces in (old, new)]
    if widths[0] != widths[1] and all(widths):
        before, after = (max(w, key=lambda d: DTYPE_BITS[d]) for w in widths)
        wider = DTYPE_BITS[after] - DTYPE_BITS[before]
        names = [", ".join(sorted(w)) for w in widths]
        word = "widened" if wider > 0 else "narrowed" if wider < 0 else "changed"
        found.append(f"{names[0]} {word} to {names[1]}")
    counts = [sum(p.times for p in pieces) for pieces in (old, new)]
    work = [sum(p.flops for p in pieces) for pieces in (old, new)]
    same_work = abs(work[1] - work[0]) <= TELLING * max(work)
    if counts[0] != counts[1]:
        said = f"{plain(counts[0])} → {plain(counts[1])} kernels"
        # The same arithmetic in more kernels: intermediate results now go through memory.
        if same_work:
            said = f"{'fusion broken' if counts[1] > counts[0] else 'fused'}: {said}"
        found.append(said)
    if not same_work:
        found.append(f"{_share(work)} FLOPs")
    moved = [sum(p.bytes for p in pieces) for pieces in (old, new)]
    if abs(moved[1] - moved[0]) > TELLING * max(moved):
        sign = "+" if moved[1] > moved[0] else "−"
        found.append(f"{sign}{size(abs(moved[1] - moved[0]))} moved")
    return tuple(found) or ("written in another way",)


def _share(pair: Sequence[float]) -> str:
    before, after = pair
    if not before:
        return "first"
    return f"{after / before - 1.0:+.0%}" if after < 10 * before else f"{after / before:.3g}×"


def _floats(pieces: Sequence[Piece]) -> set[str]:
    kinds = {p.dtype for p in pieces}
    return {own for own in kinds if dtype_family(own) in (FLOAT, HALF, FLOAT8)}


def program_reasons(old: Program, new: Program) -> tuple[str, ...]:
    """Describe how the ops and arguments of two programs differ before compilation."""
    found = []
    if arguments := _arguments(old, new):
        found.append(f"recompilation: {arguments}")
    counts = [_ops(program) for program in (old, new)]
    opcodes = {own: [_by_dtype(c, own) for c in counts] for own, _ in (*counts[0], *counts[1])}
    told: list[tuple[int, str]] = []
    for name, (before, after) in opcodes.items():
        gone, come = before - after, after - before
        if sum(gone.values()) == sum(come.values()):
            if gone:
                kinds = f"{'/'.join(sorted(gone))} → {'/'.join(sorted(come))}"
                told.append((gone.total(), f"{gone.total()} {name} {kinds}"))
        else:
            more = after.total() - before.total()
            told.append((abs(more), f"{'+' if more > 0 else '−'}{abs(more)} {name}"))
    told.sort(key=lambda own: -own[0])
    if told:
        rest = f" and {len(told) - _MOST} more kinds" if len(told) > _MOST else ""
        found.append("ops: " + ", ".join(text for _, text in told[:_MOST]) + rest)
    return tuple(found)


def _ops(program: Program) -> Counter[tuple[str, str]]:
    """Count the ops of a program by opcode and element type of the result."""
    found: Counter[tuple[str, str]] = Counter()
    for computation in program.computations.values():
        for op in computation.ops:
            if op.opcode not in BOOKKEEPING and op.results:
                found[op.opcode, op.type.dtype] += 1
    return found


def _by_dtype(counts: Counter[tuple[str, str]], opcode: str) -> Counter[str]:
    return Counter({dtype: n for (own, dtype), n in counts.items() if own == opcode})


def _arguments(old: Program, new: Program) -> str:
    """Describe how the entry's arguments differ; empty if they do not."""
    before, after = ([str(p.type) for p in o.entry_computation.parameters] for o in (old, new))
    if len(before) != len(after):
        return f"{len(before)} → {len(after)} arguments"
    differ = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if not differ:
        return ""
    first = differ[0]
    rest = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"argument {first} {before[first]} → {after[first]}{rest}"
