"""Serve a decoder under a load: latencies of requests, throughput, memory, with 90 % intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ...common.errors import PlanError
from ...common.interval import Interval, latency_fields
from ...models.operators import OpModel
from ...models.power.energy import energy_fields
from ...models.serving.effects import Context
from ...models.serving.ends import SATURATED
from ...models.serving.model import METRICS as MODEL_METRICS
from ...models.serving.model import REQUEST_TIME, ServingModel, shipped_serving
from ...simulate.serving.fleet import Station, run_fleet
from ...simulate.serving.floor import Floors
from ...simulate.serving.latencies import (
    FREE,
    LEVELS,
    METRICS,
    Served,
    Slo,
    queued_share,
    served,
    states_of,
    tied,
    typical_wait,
    wider,
)
from ...simulate.serving.load import Load, Run
from ...simulate.serving.memory import MemoryParts
from ...simulate.serving.policies import ROUTERS, framework_defaults, frameworks
from ...simulate.serving.saturation import capacity
from ..devices import generation_note
from ..operator.prices import weight_only
from .deployment import Deployment
from .energy import serving_energy
from .serving_case import LoadSpec
from .serving_engine import (
    MOST_TABLES,
    Engines,
    cache_transfer,
    engine_memory,
    levels,
    request_delay,
    request_floors,
)
from .serving_load import draw

#: Rates that differ by less are taken for equal.
RATE_TIE = 0.02
#: Share of what they serve at most up to which engines count as keeping up: queues at it have a
#: length that does not grow with the run. Engineering choice.
KEPT = 0.9
#: Deviation of outputs over their mean up to which requests of a closed loop stay in step: at 3 %,
#: 16 and 64 requests of Llama 3.1 70B wait 1.1 and 1.2 times as long as at 12 %, at 0 % four times.
IN_STEP = 0.03
#: Chance from which something is within the 90 % interval: 5 % lie beyond each of its ends.
LIKELY = 0.05


@dataclass(frozen=True)
class ServingPrediction:
    """Latencies, throughput and memory of a deployment under a load.

    Attributes:
        deployment: What serves.
        spec: The load.
        load: Its requests.
        run: What became of them.
        figures: Seconds with their intervals by ``metric/level``, such as ``ttft/p99``,
            ``ttft/mean`` and ``ttft/std``.
        requests_per_s: Throughput with its interval.
        tokens_per_s: Output tokens a second of all engines, with its interval.
        good: Share of the requests that keep the SLO, with its interval.
        slo: The SLO.
        memory: Bytes of a device of an engine that decodes, by use; parts of the cache come last.
        cache_tokens: Tokens that the cache of an engine holds.
        queued: Share of the time to the first token that is waiting for other requests.
        known: What is known of the deployment (docs/serving.md).
        notes: What lies outside of what was measured.
        states: Means over time of caches, queues and batches; empty without histories.
        energy: Joules of all devices over the run; ``None`` where a power limit is not known.
        overload: How likely an open load is more than the engines serve, so that queues grow
            without end.
    """

    deployment: Deployment
    spec: LoadSpec
    load: Load
    run: Run
    figures: Mapping[str, Interval]
    requests_per_s: Interval
    tokens_per_s: Interval
    good: Interval
    slo: Slo
    memory: Mapping[str, float]
    cache_tokens: int
    queued: float
    known: str
    notes: tuple[str, ...] = ()
    states: Mapping[str, float] = field(default_factory=dict)
    energy: Interval | None = None
    overload: float = 0.0

    def dollars(self, price: float) -> dict[str, Interval]:
        """Of a million output tokens and of a request: an hour of all devices over those in it.

        Args:
            price: Dollars of a device and hour; 0 for none, of which nothing follows.
        """
        if not price:
            return {}
        second = price * self.deployment.devices / 3600.0
        rates = {
            "million_tokens": (1e6 * second, self.tokens_per_s),
            "request": (second, self.requests_per_s),
        }
        return {
            name: Interval(of / rate.value, of / rate.hi, of / rate.lo)
            for name, (of, rate) in rates.items()
        }

    def joules(self) -> dict[str, Interval]:
        """Energy of a request and of an output token; empty where power is not known."""
        if self.energy is None:
            return {}
        parts = {"request": len(self.load.prompts), "output_token": int(self.load.outputs.sum())}
        return {name: _scaled(self.energy, 1.0 / count) for name, count in parts.items()}

    def to_dict(self, price: float = 0.0) -> dict[str, object]:
        """Plain data in the terms of ``vllm bench serve``, with ends of intervals.

        Args:
            price: Dollars of a device and hour; 0 for none.
        """
        prompts, outputs = int(self.load.prompts.sum()), int(self.load.outputs.sum())
        rate, run, gpus = self.requests_per_s, self.run, self.deployment.devices
        prompt_rate = prompts / len(self.load.prompts)
        data: dict[str, object] = {
            **latency_fields(*self.figures["e2e/mean"]),
            "num_prompts": len(self.load.prompts),
            "burstiness": self.spec.burstiness,
            "duration": len(self.load.prompts) / rate.value,
            "completed": len(self.load.prompts),
            "total_input_tokens": prompts,
            "total_output_tokens": outputs,
            "max_concurrency": self.load.concurrency or None,
            "request_rate": self.spec.rate or self.load.rate or "inf",
            **_ends("request_throughput", rate),
            **_ends("output_throughput", self.tokens_per_s),
            **_ends("output_throughput_per_gpu", _scaled(self.tokens_per_s, 1.0 / gpus)),
            "total_token_throughput": rate.value * prompt_rate + self.tokens_per_s.value,
        }
        if self.slo != FREE:
            data |= _ends(
                "request_goodput:", Interval(*(r * g for r, g in zip(rate, self.good, strict=True)))
            )
            data |= _ends("slo_attainment", self.good)
        for metric in METRICS:
            named = "e2el" if metric == "e2e" else metric
            for level in ("mean", "std", *LEVELS):
                name = f"p{level}" if isinstance(level, int) else level
                key, name = f"{metric}/{name}", {"p50": "median"}.get(name, name)
                data |= _ends(f"{name}_{named}_ms", _scaled(self.figures[key], 1e3))
        for name, joules in self.joules().items():
            data |= _ends(f"joules_per_{name}", joules)
        for name, dollars in self.dollars(price).items():
            data |= _ends(f"dollars_per_{name}", dollars)
        return {
            **data,
            **energy_fields(self.energy),
            **self.states,
            "preemptions": run.evicted,
            "iterations": run.iterations,
            "largest_batch": run.largest_batch,
            "prefix_hit_tokens": run.hit_tokens,
            "cache_tokens": self.cache_tokens,
            "queued_share": self.queued,
            "overload_probability": self.overload,
            "memory_bytes_per_device": dict(self.memory),
            "known": self.known,
            "framework": self.deployment.framework,
            "device": self.deployment.spec.name,
            "gpus": gpus,
            "formats": self.deployment.model.formats(),
            "plan": self.deployment.text(),
            "replicas": self.deployment.engine.count,
            "notes": list(self.notes),
        }


def _scaled(interval: Interval, factor: float) -> Interval:
    return Interval(*(end * factor for end in interval))


def _ends(name: str, interval: Interval) -> dict[str, object]:
    plain = name.removesuffix(":")
    return {name: interval.value, f"{plain}_lo": interval.lo, f"{plain}_hi": interval.hi}


@dataclass(frozen=True)
class Simulated:
    """A load as engines serve it under learned effects.

    Attributes:
        deployment: What serves.
        load: Its requests.
        context: Levels of the deployment that effects are learned on.
        stations: The engines.
        delay: Seconds between sending a request and an engine's queue.
        run: What became of the requests.
        first: Factor on times to the first token.
        floor: Least times of the requests.
        seen: Latencies as users see them.
    """

    deployment: Deployment
    load: Load
    context: Context
    stations: Sequence[Station]
    delay: float
    run: Run
    first: float
    floor: Floors
    seen: Served

    @property
    def queued(self) -> float:
        """Share of the time to the first token that is waiting for other requests."""
        return queued_share(self.load, self.run)

    @property
    def span(self) -> float:
        """Seconds that the load takes."""
        if not self.load.concurrency:
            return self.run.makespan
        # Of a closed loop, what makes requests longer makes fewer of them come.
        simulated = float((self.run.finished - self.run.sent).mean())
        return self.run.makespan * self.seen.figure("e2e", "mean") / simulated

    def seconds(self, metric: str) -> float:
        """Mean of one of :data:`opcast.models.serving.model.METRICS`."""
        if metric == "per_token":
            return self.span / float(self.load.outputs.sum())
        return self.seen.figure(metric, "mean")

    def shares(self, metric: str) -> np.ndarray:
        """Shares of the classes of cost and of the request itself in a metric, adding up to 1."""
        first, later = np.append(self.run.waits, self.delay), np.append(self.run.tokens, 0.0)
        if metric == "per_token":
            parts = first + later if self.load.concurrency else np.append(self.run.busy, 0.0)
        else:
            parts = first if metric == "ttft" else later
        total = parts.sum()
        return parts / total if total > 0.0 else np.full(len(parts), 1.0 / len(parts))

    def again(self, slower: float) -> Run:
        """The same load served by engines that are slower by a factor."""
        return _run(self.deployment, self.load, self.stations, self.delay, slower, record=False)


def _run(
    own: Deployment,
    load: Load,
    stations: Sequence[Station],
    delay: float,
    slower: float = 1.0,
    *,
    record: bool,
) -> Run:
    engines = [replace(s, weights=s.weights * slower) for s in stations]
    return run_fleet(
        load,
        *engines,
        router=own.options.router,
        delay=delay * slower,
        transfer=cache_transfer(own),
        record=record,
    )


class ServingPredictor:
    """Predicts deployments; those that differ in their load alone share tables of costs.

    Args:
        operators: Model of library operators; ``None`` for rooflines.
        model: What measured serving taught; by default the model that ships.
        tables: Tables of costs that are kept.
    """

    def __init__(
        self,
        operators: OpModel | None,
        model: ServingModel | None = None,
        tables: int = MOST_TABLES,
    ) -> None:
        self.engines = Engines(operators, tables)
        self.model = model or shipped_serving()

    def own(self, deployment: Deployment) -> Deployment:
        """A deployment with what was measured of one's own stack, if anything."""
        source, memory = self.model.own_stack(deployment.device, deployment.source)
        options = deployment.options
        options = replace(options, memory=options.memory or memory)
        return replace(deployment, source=source, options=options)

    def context(self, deployment: Deployment) -> dict[str, str]:
        """Levels of a deployment that effects are learned on."""
        return levels(self.own(deployment), self.model)

    def simulate(
        self,
        deployment: Deployment,
        spec: LoadSpec,
        load: Load | None = None,
        *,
        record: bool = False,
    ) -> Simulated:
        """Serve a load by engines whose passes have the learned costs.

        Args:
            deployment: What serves it.
            spec: The load.
            load: Requests of ``spec``, where they were drawn already.
            record: Whether to keep histories of the engines; without, there are no times between
                tokens, and those of requests stand for them.

        Raises:
            PlanError: The deployment does not fit into memory, or a request into its cache; the
                load lacks what the router looks at.
        """
        load = load_of(deployment, load or draw(spec))
        deployment = self.own(deployment)
        context, effects = levels(deployment, self.model), self.model.effects
        weights, first = effects.weights(context), effects.first(context)
        stations = self.engines.stations(deployment, load, weights)
        alone = spec.kind in ("static-batch", "offline")
        delay = request_delay(deployment, served=not alone, weights=weights)
        run = _run(deployment, load, stations, delay, record=record)
        floor = request_floors(deployment, load, run.found)
        seen = served(load, run, first, floor=floor)
        return Simulated(deployment, load, context, stations, delay, run, first, floor, seen)

    def predict(
        self,
        deployment: Deployment,
        spec: LoadSpec,
        *,
        slo: Slo = FREE,
        load: Load | None = None,
        record: bool = True,
    ) -> ServingPrediction:
        """Serve a load, with 90 % intervals.

        Args:
            deployment: What serves it.
            spec: The load.
            slo: What requests have to keep.
            load: As of :meth:`simulate`.
            record: As of :meth:`simulate`.

        Raises:
            PlanError: As of :meth:`simulate`.
        """
        found = self.simulate(deployment, spec, load, record=record)
        load, run, seen, queued = found.load, found.run, found.seen, found.queued
        tier = self.model.tier(found.context)
        overload = 0.0
        if is_open(spec, load):
            ends, spans, overload = self._open(found, tier, queued, spec.rate or load.rate)
        else:
            ends, spans = self._tied(found, tier, queued)
        figures = {}
        for metric in METRICS:
            for level in ("mean", "std", *LEVELS):
                own = [each.figure(metric, level) for each in (seen, *ends)]
                name = f"p{level}" if isinstance(level, int) else level
                figures[f"{metric}/{name}"] = Interval(own[0], min(own), max(own))
        count, tokens = len(load.prompts), float(load.outputs.sum())
        rates = [1.0 / span for span in spans]
        low, high = min(rates), max(rates)
        good = [each.good(slo) for each in (seen, *ends)]
        if overload > LIKELY and min(slo.ttft, slo.e2e) < inf:
            # The longer the load lasts, the fewer of its requests are in time.
            good.append(0.0)
        memory = engine_memory(found.deployment, deployment.engine)
        cache = found.stations[0].cache
        return ServingPrediction(
            deployment=deployment,
            spec=spec,
            load=load,
            run=run,
            figures=figures,
            requests_per_s=Interval(count * rates[0], count * low, count * high),
            tokens_per_s=Interval(tokens * rates[0], tokens * low, tokens * high),
            good=Interval(good[0], min(good), max(good)),
            slo=slo,
            memory=memory.to_dict() | cache.parts,
            cache_tokens=cache.tokens,
            queued=queued,
            known=tier,
            notes=(
                *_notes(found, tier, queued, self.model.effects.values, memory),
                *_tail_note(spec, load, run, saturated=queued > SATURATED),
                *_context_note(deployment.context, load),
            ),
            states=states_of(run, cache.tokens, deployment.engine.count),
            energy=serving_energy(
                deployment, load, run, Interval(spans[0], min(spans), max(spans))
            ),
            overload=overload,
        )

    def _open(
        self, found: Simulated, tier: str, queued: float, rate: float
    ) -> tuple[list[Served], list[float], float]:
        """Latencies of an open load at both ends, how long its run takes, and overload's chance.

        Faster engines do not make more requests arrive, and slower ones let queues grow: those that
        are too slow for the load without end, so that the upper ends are of engines that keep up.

        Args:
            found: The estimate.
            tier: What is known of the deployment.
            queued: Share of the time to the first token that is waiting.
            rate: Requests a second that are offered.
        """
        load, run = found.load, found.run
        factors = {m: self.model.interval(m, tier, queued, found.context) for m in MODEL_METRICS}
        # What the engines serve at most over what is offered.
        room = capacity(load, *found.stations) / rate
        fast, slow = factors["per_token"]
        ends, spans = [], [run.makespan]
        for side, slower in enumerate((fast, min(slow, max(1.0, KEPT * room)))):
            other = found.again(slower)
            times = factors["ttft"][side], factors["tpot"][side]
            own = served(load, run, found.first * times[0], times[1], found.floor)
            # Other queues may leave other prompts in the caches.
            least = request_floors(found.deployment, load, other.found)
            ends.append(wider(own, served(load, other, found.first, floor=least), side))
            spans.append(other.makespan)
        # Engines that do not keep up need as long as they take for all requests.
        spans.append(max(spans[2], slow / room * float(load.arrivals.max())))
        return ends, spans, 1.0 - Interval(1.0, fast, slow).chance_below(room)

    def _tied(self, found: Simulated, tier: str, queued: float) -> tuple[list[Served], list[float]]:
        """Latencies at both ends, and how long the run takes: estimate and ends."""
        first, whole = (found.seen.figure(metric, "mean") for metric in ("ttft", "e2e"))
        known = self.model.tied_intervals(
            tier,
            queued,
            found.context,
            (first, whole - first),
            REQUEST_TIME if found.load.concurrency else "per_token",
        )
        sides = zip(known["ttft"], known["tpot"], known[REQUEST_TIME], strict=True)
        ends = [tied(found.seen, one, later, both, found.floor) for one, later, both in sides]
        span = found.span
        return ends, [span, *(span * end.figure("e2e", "mean") / whole for end in ends)]


