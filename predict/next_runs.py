"""Measurements that narrow a prediction's interval most, with their effect and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt

import numpy as np

from ..common.interval import Interval
from ..models.adapt.active import Errors, choose_for
from ..models.trust.calibrator import NORMAL_90

#: Seconds before a kind of run measures, such as the start of a framework and its compiler, and its
#: number of repetitions. Engineering estimates, used only for costs.
START_S = {"operator": 10.0, "kernel": 60.0, "step": 300.0, "serving": 300.0}
REPEATS = {"operator": 200, "kernel": 50, "step": 20, "serving": 1}


@dataclass(frozen=True)
class Run:
    """A possible measurement.

    Attributes:
        what: Description of what is measured.
        command: Shell command; empty if there is none.
        seconds: Predicted time of one repetition.
        devices: Number of devices used.
    """

    what: str
    command: str
    seconds: float
    devices: int = 1

    def hours(self, kind: str) -> float:
        """Return the device hours of the run.

        Args:
            kind: One of :data:`START_S`.
        """
        return self.devices * (START_S[kind] + REPEATS[kind] * self.seconds) / 3600.0


@dataclass(frozen=True)
class ChosenRun:
    """A recommended measurement.

    Attributes:
        what: Description of what is measured.
        command: Shell command; empty if there is none.
        lo: Expected lower bound of the answer's interval after this run and those before it.
        hi: Expected upper bound.
        hours: Device hours.
        cost: Cost in the currency of the price; ``None`` without a price.
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
        asked: The present interval, in seconds.
        runs: Runs, the most informative first.
        then: Commands that turn the measurements into a new prediction.
        notes: Further information for the user.
    """

    asked: Interval
    runs: tuple[ChosenRun, ...]
    then: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as under ``next_runs`` of ``--json``; bounds are in seconds."""
        return {
            "runs": [asdict(run) for run in self.runs],
            "then": list(self.then),
            "notes": list(self.notes),
        }


def variance_of(interval: Interval) -> float:
    """Return the variance of the logarithm of a quantity, given its 90 % interval."""
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
    """Choose runs that narrow an interval most, or most for their cost if a price is given.

    Args:
        asked: The present prediction.
        runs: Candidates.
        errors: Variants of the joint errors of the candidates and, last, of the prediction.
        count: Number of runs to choose.
        kind: One of :data:`START_S`.
        price: Price of a device hour.
        stays: Variance of the answer's logarithm that no run removes; by default the measurement
            noise.
        then: Commands that turn the measurements into a new prediction.
        notes: Further information for the user.
    """
    before = variance_of(asked)
    if stays is None:
        stays = float(np.mean([own.noise for own in errors]))
        errors = [own.given(max(before - stays, 0.0)) for own in errors]
    told = max(before - stays, 0.0)
    if not told:
        nothing = "the interval is as narrow as measurement noise allows: no run narrows it"
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
