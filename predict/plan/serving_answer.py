"""Result of a search of deployments: the best under an SLO and why, or the nearest miss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from ...common.interval import Interval
from ...common.units import duration
from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.latencies import Slo
from ..cluster.deployment import Deployment
from ..cluster.serving import ServingPredictor
from ..cluster.serving_launch import Launch, launches
from ..cluster.serving_load import RATE_TIE
from ..cluster.serving_prediction import ServingPrediction
from ..cluster.serving_run import Simulated
from ..sweep.space import undominated

#: Percentile of the latencies that has to meet the SLO.
PERCENTILE = 90
#: Relative difference below which two throughputs are considered equal.
TIE = 0.01
#: Probability from which a deployment surely meets the SLO (the upper bounds of its 90 % intervals
#: meet it), and the advantage in probability from which another one is reported.
SURE, CLEARLY = 0.95, 0.1


@dataclass(frozen=True)
class Planned:
    """A simulated deployment.

    The intervals need three further simulations, which are run on demand: a deployment that cannot
    win by its estimate needs none.

    Attributes:
        found: The simulated run.
        predictor: Predictor that adds intervals.
        slo: Latency limits.
    """

    found: Simulated
    predictor: ServingPredictor
    slo: Slo

    @property
    def deployment(self) -> Deployment:
        """The deployment as given."""
        return self.found.asked

    @cached_property
    def prediction(self) -> ServingPrediction:
        """The prediction with 90 % intervals."""
        return self.predictor.judge(self.found, self.slo)

    @property
    def screened(self) -> bool:
        """Whether no intervals were computed, since it cannot win by its estimate."""
        return "prediction" not in self.__dict__

    @property
    def tokens_per_s_per_device(self) -> float:
        """Output tokens per second and device."""
        return 1.0 / self.found.seconds("per_token") / self.deployment.devices

    @property
    def good(self) -> float:
        """Share of the requests that meet the SLO."""
        return self.found.seen.good(self.slo)

    @property
    def ttft(self) -> float:
        """Time to the first token at :data:`PERCENTILE`, in seconds."""
        return self.estimate("ttft")

    @property
    def tpot(self) -> float:
        """Time per output token at :data:`PERCENTILE`, in seconds."""
        return self.estimate("tpot")

    @property
    def e2e(self) -> float:
        """End-to-end latency at :data:`PERCENTILE`, in seconds."""
        return self.estimate("e2e")

    def text(self) -> str:
        """Return the deployment as text, with its batch limit if it is not the default."""
        limit = self.deployment.options.max_batch
        return self.deployment.text() + (f", {limit} sequences" if limit else "")

    @property
    def keeps(self) -> bool:
        """Whether the estimates at :data:`PERCENTILE` meet the SLO and the load is sustained."""
        return self.miss <= 1.0 and self.keeps_up

    @property
    def keeps_up(self) -> bool:
        """Whether the engines sustain the load by the estimate."""
        return min(self.found.room, self.found.link_room) >= 1.0

    @property
    def sure(self) -> float:
        """Probability that latencies at :data:`PERCENTILE` meet the SLO and the load is sustained.

        Errors of an engine's speed affect all parts alike, so the least likely part decides.
        """
        return min(
            1.0 - self.prediction.overload,
            *(self.figure(m).chance_below(limit) for m, limit in self.slo._asdict().items()),
        )

    def estimate(self, metric: str) -> float:
        """Return the estimate of a latency at :data:`PERCENTILE`, in seconds."""
        return self.found.seen.figure(metric, PERCENTILE)

    def figure(self, metric: str) -> Interval:
        """Return a latency at :data:`PERCENTILE` with its interval, in seconds."""
        return self.prediction.figures[f"{metric}/p{PERCENTILE}"]

    @cached_property
    def miss(self) -> float:
        """Largest ratio of a latency to its limit."""
        return max(over for _, over in self.misses())

    def misses(self) -> list[tuple[str, float]]:
        """Return the ratio of each latency to its limit."""
        return [(m, self.estimate(m) / limit) for m, limit in self.slo._asdict().items()]


@dataclass
class ServingPlans:
    """Deployments that were compared.

    Attributes:
        slo: Latency limits.
        judged: Simulated deployments.
        refused: Text of deployments that do not fit, with the reason.
        pruned: Number of deployments skipped because others are surely better.
        stopped: Whether the search was interrupted.
        fewest: If nothing fits, devices of the smallest engine that would; 0 if none was found.
        devices: Number of available devices.
        open: Whether the load is open, so that throughput is determined by the load.
        helps: If none meets the SLO: changes of the nearest deployment, each with its simulation
            or the reason why it is impossible.
    """

    slo: Slo
    judged: list[Planned] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    pruned: int = 0
    stopped: bool = False
    fewest: int = 0
    devices: int = 0
    open: bool = False
    helps: dict[str, Planned | str] = field(default_factory=dict)

    @property
    def nothing_fits(self) -> bool:
        """Whether every deployment was refused."""
        return bool(self.refused) and not (self.judged or self.pruned or self.stopped)

    @property
    def screened(self) -> int:
        """Number of simulated deployments without intervals, since they cannot win."""
        return sum(one.screened for one in self.judged)

    def settle(self) -> None:
        """Compute the intervals that an answer shows: best, surest, their rivals and the front."""
        for one in (self.best, self.surest, *self.front()):
            if one is not None:
                _ = one.prediction
        self.reasons()
        self.misses()

    @property
    def best(self) -> Planned | None:
        """The cheapest per token of those that meet the SLO; ``None`` if none does.

        The cost of a token is its device time, so the highest throughput per device wins; then the
        highest probability of meeting the SLO, then the largest share of requests that meet it,
        then the shortest requests.
        """
        kept = [one for one in self.judged if one.keeps]
        return self._cheapest(kept)

    @property
    def surest(self) -> Planned | None:
        """If the best meets the SLO only by its estimate: the cheapest that surely meets it.

        That is the cheapest with 90 % intervals within the SLO, or else of those nearly as likely
        as any to meet it; ``None`` if none is clearly surer than the best.
        """
        best = self.best
        if best is None or best.sure >= SURE:
            return None
        # A deployment that misses the SLO by its estimate has a probability below one half.
        kept = [one for one in self.judged if one.keeps]
        most = max(one.sure for one in kept)
        if most < best.sure + CLEARLY:
            return None
        enough = min(SURE, most - CLEARLY / 2.0)
        return self._cheapest([one for one in kept if one.sure >= enough])

    def _cheapest(self, among: Sequence[Planned]) -> Planned | None:
        most = max((one.tokens_per_s_per_device for one in among), default=0.0)
        equal = [one for one in among if one.tokens_per_s_per_device >= (1.0 - self.tie) * most]
        return min(
            equal,
            key=lambda one: (-round(one.sure, 2), -one.good, one.e2e),
            default=None,
        )

    @property
    def tie(self) -> float:
        """Relative difference below which two throughputs are considered equal.

        For an open load, throughput is the load's and differs by the tail after the last request.
        """
        return RATE_TIE if self.open else TIE

    def front(self) -> list[Planned]:
        """Return the Pareto front of throughput per device and both latencies."""
        keep = undominated(
            [(-one.tokens_per_s_per_device, one.ttft, one.tpot) for one in self.judged]
        )
        front = [one for one, kept in zip(self.judged, keep, strict=True) if kept]
        return sorted(front, key=lambda one: (not one.keeps, -one.tokens_per_s_per_device))

    @property
    def nearest(self) -> Planned | None:
        """The deployment that comes nearest to the SLO."""
        near = sorted(self.judged, key=lambda own: own.miss)
        return next((own for own in near if own.keeps_up), near[0] if near else None)

    def misses(self) -> list[str]:
        """Describe the deployment nearest to the SLO, by how much it misses, and what helps."""
        one = self.nearest
        if one is None:
            return []
        said = [f"nearest is {one.text()}: {self._missed(one)}"]
        for change, other in self.helps.items():
            if isinstance(other, str):
                said.append(f"{change} is not possible: {other}")
            elif other.keeps:
                sure = f"{other.sure:.0%} sure"
                said.append(f"{change} would meet it ({sure}): {self._figures(other)}")
            else:
                said.append(f"{change} would not suffice: {self._missed(other)}")
        return said

    def _missed(self, one: Planned) -> str:
        """Describe the limits that a deployment exceeds."""
        over = [
            f"p{PERCENTILE} of {metric.upper()} is {duration(one.estimate(metric) * 1e6)}, "
            f"{times:.3g} times the limit"
            for metric, times in one.misses()
            if times > 1.0
        ]
        if not one.keeps_up:
            over.append("the load exceeds the maximum throughput")
        return "; ".join(over)

    def _figures(self, one: Planned) -> str:
        asked = [metric for metric, limit in self.slo._asdict().items() if limit < inf]
        return f"p{PERCENTILE} of " + ", ".join(
            f"{metric.upper()} {duration(one.estimate(metric) * 1e6)}" for metric in asked
        )

    def reasons(self) -> list[str]:
        """Describe why the best wins: the best alternatives that differ in one choice."""
        best = self.best
        if best is None:
            return []
        said = []
        for name, of in _CHOICES.items():
            own = of(best.deployment)
            others = [
                one
                for one in self.judged
                if of(one.deployment) != own
                and all(
                    f(one.deployment) == f(best.deployment)
                    for n, f in _CHOICES.items()
                    if n != name
                )
            ] or [one for one in self.judged if of(one.deployment) != own]
            if not others:
                continue
            other = self._cheapest([one for one in others if one.keeps])
            if other is not None:
                if gain := self._gain(best, other):
                    said.append(
                        f"{name} {own}: {_with(name, of(other.deployment))}, {gain} "
                        f"({other.deployment.text()})"
                    )
            else:
                other = min(others, key=lambda one: one.miss)
                said.append(
                    f"{name} {own}: {_with(name, of(other.deployment))}, {self._missed(other)}"
                )
        return said

    def _gain(self, best: Planned, other: Planned) -> str:
        """Describe what another deployment does worse; empty if the difference is negligible."""
        less = 1.0 - other.tokens_per_s_per_device / best.tokens_per_s_per_device
        if less >= (self.tie if self.open else TIE / 2.0):
            if self.open:
                # Throughput is the load's, so the difference is in the number of devices.
                return f"a token takes {1.0 / (1.0 - less) - 1.0:.0%} more device time"
            return f"throughput per device is {less:.0%} lower"
        sure, surer = other.sure, best.sure
        if surer - sure >= 0.01:
            return f"it meets the SLO with {sure:.0%} probability, not {surer:.0%}"
        if best.good - other.good >= 0.0005:
            return f"{other.good:.1%} of the requests meet the SLO, not {best.good:.1%}"
        if other.e2e > 1.005 * best.e2e:
            return f"requests take {other.e2e / best.e2e - 1.0:.1%} longer"
        return ""

    def launches(self, model: Checkpoint = UNKNOWN) -> dict[str, Launch]:
        """Return the launch commands of the best deployment; empty if none meets the SLO."""
        best = self.best
        if best is None:
            return {}
        load = best.prediction.load
        return launches(best.deployment, model, int((load.prompts + load.outputs).max()))

    def to_dict(self, model: Checkpoint = UNKNOWN, price: float = 0.0) -> dict[str, object]:
        """Return JSON data: the best, its reasons and commands, the front, and what does not fit.

        Args:
            model: Checkpoint for the commands.
            price: Dollars per device hour; 0 if unknown.
        """
        best = self.best

        def row(one: Planned) -> dict[str, object]:
            return {
                "deployment": one.deployment.text(),
                "max_batch": one.deployment.options.max_batch,
                "tokens_per_s_per_gpu": one.tokens_per_s_per_device,
                "keeps_slo": one.keeps,
                "keeps_slo_probability": one.sure,
                **one.prediction.to_dict(price),
            }

        surest = self.surest
        return {
            "best": None if best is None else row(best),
            "by_estimate_only": best is not None and best.sure < SURE,
            "surest": None if surest is None else row(surest),
            "nearest": [] if best else self.misses(),
            "reasons": self.reasons(),
            "commands": {name: one.command for name, one in self.launches(model).items()},
            "launch": {name: one.rows() for name, one in self.launches(model).items()},
            "front": [row(one) for one in self.front()],
            "judged": len(self.judged),
            "screened": self.screened,
            "pruned": self.pruned,
            "refused": self.refused,
            "fewest_devices": self.fewest or None,
            "stopped": self.stopped,
        }


def _with(name: str, choice: str) -> str:
    """Return another choice as part of a sentence, with a preposition if it needs one."""
    return choice if name == "prompts run" else f"with {choice}"


#: Choices in which deployments differ, as shown in the reasons.
_CHOICES: dict[str, Callable[[Deployment], str]] = {
    "engines are": lambda own: f"{own.engine.count} x {own.engine.plan.text()}",
    "prompts run": lambda own: (
        f"on {own.prefill.count} x {own.prefill.plan.text()} of their own"
        if own.prefill
        else "beside decoding"
    ),
    "the limit is": lambda own: (
        f"{own.options.max_batch} sequences" if own.options.max_batch else "the framework's"
    ),
}