def is_open(spec: LoadSpec, load: Load) -> bool:
    """Whether requests come at times of their own, over some time."""
    return spec.kind in ("trace", "open-poisson") and load.rate > 0.0


def load_of(deployment: Deployment, load: Load) -> Load:
    """A load as a deployment sees it, with what its cache has already of each prompt.

    Raises:
        PlanError: The load lacks what the router looks at, says itself what the cache has, or has
            prompts that do not fit a pass and may not be cut.
    """
    options = deployment.options
    budget = options.token_budget or framework_defaults(deployment.framework).policy.token_budget
    longest = int(load.prompts.max())
    if options.chunked is False and longest > budget:
        raise PlanError(
            f"a prompt has {longest} tokens, a pass at most {budget}",
            where="whole prompts",
            hint="a larger token budget, or prompts that may be cut",
        )
    router = options.router
    if router not in ROUTERS:
        raise PlanError(f"a router {router!r} is not known", hint=", ".join(ROUTERS))
    if not options.prefix_cache:
        load = replace(load, blocks=())
    if router == "prefix-aware" and not load.blocks:
        raise PlanError(
            "a prefix-aware router needs a prefix cache and a trace that says what its prompts "
            "share",
            where="router",
            hint="a Mooncake trace with hash_ids, or the router least-loaded",
        )
    if not options.prefix_hits:
        return load
    if load.blocks:
        raise PlanError(
            "the trace says itself what its prompts have in common",
            where="prefix_hits",
            hint="leave the hit rate out",
        )
    return replace(load, hits=(load.prompts * options.prefix_hits).astype(int))


