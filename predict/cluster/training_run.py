"""A run of training: days and cost until some tokens are seen, on devices that fail.

Failures come at a constant rate. A run writes a checkpoint after every stretch of work; what was
done since the last one is lost with a failure, after which the job is restarted, and waits for a
repair where no spare box is left.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, exp, expm1, hypot, inf, log, sqrt
from typing import TYPE_CHECKING

from ...common.errors import PlanError
from ...common.interval import Interval
from ...common.types import JsonMapping, JsonObject
from ...common.units import duration, plain
from ...models.power.energy import cost_fields
from ...models.trust.calibrator import NORMAL_90
from ...simulate.step.settings import build

if TYPE_CHECKING:
    from .step import StepPrediction

#: Hours of a device, with its share of host and network, between failures that stop a job: Llama 3
#: 405B met 419 in 54 days of 16,384 H100 (The Llama 3 Herd of Models, 2024, section 3.3.4).
MTBF_H = 16384 * 54 * 24 / 419
#: By which factor it differs between sites: OPT-175B's log has 13,000 hours, Llama 3's 51,000,
#: MegaScale's (NSDI 2024) some 100,000.
MTBF_FACTOR = 2.5
#: Seconds until a job that failed trains again, to find and replace what broke included: less than
#: ten minutes in MegaScale (NSDI 2024, section 6.3).
RESTART_S = 600.0
#: Seconds that training waits for a checkpoint which is written in the background, beside the copy
#: to the host's memory: 6.3 s of a 7B model (PyTorch, "Reducing Model Checkpointing Times by Over
#: 10x with PyTorch Distributed Asynchronous Checkpointing", 2024).
CHECKPOINT_S = 6.3
_DAY, _HOUR = 86400.0, 3600.0
#: Expected failures in one go from which it never ends: one of e^20 attempts does.
_HOPELESS = 20.0


@dataclass(frozen=True)
class RunSettings:
    """What is asked about a run; hours and seconds as its names say.

    Attributes:
        tokens: To be trained on.
        mtbf_h: Hours of one device between failures that stop the job; 0 for :data:`MTBF_H`, of
            which the interval holds a factor of :data:`MTBF_FACTOR`.
        restart_s: From a failure until the job trains again.
        checkpoint_s: Wait of training for a checkpoint; -1 for :data:`CHECKPOINT_S` and the
            copy of the device's state to its host.
        every_s: Work between checkpoints; 0 for the best.
        spares: Boxes that stand by; -1 for as many as are needed.
        repair_h: Until a box that failed is a spare again; with ``spares``.
        days: Deadline whose probability is asked; 0 for none.
    """

    tokens: float = 0.0
    mtbf_h: float = 0.0
    restart_s: float = RESTART_S
    checkpoint_s: float = -1.0
    every_s: float = 0.0
    spares: int = -1
    repair_h: float = 0.0
    days: float = 0.0

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            PlanError: A value is missing, not finite, or below what it may be.
        """
        for name, value in asdict(self).items():
            # Of these -1 stands for what is taken where nothing is said.
            least = -1.0 if name in ("spares", "checkpoint_s") else 0.0
            if not value < inf or (value < 0 and value != least):
                raise PlanError(f"{name}={value:g} is no time or number", where="run")
        if not self.tokens:
            raise PlanError("how long is the run?", where="run", hint="as in --run tokens=15e12")
        if (self.spares >= 0) != (self.repair_h > 0):
            raise PlanError(
                "spares come back after a repair",
                where="run",
                hint="give both or neither, as in spares=4,repair_h=24",
            )


@dataclass(frozen=True)
class Wall:
    """Time of some work on devices that fail; seconds.

    Attributes:
        mean: Expected time.
        deviation: Its standard deviation.
        failures: Expected number of failures that stop the job.
        written: Time in which checkpoints are waited for, of work that counts.
        stalled: Time without a spare, expected.
    """

    mean: float
    deviation: float
    failures: float
    written: float
    stalled: float


def best_stretch(checkpoint: float, rate: float) -> float:
    """Work between checkpoints that costs least, in seconds.

    Young's first-order optimum (CACM 17(9), 1974): ``sqrt(2 · checkpoint / rate)``.

    Args:
        checkpoint: Seconds that training waits for one.
        rate: Failures per second.
    """
    return sqrt(2.0 * checkpoint / rate) if rate else inf


