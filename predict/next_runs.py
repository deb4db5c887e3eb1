"""Which runs narrow the interval of an answer most, by how much, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt

import numpy as np

from ..common.interval import Interval
from ..models.adapt.active import Errors, choose_for
from ..models.trust.calibrator import NORMAL_90

#: Seconds until a kind of run measures, such as the start of a framework and its compiler, and how
#: often it repeats what it measures. Engineering estimates, for costs alone.
START_S = {"operator": 10.0, "kernel": 60.0, "step": 300.0, "serving": 300.0}
REPEATS = {"operator": 200, "kernel": 50, "step": 20, "serving": 1}


@dataclass(frozen=True)
class Run:
    """A run that may be made.

    Attributes:
        what: What is measured, in words.
        command: A command to paste.
        seconds: Predicted time of what is measured once.
        devices: Devices that it takes.
    """

    what: str
    command: str
    seconds: float
    devices: int = 1

    def hours(self, kind: str) -> float:
        """Device hours of the run.

        Args:
            kind: One of :data:`START_S`.
        """
        return self.devices * (START_S[kind] + REPEATS[kind] * self.seconds) / 3600.0


@dataclass(frozen=True)
class ChosenRun:
    """A run worth making.

    Attributes:
        what: What is measured, in words.
        command: A command to paste.
        lo: Lower end of the question's interval that is expected after it and those before it.
        hi: Upper end.
        hours: Device hours that it takes.
        cost: In the currency of the price of a device hour, if that is given.
    """

    what: str
    command: str
    lo: float
    hi: float
    hours: float
    cost: float | None


@dataclass(frozen=True)
class NextRuns:
    """The runs that narrow an interval most.

    Attributes:
        asked: The interval now, in seconds.
        runs: The most informative first.
        then: Commands that make an answer of the measurements.
        notes: What else has to be known.
    """

    asked: Interval
    runs: tuple[ChosenRun, ...]
    then: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``next_runs`` of ``--json``; ends in seconds."""
        return {
            "runs": [asdict(run) for run in self.runs],
            "then": list(self.then),
            "notes": list(self.notes),
        }


def variance_of(interval: Interval) -> float:
    """Variance of the logarithm of what a 90 % interval is of."""
    return (log(interval.hi / interval.lo) / 2.0 / NORMAL_90) ** 2


def next_runs(
    asked: Interval,
    runs: Sequence[Run],
    errors: Sequence[Errors],
    count: int,
    *,
    kind: str,
    price: float | None = None,
    stays: float | None = None,
    then: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> NextRuns:
    """Choose runs for a question; with a price, by what they narrow for their cost.

    Args:
        asked: Answer to the question.
        runs: Candidates.
        errors: Variants of what is known of their errors and, last, of the question's.
        count: Number of runs to choose.
        kind: One of :data:`START_S`.
        price: Of a device for an hour.
        stays: Variance of the answer's logarithm that no run removes; by default the noise of
            measurements, and all else is what runs may tell.
        then: Commands that make an answer of the measurements.
        notes: What else has to be known.
    """
    before = variance_of(asked)
    if stays is None:
        stays = float(np.mean([own.noise for own in errors]))
        errors = [own.given(max(before - stays, 0.0)) for own in errors]
    told = max(before - stays, 0.0)
    if not told:
        nothing = "the interval is no wider than measurements scatter: no run narrows it"
        return NextRuns(asked, (), (), (nothing,))
    hours = np.array([run.hours(kind) for run in runs])
    order, left = choose_for(errors, count, None if price is None else hours)
    chosen = []
    for place, share in zip(order.tolist(), left.tolist(), strict=True):
        factor = sqrt((stays + told * share) / before)
        run = runs[place]
        chosen.append(
            ChosenRun(
                what=run.what,
                command=run.command,
                lo=asked.value * exp(factor * log(asked.lo / asked.value)),
                hi=asked.value * exp(factor * log(asked.hi / asked.value)),
                hours=float(hours[place]),
                cost=None if price is None else float(hours[place]) * price,
            )
        )
    return NextRuns(asked, tuple(chosen), tuple(then), tuple(notes))