def _tail_note(spec: LoadSpec, load: Load, run: Run, *, saturated: bool) -> tuple[str, ...]:
    """What a rate over the whole run says of an open load that is kept up with."""
    if not is_open(spec, load):
        return ()
    count, last = len(load.prompts), float(load.arrivals.max())
    offered, seen = spec.rate or load.rate, count / run.makespan
    if seen > (1.0 - RATE_TIE) * offered:
        return ()
    # Few random gaps do not add up to the rate that they are drawn at.
    drawn = f" ({load.rate:.3g} as drawn)" if f"{load.rate:.3g}" != f"{offered:.3g}" else ""
    kept = "more than the engines keep up with" if saturated else "which the engines keep up with"
    return (
        f"{offered:.3g} requests/s are offered{drawn}, {kept}; {seen:.3g} requests/s are over "
        f"the whole run, whose last {run.makespan - last:.3g} of {run.makespan:.3g} s are the tail "
        "after the last request was sent",
    )


def _context_note(context: int, load: Load) -> tuple[str, ...]:
    """What a checkpoint of a known context does not take of a load."""
    lengths = load.prompts + load.outputs
    beyond = int((lengths > context).sum())
    if not context or not beyond:
        return ()
    return (
        f"{beyond} of {len(lengths)} requests are longer than the {context} tokens that the "
        f"checkpoint allows (max_position_embeddings), the longest by {lengths.max() - context}: "
        "engines refuse them",
    )