def _attempts(length: float, rate: float) -> tuple[float, float, float]:
    """Times lost before a stretch without failure: how many, and mean and variance of each.

    An attempt fails with ``1 - exp(-rate · length)``, after a time that is exponential below
    ``length``.
    """
    if not rate:
        return 0.0, 0.0, 0.0
    often = expm1(rate * length)
    mean = 1.0 / rate - length / often
    return often, mean, 1.0 / rate**2 - length**2 * (1.0 + 1.0 / often) / often


def _until_whole(length: float, rate: float) -> tuple[float, float]:
    """Mean and variance of the time until ``length`` seconds pass without a failure."""
    often, mean, variance = _attempts(length, rate)
    return length + often * mean, often * variance + often * (often + 1.0) * mean**2


def wall_time(
    work: float,
    rate: float,
    stretch: float,
    checkpoint: float,
    restart: float,
    spares: int = -1,
    repair: float = 0.0,
) -> Wall:
    """Time of work on devices that fail, with checkpoints and restarts.

    The mean without stalls is Daly's (Future Generation Computer Systems 22, 2006, equation 20):
    ``work / stretch · exp(rate · restart) · (exp(rate · (stretch + checkpoint)) - 1) / rate``.
    Boxes under repair are as many as customers of Erlang's loss system of ``spares + 1`` servers,
    in which the job stands still while all are taken.

    Args:
        work: Seconds without failures and checkpoints.
        rate: Failures per second.
        stretch: Seconds of work between checkpoints.
        checkpoint: Seconds that training waits for each.
        restart: Seconds from a failure until training goes on; it may fail as well.
        spares: Boxes that stand by; negative for as many as are needed.
        repair: Mean seconds until a box is a spare again.

    Raises:
        PlanError: A stretch or a restart practically never ends without a failure.
    """
    if rate * max(min(stretch, work) + checkpoint, restart) > _HOPELESS:
        raise PlanError(
            f"a failure every {1.0 / rate:.3g} s lets nothing end",
            where="run",
            hint="is mtbf_h in hours of one device?",
        )
    pieces = max(1.0, work / min(stretch, work))
    often, lost, apart = _attempts(work / pieces + checkpoint, rate)
    again, spread = _until_whole(restart, rate)
    # Each failed attempt is followed by a restart; a geometric number of both.
    mean = pieces * (work / pieces + checkpoint + often * (lost + again))
    stall = scatter = 0.0
    if spares >= 0 and rate:
        blocked, taken = 1.0, rate * repair
        for servers in range(1, spares + 2):
            blocked = taken * blocked / (servers + taken * blocked)
        stall = mean * blocked / (1.0 - blocked) / (pieces * often)
        # It lasts until the first of all broken boxes is repaired: exponential, and rarely none.
        scatter = max(0.0, stall * (2.0 * repair / (spares + 1) - stall))
    variance = often * (apart + spread + scatter)
    variance += often * (often + 1.0) * (lost + again + stall) ** 2
    stalled = pieces * often * stall
    return Wall(mean + stalled, sqrt(pieces * variance), rate * mean, pieces * checkpoint, stalled)


