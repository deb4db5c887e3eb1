"""Training runs on devices that fail: days and cost of training on a number of tokens.

Failures occur at a constant rate. A run writes a checkpoint after every stretch of work; a failure
loses the work since the last one. The job is then restarted, after a repair if no spare node is
left.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, exp, expm1, hypot, inf, log, sqrt
from typing import TYPE_CHECKING

from ...common.errors import PlanError
from ...common.interval import Interval
from ...common.types import JsonMapping, JsonObject
from ...common.units import duration, likely, per_second, plain, quantity
from ...models.power.energy import cost_fields, energy_fields
from ...models.trust.calibrator import NORMAL_90
from ...simulate.step.settings import build

if TYPE_CHECKING:
    from .step import StepPrediction

#: Hours of a device, with its share of host and network, between failures that stop a job: Llama 3
#: 405B had 419 in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024, section 3.3.4).
MTBF_H = 16384 * 54 * 24 / 419
#: Factor by which the MTBF differs between sites: OPT-175B's log has 13,000 hours, Llama 3's
#: 51,000, MegaScale's (NSDI 2024) some 100,000.
MTBF_FACTOR = 2.5
#: Seconds from a failure until the job trains again, including diagnosis and replacement: less than
#: ten minutes in MegaScale (NSDI 2024, section 6.3).
RESTART_S = 600.0
#: Seconds for which training waits for an asynchronous checkpoint, besides the copy to host memory:
#: 6.3 s for a 7B model (PyTorch, "Reducing Model Checkpointing Times by Over 10x with PyTorch
#: Distributed Asynchronous Checkpointing", 2024).
CHECKPOINT_S = 6.3
_DAY, _HOUR = 86400.0, 3600.0
#: Expected failures per attempt above which a run never ends: one of e^20 attempts succeeds.
_HOPELESS = 20.0


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run; units as in the names.

    Attributes:
        tokens: Tokens to train on.
        mtbf_h: Hours of one device between failures that stop the job; 0 for :data:`MTBF_H`, with
            a factor of :data:`MTBF_FACTOR` in the interval.
        restart_s: Seconds from a failure until the job trains again.
        checkpoint_s: Time for which training waits for a checkpoint; -1 for :data:`CHECKPOINT_S`
            and the copy of the device's state to its host.
        every_s: Work between checkpoints; 0 for the optimum.
        spares: Spare nodes; -1 for as many as are needed.
        repair_h: Time until a failed node is a spare again; with ``spares``.
        days: Deadline whose probability is computed; 0 for none.
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
        """Check that all settings are given and in range.

        Raises:
            PlanError: A value is missing, not finite, or too small.
        """
        for name, value in asdict(self).items():
            # For these, -1 stands for the default.
            least = -1.0 if name in ("spares", "checkpoint_s") else 0.0
            if not value < inf or (value < 0 and value != least):
                raise PlanError(f"{name}={value:g} is not a valid time or number", where="run")
        if not self.tokens:
            raise PlanError("the run has no length", where="run", hint="as in --run tokens=15e12")
        if (self.spares >= 0) != (self.repair_h > 0):
            raise PlanError(
                "spares and repair_h belong together",
                where="run",
                hint="give both or neither, as in spares=4,repair_h=24",
            )


@dataclass(frozen=True)
class Wall:
    """Wall time of some work on devices that fail; seconds.

    Attributes:
        mean: Expected time.
        deviation: Standard deviation of the time.
        failures: Expected number of failures that stop the job.
        written: Time spent waiting for checkpoints, of work that is kept.
        stalled: Expected time without a spare node.
    """

    mean: float
    deviation: float
    failures: float
    written: float
    stalled: float


def best_stretch(checkpoint: float, rate: float) -> float:
    """Return the optimal work between checkpoints, in seconds.

    Young's first-order optimum (CACM 17(9), 1974): ``sqrt(2 · checkpoint / rate)``.

    Args:
        checkpoint: Seconds for which training waits per checkpoint.
        rate: Failures per second.
    """
    return sqrt(2.0 * checkpoint / rate) if rate else inf


def _attempts(length: float, rate: float) -> tuple[float, float, float]:
    """Return the mean number of failed attempts at a stretch, and mean and variance of each (s).

    An attempt fails with probability ``1 - exp(-rate · length)``, after a time that is exponential,
    truncated at ``length``.
    """
    if not rate:
        return 0.0, 0.0, 0.0
    often = expm1(rate * length)
    mean = 1.0 / rate - length / often
    return often, mean, 1.0 / rate**2 - length**2 * (1.0 + 1.0 / often) / often


def _until_whole(length: float, rate: float) -> tuple[float, float]:
    """Return mean and variance of the time until ``length`` seconds pass without a failure."""
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
    """Return the wall time of work on devices that fail, with checkpoints and restarts.

    The mean without stalls is Daly's (Future Generation Computer Systems 22, 2006, equation 20):
    ``work / stretch · exp(rate · restart) · (exp(rate · (stretch + checkpoint)) - 1) / rate``.
    Nodes under repair follow Erlang's loss system of ``spares + 1`` servers; the job stalls while
    all servers are busy.

    Args:
        work: Seconds without failures and checkpoints.
        rate: Failures per second.
        stretch: Seconds of work between checkpoints.
        checkpoint: Seconds for which training waits per checkpoint.
        restart: Seconds from a failure until training continues; a restart may fail as well.
        spares: Spare nodes; negative for as many as are needed.
        repair: Mean seconds until a failed node is a spare again.

    Raises:
        PlanError: A stretch or a restart practically never succeeds.
    """
    if rate * max(min(stretch, work) + checkpoint, restart) > _HOPELESS:
        raise PlanError(
            f"with a failure every {1.0 / rate:.3g} s the run never ends",
            where="run",
            hint="check that mtbf_h is in hours of one device",
        )
    pieces = max(1.0, work / min(stretch, work))
    often, lost, apart = _attempts(work / pieces + checkpoint, rate)
    again, spread = _until_whole(restart, rate)
    # Each failed attempt is followed by a restart; their number is geometric.
    mean = pieces * (work / pieces + checkpoint + often * (lost + again))
    stall = scatter = 0.0
    if spares >= 0 and rate:
        blocked, taken = 1.0, rate * repair
        for servers in range(1, spares + 2):
            blocked = taken * blocked / (servers + taken * blocked)
        stall = mean * blocked / (1.0 - blocked) / (pieces * often)
        # A stall lasts until the first broken node is repaired: exponential, and zero mostly.
        scatter = max(0.0, stall * (2.0 * repair / (spares + 1) - stall))
    variance = often * (apart + spread + scatter)
    variance += often * (often + 1.0) * (lost + again + stall) ** 2
    stalled = pieces * often * stall
    return Wall(mean + stalled, sqrt(pieces * variance), rate * mean, pieces * checkpoint, stalled)


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        settings: Settings of the run.
        steps: Optimizer steps.
        step: Seconds of a step, with interval.
        devices: Devices of the cluster.
        checkpoint: Seconds for which training waits per checkpoint.
        price: Dollars per device hour, if given.
        joules: Energy of a step of all devices, with interval; ``None`` if unknown.
    """

    settings: RunSettings
    steps: int
    step: Interval
    devices: int
    checkpoint: float
    price: float | None = None
    joules: Interval | None = None

    def _rate(self, mtbf_h: float) -> float:
        """Return the failures per second of all devices."""
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
        """Seconds of work between checkpoints, rounded to whole steps."""
        best = best_stretch(self.checkpoint, self._rate(self.mtbf_h))
        asked = self.settings.every_s or best
        return max(1, round(asked / self.step.value)) * self.step.value

    @cached_property
    def wall(self) -> Wall:
        """Expected wall time."""
        return self._wall(self.mtbf_h)

    @cached_property
    def seconds(self) -> Interval:
        """Seconds of the run; the interval covers step errors, chance and the site's MTBF."""
        mean = self.wall.mean
        chance = NORMAL_90 * self.wall.deviation / mean
        few, many = mean, mean
        if not self.settings.mtbf_h:
            few = self._wall(self.mtbf_h * MTBF_FACTOR).mean
            many = self._wall(self.mtbf_h / MTBF_FACTOR).mean
        down = hypot(log(self.step.value / self.step.lo), log(mean / few), chance)
        up = hypot(log(self.step.hi / self.step.value), log(many / mean), chance)
        # The fastest run has steps at their lower bound and no failure.
        least = self.steps * self.step.lo
        return Interval(mean, max(mean * exp(-down), least), mean * exp(up))

    @property
    def energy(self) -> Interval | None:
        """Joules of all steps, without what failures repeat and without waiting."""
        return self.joules and self.joules.times(self.steps)

    def to_dict(self) -> JsonObject:
        """Return JSON data, as ``opcast simulate --run --json`` prints it."""
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
            **energy_fields(self.energy),
            **cost_fields(self.price, span, self.devices),
        }
        if self.settings.days:
            data["probability"] = span.chance_below(self.settings.days * _DAY)
        return data

    def lines(self) -> list[str]:
        """Return lines for people: days, cost, share lost to failures, and the deadline."""
        data, own = self.to_dict(), self.settings
        days = self.seconds.value >= _DAY
        whole, low, high = (plain(s / (_DAY if days else _HOUR)) for s in self.seconds)
        lines = [
            f"{own.tokens:,.0f} tokens in {self.steps:,} steps: {whole} "
            f"{'days' if days else 'hours'} ({low} to {high}), "
            f"{per_second(data['device_hours'])} device hours"
        ]
        if self.price is not None:
            lines[0] += f", cost {plain(data['cost'], 4)} ({plain(data['cost_lo'], 4)} to "
            lines[0] += f"{plain(data['cost_hi'], 4)})"
        if self.energy is not None:
            used, least, most = (quantity(j / _HOUR, "Wh") for j in self.energy)
            lines[0] += f"; its steps take {used} ({least} to {most})"
        stalled = f", {data['stalled_share']:.1%} without a spare" if own.spares >= 0 else ""
        said = "as given" if own.mtbf_h else "as in Llama 3's run"
        lines.append(
            f"{data['goodput']:.1%} of them train: {data['failures']:,.0f} failures (each "
            f"{self.mtbf_h:,.0f} device hours, {said}), a checkpoint of "
            f"{duration(self.checkpoint * 1e6)} every {duration(self.stretch * 1e6)} "
            f"({data['checkpoint_share']:.1%}){stalled}"
        )
        if own.days:
            lines.append(f"within {own.days:g} days: {likely(data['probability'])} likely")
        return lines


def training_run(asked: JsonMapping, found: StepPrediction, host_link: float) -> TrainingRun:
    """Return the training run of a predicted step.

    Args:
        asked: Fields of :class:`RunSettings`.
        found: The predicted step.
        host_link: Bytes per second between a device and its host.

    Raises:
        PlanError: A setting is unknown, malformed or missing, or the step trains nothing.
    """
    settings = build(RunSettings, asked, "run")
    settings.check()
    for name in ("mtbf_h", "every_s", "days"):
        if name in asked and not getattr(settings, name):
            raise PlanError(f"{name}=0 is not above 0", where="run", hint="omit it for the default")
    if found.workload.mode != "train":
        raise PlanError(f"a {found.workload.mode} step trains nothing", where="run")
    held, work = found.fit.worst, found.workload
    # Frozen weights are those of the base model and are not written again.
    trained = held.parameters * work.trained_parameters / work.parameters
    copied = (trained + held.optimizer) / host_link
    return TrainingRun(
        settings,
        ceil(settings.tokens / (work.batch * work.seq)),
        found.interval,
        found.plan.devices,
        CHECKPOINT_S + copied if settings.checkpoint_s < 0 else settings.checkpoint_s,
        found.price,
        found.joules,
    )
