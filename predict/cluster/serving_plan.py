"""Search deployments of a model on so many devices: engines, plans, batch limits, prompts apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...common.errors import OpcastError
from ...features.devices.catalogue import read_device
from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.latencies import Slo
from ...simulate.serving.load import Load
from ...simulate.serving.memory import what_is_too_large
from ...simulate.serving.served import EnginePlan
from .deployment import Deployment
from .serving import ServingPrediction, ServingPredictor, load_of
from .serving_launch import Launch, launches
from .serving_load import LoadSpec
from .serving_runs import engine_cache, engine_memory
from .serving_table import Workers

#: Limits of sequences that are tried beside the framework's own, of a rank: below it they trade
#: throughput for latency.
BATCHES = (16, 64, 256)
#: Shares of the devices that run prompts where these have workers of their own.
PREFILL_SHARES = (0.25, 0.5, 0.75)
#: Percentile of the latencies that has to keep the SLO.
PERCENTILE = 90
#: Throughputs that differ by less are taken for equal.
TIE = 0.01
#: Told of progress: deployments done, in all, and the next.
Show = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Planned:
    """A simulated deployment.

    Attributes:
        deployment: What serves.
        prediction: What it does.
    """

    deployment: Deployment
    prediction: ServingPrediction

    @property
    def tokens_per_s_per_device(self) -> float:
        """Output tokens a second and device."""
        return self.prediction.tokens_per_s.value / self.deployment.devices

    @property
    def good(self) -> float:
        """Share of the requests that keep the SLO."""
        return self.prediction.good.value

    @property
    def ttft(self) -> float:
        """Time to the first token at :data:`PERCENTILE`, in seconds."""
        return self.prediction.figures[f"ttft/p{PERCENTILE}"].value

    @property
    def tpot(self) -> float:
        """Time of a further token at :data:`PERCENTILE`, in seconds."""
        return self.prediction.figures[f"tpot/p{PERCENTILE}"].value

    @property
    def e2e(self) -> float:
        """Time of a request at :data:`PERCENTILE`, in seconds."""
        return self.prediction.figures[f"e2e/p{PERCENTILE}"].value

    def keeps(self, slo: Slo) -> bool:
        """Whether the latencies at :data:`PERCENTILE` keep the SLO."""
        return self.ttft <= slo.ttft and self.tpot <= slo.tpot and self.e2e <= slo.e2e

    def miss(self, slo: Slo) -> float:
        """How many times the worst latency is what the SLO allows."""
        return max(self.ttft / slo.ttft, self.tpot / slo.tpot, self.e2e / slo.e2e)


@dataclass
class ServingPlans:
    """Deployments that were compared.

    Attributes:
        slo: What was asked.
        judged: Simulated ones.
        refused: Text of those that do not fit, with the reason.
        pruned: Number of those that were left out, since others are sure to be better.
        stopped: Whether the search was stopped before it ended.
        fewest: Where nothing fits, devices of the smallest engine that does; 0 if none was found.
    """

    slo: Slo
    judged: list[Planned] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    pruned: int = 0
    stopped: bool = False
    fewest: int = 0

    @property
    def nothing_fits(self) -> bool:
        """Whether every deployment was refused."""
        return bool(self.refused) and not (self.judged or self.pruned or self.stopped)

    @property
    def best(self) -> Planned | None:
        """Most throughput a device among those that keep the SLO; ``None`` if none does.

        Where an open load is served at the same throughput, the largest share of requests that keep
        the SLO wins, then the shortest requests.
        """
        kept = [one for one in self.judged if one.keeps(self.slo)]
        most = max((one.tokens_per_s_per_device for one in kept), default=0.0)
        equal = [one for one in kept if one.tokens_per_s_per_device >= (1.0 - TIE) * most]
        return min(equal, key=lambda one: (-one.good, one.e2e), default=None)

    def front(self) -> list[Planned]:
        """Those that no other beats in throughput a device and both latencies."""

        def beaten(one: Planned) -> bool:
            own = (-one.tokens_per_s_per_device, one.ttft, one.tpot)
            return any(
                all(b <= a for a, b in zip(own, other, strict=True)) and other != own
                for other in ((-o.tokens_per_s_per_device, o.ttft, o.tpot) for o in self.judged)
            )

        front = [one for one in self.judged if not beaten(one)]
        return sorted(front, key=lambda one: -one.tokens_per_s_per_device)

    def nearest(self) -> list[str]:
        """What comes nearest to an SLO that none keeps."""
        if not self.judged:
            return []
        one = min(self.judged, key=lambda own: own.miss(self.slo))
        return [
            f"nearest is {one.deployment.text()}: p{PERCENTILE} of TTFT {one.ttft * 1e3:.0f} ms, "
            f"TPOT {one.tpot * 1e3:.1f} ms"
        ]

    def reasons(self) -> list[str]:
        """Why the best wins: the best others that differ in one choice, and what they lose."""
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
            kept = [one for one in others if one.keeps(self.slo)]
            if kept:
                other = max(kept, key=lambda one: one.tokens_per_s_per_device)
                if gain := _gain(best, other):
                    said.append(
                        f"{name} {own}: {_with(name, of(other.deployment))}, {gain} "
                        f"({other.deployment.text()})"
                    )
            else:
                other = min(others, key=lambda one: one.miss(self.slo))
                said.append(
                    f"{name} {own}: {_with(name, of(other.deployment))}, p{PERCENTILE} of TTFT is "
                    f"{other.ttft * 1e3:.0f} ms, of TPOT {other.tpot * 1e3:.1f} ms"
                )
        return said

    def launches(self, model: Checkpoint = UNKNOWN) -> dict[str, Launch]:
        """How the best deployment is launched, by framework; empty if none keeps the SLO."""
        best = self.best
        if best is None:
            return {}
        load = best.prediction.load
        return launches(best.deployment, model, int((load.prompts + load.outputs).max()))

    def to_dict(self, model: Checkpoint = UNKNOWN, price: float = 0.0) -> dict[str, object]:
        """Plain data: the best, its reasons and commands, the front, and what does not fit.

        Args:
            model: Checkpoint for the commands.
            price: Dollars of a device and hour; 0 for none.
        """
        best = self.best

        def row(one: Planned) -> dict[str, object]:
            return {
                "deployment": one.deployment.text(),
                "max_batch": one.deployment.max_batch,
                "tokens_per_s_per_gpu": one.tokens_per_s_per_device,
                "keeps_slo": one.keeps(self.slo),
                **one.prediction.to_dict(price),
            }

        return {
            "best": None if best is None else row(best),
            "reasons": self.reasons(),
            "commands": {name: one.command for name, one in self.launches(model).items()},
            "launch": {name: one.rows() for name, one in self.launches(model).items()},
            "front": [row(one) for one in self.front()],
            "judged": len(self.judged),
            "pruned": self.pruned,
            "refused": self.refused,
            "fewest_devices": self.fewest or None,
            "stopped": self.stopped,
        }


def _with(name: str, choice: str) -> str:
    """How a sentence names another choice: where prompts run is said by a preposition already."""
    return choice if name == "prompts run" else f"with {choice}"


def _gain(best: Planned, other: Planned) -> str:
    """What another deployment does worse; empty if nothing that shows."""
    less = 1.0 - other.tokens_per_s_per_device / best.tokens_per_s_per_device
    if less >= 0.005:
        return f"throughput is {less:.0%} lower"
    if best.good - other.good >= 0.0005:
        return f"{other.good:.1%} of the requests keep the SLO, not {best.good:.1%}"
    if other.e2e > 1.005 * best.e2e:
        return f"requests take {other.e2e / best.e2e - 1.0:.1%} longer"
    return ""


#: What deployments differ in, for the reasons of the best.
_CHOICES: dict[str, Callable[[Deployment], str]] = {
    "engines are": lambda own: f"{own.engine.count} x {own.engine.plan.text()}",
    "prompts run": lambda own: (
        f"on {own.prefill.count} x {own.prefill.plan.text()} of their own"
        if own.prefill
        else "beside decoding"
    ),
    "the limit is": lambda own: (
        f"{own.max_batch} sequences" if own.max_batch else "the framework's"
    ),
}


def engine_plans(base: Deployment, devices: int) -> Iterator[EnginePlan]:
    """Plans of one engine on at most so many devices, smallest first.

    Tensor parallelism stays within a box, pipelines are tried over boxes and within them, and
    experts are cut over tensor-parallel ranks, spread whole over them, or spread over ranks that
    each attend to sequences of their own.
    """
    w = base.model.workload
    box = read_device(base.device).devices_per_node or devices
    powers = [2**n for n in range(devices.bit_length()) if 2**n <= devices]
    for size in powers:
        for tp in (n for n in powers if n <= min(size, box) and w.heads % n == 0):
            if size % tp:
                continue
            pp = size // tp
            if pp <= min(w.layers, 8):
                yield EnginePlan(tp=tp, pp=pp, moe_tp=tp)
                if w.experts and tp > 1 and w.experts % tp == 0:
                    yield EnginePlan(tp=tp, pp=pp, ep=tp)
            if w.experts and pp > 1 and w.experts % size == 0:
                yield EnginePlan(tp=tp, dp=pp, ep=size)


def deployments(base: Deployment, devices: int, apart: bool = True) -> Iterator[Deployment]:
    """Deployments on all of the devices, without those that differ in their batch limit alone.

    Args:
        base: Model, device, framework and options; its workers do not matter.
        devices: How many.
        apart: Whether to try workers that run prompts alone.
    """
    plans = list(engine_plans(base, devices))
    for plan in plans:
        if devices % plan.devices == 0:
            yield replace(base, engine=Workers(plan, devices // plan.devices), prefill=None)
    if not apart:
        return
    for share in PREFILL_SHARES:
        ahead = round(devices * share)
        for first in plans:
            for second in plans:
                # Prompts gain nothing from pipelines or ranks of their own that decoding has not.
                if first.pp > 1 or second.pp > 1 or first.dp > 1:
                    continue
                behind = devices - ahead
                if ahead % first.devices or behind % second.devices or not ahead or not behind:
                    continue
                yield replace(
                    base,
                    engine=Workers(second, behind // second.devices),
                    prefill=Workers(first, ahead // first.devices),
                )


def search(
    predictor: ServingPredictor,
    base: Deployment,
    devices: int,
    spec: LoadSpec,
    slo: Slo,
    *,
    apart: bool = True,
    show: Show = lambda done, of, what: None,
) -> ServingPlans:
    """Simulate deployments, cheap ones to rule out first; an interrupt keeps what is known.

    A deployment is left out if its weights do not fit, or if one pass over the cache and weights of
    a single request, at the rate of its memory, is slower than the SLO allows. Limits of sequences
    below the framework's own are tried for the deployments on the front alone.

    Args:
        predictor: Predicts them.
        base: Model, device, framework and options.
        devices: How many.
        spec: The load.
        slo: What requests have to keep.
        apart: Whether to try workers that run prompts alone.
        show: Told of progress: done, in all, and what is next.

    Raises:
        PlanError: The load lacks what the router looks at.
    """
    found = ServingPlans(slo)
    load = spec.draw()
    load_of(base, load)
    asked = []
    for one in deployments(base, devices, apart):
        row = one.row(spec, load, predictor.model)
        workers = [w for w in (one.engine, one.prefill) if w]
        try:
            memories = [engine_memory(row, own) for own in workers]
        except OpcastError as error:
            found.refused[one.text()] = str(error)
            continue
        unfit = next((m for m in memories if m["cache"] <= 0.0), None)
        if unfit is not None:
            found.refused[one.text()] = what_is_too_large(one.spec.memory_bytes, unfit)
        elif _least_token(one) > slo.tpot:
            found.pruned += 1
        else:
            asked.append(one)
    try:
        _simulate(predictor, found, asked, spec, load, show)
        if found.nothing_fits:
            found.fewest = _fewest(predictor, base, devices, spec, load)
        # Smaller batches of what is good already.
        better = []
        for kept in found.front():
            largest = kept.prediction.run.largest_batch
            ranks = kept.deployment.engine.plan.dp
            limits = [n for n in BATCHES if n * ranks < largest]
            better += [replace(kept.deployment, max_batch=n) for n in limits]
            found.pruned += len(BATCHES) - len(limits)
        _simulate(predictor, found, better, spec, load, show)
    except KeyboardInterrupt:
        found.stopped = True
    return found


#: Most devices that an engine is looked for on where nothing fits.
_MOST_DEVICES = 1024


def _fewest(
    predictor: ServingPredictor, base: Deployment, devices: int, spec: LoadSpec, load: Load
) -> int:
    """Devices of the smallest engine that holds the model and the longest request; 0 for none."""
    longest = int((load.prompts + load.outputs).max())
    for count in (1 << n for n in range(_MOST_DEVICES.bit_length())):
        for plan in engine_plans(base, max(count, devices)):
            if plan.devices != count:
                continue
            workers = Workers(plan)
            row = replace(base, engine=workers, prefill=None).row(spec, load, predictor.model)
            try:
                if engine_cache(row, workers).share_of(longest) * plan.dp <= 1.0:
                    return count
            except OpcastError:
                continue
    return 0


def _simulate(
    predictor: ServingPredictor,
    found: ServingPlans,
    asked: Sequence[Deployment],
    spec: LoadSpec,
    load: Load,
    show: Show,
) -> None:
    for number, one in enumerate(asked):
        show(number, len(asked), one.text())
        try:
            prediction = predictor.predict(one, spec, slo=found.slo, load=load, record=False)
        except OpcastError as error:
            found.refused[one.text()] = str(error)
            continue
        found.judged.append(Planned(one, prediction))
    show(len(asked), len(asked), "")


def _least_token(one: Deployment) -> float:
    """Seconds below which no pass of a decoding engine is: reading what a token must see."""
    spec, plan, model = read_device(one.device), one.engine.plan, one.model
    parts = model.weight_parts(plan)
    w = model.workload
    experts = parts.pop("experts", 0.0)
    parts.pop("embedding and head", None)
    if w.experts:
        # A token alone reads the experts that it goes to, spread over their ranks at best.
        experts *= min(1.0, w.top_k / w.experts)
    read = (sum(parts.values()) + experts) * plan.pp
    return read / spec.bandwidth / one.accepted