@dataclass(frozen=True)
class TrainingRun:
    """A run of training.

    Attributes:
        settings: What was asked.
        steps: Optimiser steps.
        step: Seconds of one, with its interval.
        devices: Of the cluster.
        checkpoint: Seconds that training waits for a checkpoint.
        price: Of a device for an hour, if given.
    """

    settings: RunSettings
    steps: int
    step: Interval
    devices: int
    checkpoint: float
    price: float | None = None

    def _rate(self, mtbf_h: float) -> float:
        """Failures per second of all devices."""
        return self.devices / (mtbf_h * _HOUR)

    def _wall(self, mtbf_h: float) -> Wall:
        own = self.settings
        return wall_time(
            self.steps * self.step.value,
            self._rate(mtbf_h),
            self.stretch,
            self.checkpoint,
            own.restart_s,
            own.spares,
            own.repair_h * _HOUR,
        )

    @property
    def mtbf_h(self) -> float:
        """Hours of a device between failures."""
        return self.settings.mtbf_h or MTBF_H

    @property
    def stretch(self) -> float:
        """Seconds of work between checkpoints: whole steps."""
        best = best_stretch(self.checkpoint, self._rate(self.mtbf_h))
        asked = self.settings.every_s or best
        return max(1, round(asked / self.step.value)) * self.step.value

    @cached_property
    def wall(self) -> Wall:
        """The time as it is expected."""
        return self._wall(self.mtbf_h)

    @cached_property
    def seconds(self) -> Interval:
        """All of the run: errors of the step, chance, and failures that are not those of a site."""
        mean = self.wall.mean
        chance = NORMAL_90 * self.wall.deviation / mean
        few, many = mean, mean
        if not self.settings.mtbf_h:
            few = self._wall(self.mtbf_h * MTBF_FACTOR).mean
            many = self._wall(self.mtbf_h / MTBF_FACTOR).mean
        down = hypot(log(self.step.value / self.step.lo), log(mean / few), chance)
        up = hypot(log(self.step.hi / self.step.value), log(many / mean), chance)
        # Nothing is faster than steps at the end of their interval without a failure.
        least = self.steps * self.step.lo
        return Interval(mean, max(mean * exp(-down), least), mean * exp(up))

    def to_dict(self) -> JsonObject:
        """Plain data, as ``opcast simulate --run --json`` prints it."""
        wall, span = self.wall, self.seconds
        trained = self.steps * self.step.value
        data: JsonObject = {
            "tokens": self.settings.tokens,
            "steps": self.steps,
            "days": span.value / _DAY,
            "days_lo": span.lo / _DAY,
            "days_hi": span.hi / _DAY,
            "days_without_failures": trained / _DAY,
            "goodput": trained / wall.mean,
            "failures": wall.failures,
            "mtbf_h": self.mtbf_h,
            "checkpoint_s": self.checkpoint,
            "checkpoint_every_s": self.stretch,
            "checkpoint_share": wall.written / wall.mean,
            "stalled_share": wall.stalled / wall.mean,
            "device_hours": span.value / _HOUR * self.devices,
            **cost_fields(self.price, span, self.devices),
        }
        if self.settings.days:
            data["probability"] = span.chance_below(self.settings.days * _DAY)
        return data

    def lines(self) -> list[str]:
        """For people: days and cost of the run, what failures take of it, and the deadline."""
        data, own = self.to_dict(), self.settings
        lines = [
            f"{own.tokens:,.0f} tokens in {self.steps:,} steps: {data['days']:.3g} days "
            f"({data['days_lo']:.3g} to {data['days_hi']:.3g}), "
            f"{data['device_hours']:,.0f} device hours"
        ]
        if self.price is not None:
            lines[0] += f", cost {plain(data['cost'], 4)} ({plain(data['cost_lo'], 4)} to "
            lines[0] += f"{plain(data['cost_hi'], 4)})"
        stalled = f", {data['stalled_share']:.1%} without a spare" if own.spares >= 0 else ""
        said = "as given" if own.mtbf_h else "as of Llama 3's run"
        lines.append(
            f"{data['goodput']:.1%} of them train: {data['failures']:,.0f} failures (each "
            f"{self.mtbf_h:,.0f} device hours, {said}), a checkpoint of "
            f"{duration(self.checkpoint * 1e6)} every {duration(self.stretch * 1e6)} "
            f"({data['checkpoint_share']:.1%}){stalled}"
        )
        if own.days:
            lines.append(f"within {own.days:g} days: {data['probability']:.0%} likely")
        return lines


def training_run(asked: JsonMapping, found: StepPrediction, host_link: float) -> TrainingRun:
    """The run whose steps were predicted.

    Args:
        asked: Fields of :class:`RunSettings`.
        found: The step.
        host_link: Bytes per second between a device and its host.

    Raises:
        PlanError: A setting is unknown, malformed or missing, or the step trains nothing.
    """
    settings = build(RunSettings, asked, "run")
    settings.check()
    if found.workload.mode != "train":
        raise PlanError(f"a {found.workload.mode} step trains nothing", where="run")
    held = found.fit.worst
    copied = (held.parameters + held.optimizer) / host_link
    return TrainingRun(
        settings,
        ceil(settings.tokens / (found.workload.batch * found.workload.seq)),
        found.interval,
        found.plan.devices,
        CHECKPOINT_S + copied if settings.checkpoint_s < 0 else settings.checkpoint_s,
        found.price,
    )
