"""Comparison of two versions of a program on a device, with the probability that one is faster.

The error of the ratio of two times is the sum of their kernels' errors, each weighted by the
difference of its shares. Kernels in both versions cancel, and so does an error common to all
kernels, such as that of an unmeasured device::

    log(new / old) = Σ (share in the new version - share in the old one) · log error of the kernel
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, hypot, log
from typing import TYPE_CHECKING

import numpy as np

from ..common.interval import Interval, combined_spread
from ..features.ir.untrusted import well_formed
from .matched_kernels import (
    MovedLines,
    Piece,
    kernel_reasons,
    linked,
    match,
    pieces_of,
    program_reasons,
)

if TYPE_CHECKING:
    from ..common.errors import OpcastError
    from ..features.devices.device import DeviceSpec
    from ..features.ir.reader import SourceProgram
    from .program.case import ProgramCase
    from .program.prediction import Prediction
    from .program.predictor import Predictor

#: Correlation of the log errors of two kernels in a difference: the largest measured value (passes
#: on one GPU 0.21, kernels of a CPU's programs 0.11). The smaller it is, the less cancels.
RHO = 0.2
#: Log error of the time outside kernels: gaps may be absent or twice as long as assumed
#: (``Overhead`` of models/program/schedule_cost.py).
_GAPS = log(2.0)
_DIGITS = re.compile(r"[\d.,]+")
#: Maximum number of kernels to name in a change, the costliest.
_KERNELS = 3


@dataclass(frozen=True)
class Change:
    """Kernels of the same ops that differ. Times are per run, in microseconds.

    Attributes:
        lines: ``file:line`` in the new version, or else in the old one; the costliest first.
        reasons: How the kernels differ.
        old_us: Time in the old version.
        new_us: Time in the new version.
        old_kernels: Executions in the old version.
        new_kernels: Executions in the new version.
        kernels: Names of the costliest kernels of the new version, or else of the old one.
        module: Module of the costliest kernel.
    """

    lines: tuple[str, ...]
    reasons: tuple[str, ...]
    old_us: float
    new_us: float
    old_kernels: float
    new_kernels: float
    kernels: tuple[str, ...]
    module: str

    @property
    def more_us(self) -> float:
        """Additional time of the new version."""
        return self.new_us - self.old_us


@dataclass(frozen=True)
class Difference:
    """Two versions of a program on a device. Times are in microseconds.

    Attributes:
        device: Name of the device.
        lowering: Lowering of both.
        old: Time of the old version with its 90 % interval.
        new: Time of the new version with its 90 % interval.
        ratio: New over old, with its 90 % interval, in which common errors cancel.
        changes: Kernels that differ, in order of decreasing change of time.
        rest_us: Additional time of the new version outside of them: gaps, overlap, and kernels that
            are the same in another context.
        same: Number of kernels in both versions.
        reasons: How the ops and arguments differ.
        old_bytes: Peak memory of the old version.
        new_bytes: Peak memory of the new version.
        device_bytes: Device memory available to programs; 0 if unknown.
        notes: Known limits of both predictions.
    """

    device: str
    lowering: str
    old: Interval
    new: Interval
    ratio: Interval
    changes: tuple[Change, ...]
    rest_us: float
    same: int
    reasons: tuple[str, ...]
    old_bytes: float
    new_bytes: float
    device_bytes: float
    notes: tuple[str, ...] = ()

    @property
    def slower(self) -> float:
        """Probability that the new version is slower; 0 if no kernel differs."""
        return self.slower_by(0.0)

    def slower_by(self, share: float) -> float:
        """Return the probability of a slowdown by more than a share of the old time."""
        return 1.0 - self.ratio.chance_below(1.0 + share)

    def beyond(self, limit_us: float) -> float:
        """Return the probability that the new version takes longer than a limit."""
        return 1.0 - self.new.chance_below(limit_us)

    @property
    def fits(self) -> bool | None:
        """Whether the new version fits into the device's memory; ``None`` if that is unknown."""
        return self.new_bytes <= self.device_bytes if self.device_bytes else None

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast diff --json`` prints it."""
        return {
            "device": self.device,
            "lowering": self.lowering,
            "old_us": self.old._asdict(),
            "new_us": self.new._asdict(),
            "ratio": self.ratio._asdict(),
            "slower_probability": self.slower,
            "changes": [{**asdict(own), "more_us": own.more_us} for own in self.changes],
            "rest_us": self.rest_us,
            "same_kernels": self.same,
            "program": list(self.reasons),
            "old_peak_memory_bytes": self.old_bytes,
            "new_peak_memory_bytes": self.new_bytes,
            "fits": self.fits,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Judged:
    """Two versions of a program on a device, with the verdict on the new one.

    Attributes:
        name: Name of the program.
        device: Name of the device.
        difference: Comparison of the versions; ``None`` if they could not be compared.
        excess: Which limit is exceeded; empty if none is.
        error: Why they could not be compared.
    """

    name: str
    device: str
    difference: Difference | None = None
    excess: str = ""
    error: OpcastError | None = None

    def to_dict(self) -> dict[str, object]:
        """Return JSON data; ``error`` is empty if the versions were compared."""
        found = self.difference.to_dict() if self.difference is not None else {}
        own = {"excess": self.excess, "error": str(self.error or "")}
        return {"name": self.name, "device": self.device, **found, **own}


@dataclass(frozen=True)
class Version:
    """A version of a program on a device: its prediction and its kernels.

    Attributes:
        prediction: Prediction of the program.
        pieces: Kernels of the program.
        source: The program.
        rho: Correlation of the errors of its kernels.
    """

    prediction: Prediction
    pieces: tuple[Piece, ...]
    source: SourceProgram
    rho: float

    @classmethod
    def of(cls, case: ProgramCase, predictor: Predictor) -> Version:
        """Predict a case.

        Raises:
            OpcastError: See :meth:`~opcast.predict.program.predictor.Predictor.answer`.
        """
        source, lowered, device = case.lower(predictor)
        with well_formed(source):
            found = predictor.predict_lowered(
                lowered,
                device,
                strict=case.strict,
                source=source,
                power_cap_w=case.power_cap_w,
            )
        pieces = tuple(pieces_of(lowered.kernels, found.kernels))
        return cls(found, pieces, source, _correlation(predictor, device))


def _correlation(predictor: Predictor, device: DeviceSpec) -> float:
    """Return the error correlation that intervals of programs are computed with."""
    model = predictor.model_for(device).program_model
    corrected = model.corrections.get(device.platform)
    if corrected is not None:
        return corrected.correlation
    overhead = model.overheads.get(device.platform)
    return overhead.correlation if overhead is not None else 1.0


def compare(old: Version, new: Version) -> Difference:
    """Compare two versions of a program on one device."""
    before, after = old.prediction, new.prediction
    found = match(old.pieces, new.pieces)
    moved = MovedLines(old.pieces, new.pieces, found.both)
    changes = [_change(*group, moved) for group in linked(found.old, found.new, moved)]
    changes.sort(key=lambda own: -abs(own.more_us))
    value = after.latency_us / before.latency_us
    down, up = ratio_error(old, new)
    more = after.latency_us - before.latency_us
    return Difference(
        device=after.device,
        lowering=after.lowering,
        old=Interval(before.latency_us, before.lo_us, before.hi_us),
        new=Interval(after.latency_us, after.lo_us, after.hi_us),
        ratio=Interval(value, value * exp(-down), value * exp(up)),
        changes=tuple(changes),
        rest_us=more - sum(own.more_us for own in changes),
        same=len(found.both),
        reasons=program_reasons(old.source.program, new.source.program),
        old_bytes=before.peak_memory_bytes,
        new_bytes=after.peak_memory_bytes,
        device_bytes=after.device_memory_bytes,
        # Notes that differ only in figures are kept once.
        notes=tuple({_DIGITS.sub("", own): own for own in (*before.notes, *after.notes)}.values()),
    )


def _change(old: Sequence[Piece], new: Sequence[Piece], moved: MovedLines) -> Change:
    times: dict[str, float] = {}
    for pieces, at in ((new, None), (old, moved)):
        for piece in pieces:
            if piece.places and piece.places[0].line:
                place = at(piece.places[0]) if at is not None else piece.places[0]
                line = f"{place.file}:{place.line}"
                times[line] = times.get(line, 0.0) + piece.total_us
    named = sorted(new or old, key=lambda piece: -piece.total_us)
    return Change(
        lines=tuple(sorted(times, key=lambda line: -times[line])),
        reasons=kernel_reasons(old, new),
        old_us=sum(piece.total_us for piece in old),
        new_us=sum(piece.total_us for piece in new),
        old_kernels=sum(piece.times for piece in old),
        new_kernels=sum(piece.times for piece in new),
        kernels=tuple(dict.fromkeys(piece.name for piece in named))[:_KERNELS],
        module=named[0].module,
    )


def ratio_error(old: Version, new: Version) -> tuple[float, float]:
    """Return the half-widths of the ratio's 90 % interval in logarithms, downwards and upwards.

    Args:
        old: The old version.
        new: The new version.
    """
    parts = [_shares(version) for version in (old, new)]
    ends = []
    for work in dict.fromkeys((*parts[0], *parts[1])):
        (before, *_), (after, *_) = (part.get(work, (0.0, 0.0, 0.0)) for part in parts)
        _, below, above = parts[1].get(work) or parts[0][work]
        weight = after - before
        # Work that the new version has less of lowers the ratio if it is slower than predicted.
        own = (below, above) if weight >= 0.0 else (above, below)
        ends.append((weight * own[0], weight * own[1]))
    down, up = combined_spread(np.array(ends).reshape(-1, 2), RHO)
    scale = max(_scale(version, part) for version, part in zip((old, new), parts, strict=True))
    return down * scale, up * scale


def _shares(version: Version) -> dict[object, tuple[float, float, float]]:
    """Return shares of a program's time with both log errors, by work of kernels, and for gaps."""
    total = version.prediction.latency_us
    sums: dict[object, list[float]] = {}
    for piece in version.pieces:
        own = sums.setdefault(piece.work, [0.0, 0.0, 0.0])
        own[0] += piece.total_us / total
        own[1], own[2] = max(own[1], piece.below), max(own[2], piece.above)
    kernels = sum(own[0] for own in sums.values())
    found = {work: (share, below, above) for work, (share, below, above) in sums.items()}
    # The gaps are negative where kernels overlap.
    return {**found, "gaps": (1.0 - kernels, _GAPS, _GAPS)}


def _scale(version: Version, parts: dict[object, tuple[float, float, float]]) -> float:
    """Return the ratio of the program's interval width to that from its kernels, at least 1.

    The program's interval also covers errors of the lowering and of the composition.
    """
    ends = np.array([(share * below, share * above) for share, below, above in parts.values()])
    own = hypot(*combined_spread(ends.reshape(-1, 2), version.rho))
    p = version.prediction
    whole = hypot(log(p.latency_us / p.lo_us), log(p.hi_us / p.latency_us))
    return max(1.0, whole / own) if own > 0.0 else 1.0