def _notes(
    found: Simulated,
    tier: str,
    queued: float,
    handovers: Iterable[str],
    memory: MemoryParts,
) -> tuple[str, ...]:
    """What lies outside of what was measured.

    Args:
        found: What was simulated.
        tier: What is known of it.
        queued: Share of the time to the first token that is waiting.
        handovers: Names of the effects that were learned, those of handing over among them.
        memory: Of a device.
    """
    own, load = found.deployment, found.load
    known = {
        "architecture": "no run of this framework was measured on any chip; its host time is an "
        "average",
        "new": "no run on chips of this generation was measured; intervals are those of "
        "generations that were left out",
        "vendor": "no run on chips of this vendor was measured: operators are rooflines at the "
        "shares that its tuned kernels reach, and intervals a guess",
    }
    notes = [known[tier]] if tier in known else []
    if memory.gave_way:
        notes.append(
            "the framework's own share of the memory leaves no cache: nearly all is taken, which "
            "its launch command has to say (memory)"
        )
    if own.prefill is not None:
        said = "few runs of engines with prompts on workers of their own were measured"
        named = f"request/handover/{own.framework}|"
        measured = any(key.startswith(named) for key in handovers)
        said += "" if measured else ", none of them under this framework"
        for name, rules in frameworks().items():
            if rules.handover and rules.launch and (name == own.framework or not measured):
                said += f"; {rules.launch.name} {rules.handover}"
        notes.append(f"{said}: on other machines predictions err by factors")
    spec, model = own.spec, own.model
    formats = {model.weights, model.attention_format, model.expert_weights}
    notes += [
        f"{spec.name} has no units for {name}: products widen the weights and run in 16 bits"
        for name in sorted(formats)
        if weight_only(name, spec)
    ]
    notes += generation_note(spec)
    closed = load.concurrency > 0
    if (typical_wait(load, found.run) if closed else queued) > SATURATED:
        notes.append("times to the first token are mostly waiting: the engines are saturated")
    mean = float(load.outputs.mean())
    if 1 < load.concurrency < len(load.outputs) and load.outputs.std() <= IN_STEP * mean:
        notes.append(
            "requests of a closed loop whose outputs are of (nearly) equal lengths end and begin "
            "together here, whatever their prompts, where those of real clients drift apart: times "
            "to the first token come out too long. Give the outputs a distribution, such "
            f"as --output uniform:{round(0.8 * mean)}:{round(1.2 * mean)}"
        )
    return tuple(notes)
