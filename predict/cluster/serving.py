"""Predict latency, throughput and memory of LLM serving under a load, with 90 % intervals."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

from ...common.errors import PlanError
from ...common.interval import Interval
from ...common.units import duration
from ...models.operators import OpModel
from ...models.serving.effects import ServingEffects
from ...models.serving.model import METRICS as MODEL_METRICS
from ...models.serving.model import REQUEST_TIME, ServingModel
from ...simulate.serving.latencies import (
    FREE,
    LEVELS,
    METRICS,
    Served,
    Slo,
    served,
    states_of,
    tied,
    wider,
)
from ...simulate.serving.load import Load
from ...simulate.serving.policies import release_note
from ..devices import generation_note
from ..operator.prices import weight_only
from .deployment import Deployment
from .energy import serving_energy
from .serving_case import LoadSpec
from .serving_engine import (
    MOST_TABLES,
    Engines,
    engine_memory,
    engine_notes,
    levels,
    request_delay,
    request_floors,
    wide_notes,
)
from .serving_load import context_note, draw, load_of
from .serving_prediction import ServingPrediction
from .serving_run import (
    STABLE,
    Simulated,
    binding_limit,
    drifted,
    run_load,
    tail_note,
    waits,
    why_waiting,
)

#: Fraction of the mean time to the first token below which requests that drift apart count as
#: waiting less. Engineering choice.
DRIFTED = 0.95
#: Probability from which an event lies inside the 90 % interval: 5 % lie beyond each bound.
LIKELY = 0.05


class ServingPredictor:
    """Predicts deployments; deployments that differ only in their load share cost tables.

    Args:
        operators: Latency model of library operators; ``None`` for rooflines.
        model: Model fitted to measured serving runs; by default the one that ships.
        tables: Number of cost tables to keep.
    """

    def __init__(
        self,
        operators: OpModel | None,
        model: ServingModel | None = None,
        tables: int = MOST_TABLES,
    ) -> None:
        self.engines = Engines(operators, tables)
        self.model = model or ServingModel.find()

    def own(self, deployment: Deployment) -> Deployment:
        """Return the deployment calibrated to the user's own stack, if that was measured."""
        source, memory = self.model.own_stack(deployment.device, deployment.source)
        options = deployment.options
        options = replace(options, memory=options.memory or memory)
        return replace(deployment, source=source, options=options)

    def context(self, deployment: Deployment) -> dict[str, str]:
        """Return the levels of a deployment in the random effects of the serving model."""
        return levels(self.own(deployment), self.model)

    def simulate(
        self,
        deployment: Deployment,
        spec: LoadSpec,
        load: Load | None = None,
        *,
        record: bool = False,
    ) -> Simulated:
        """Simulate a load on engines whose passes have the learned costs.

        Args:
            deployment: Engines that serve the load.
            spec: The load.
            load: Requests of ``spec``, if they were drawn already.
            record: Whether to keep the engines' histories. Without them there are no inter-token
                latencies, and each request's mean time per token is used instead.

        Raises:
            PlanError: The deployment does not fit into memory, a request does not fit into the KV
                cache, or the load lacks the data that the router needs.
        """
        load = load_of(deployment, load or draw(spec))
        asked, deployment = deployment, self.own(deployment)
        context, effects = levels(deployment, self.model), self.model.effects
        weights, first = effects.weights(context), effects.first(context)
        stations = self.engines.stations(deployment, load, weights)
        alone = spec.kind in ("static-batch", "offline")
        delay = request_delay(deployment, served=not alone, weights=weights)
        run = run_load(deployment, load, stations, delay, record=record)
        floor = request_floors(deployment, load, run.found)
        seen = served(load, run, first, floor=floor)
        return Simulated(
            asked, deployment, spec, load, context, stations, delay, run, first, floor, seen
        )

    def predict(
        self,
        deployment: Deployment,
        spec: LoadSpec,
        *,
        slo: Slo = FREE,
        load: Load | None = None,
        record: bool = True,
    ) -> ServingPrediction:
        """Simulate a load and return all figures with 90 % intervals.

        Args:
            deployment: Engines that serve the load.
            spec: The load.
            slo: Latency limits that requests have to meet.
            load: See :meth:`simulate`.
            record: See :meth:`simulate`.

        Raises:
            PlanError: See :meth:`simulate`.
        """
        return self.judge(self.simulate(deployment, spec, load, record=record), slo)

    def judge(self, found: Simulated, slo: Slo = FREE) -> ServingPrediction:
        """Add 90 % intervals to a simulated run.

        Args:
            found: Result of :meth:`simulate`.
            slo: Latency limits that requests have to meet.
        """
        deployment, spec = found.asked, found.spec
        load, run, seen, queued = found.load, found.run, found.seen, found.queued
        tier = self.model.tier(found.context)
        overload, full = 0.0, ""
        drift = self._drift(found)
        if found.room < inf:
            ends, spans, overload = self._open(found)
            share, moved = 1.0 / found.room, 1.0 / found.link_room
            limit = binding_limit(found)
            if moved > max(share, STABLE):
                full = f"the load is {moved:.0%} of what the links between them can transfer"
            elif share > STABLE:
                full = f"the load is {share:.0%} of their maximum throughput"
                full += f", and requests wait for room in {limit}" if limit else ""
            full = f"the engines are saturated: {full}" if full else ""
        else:
            ends, spans = self._tied(found, tier, queued)
            # Lock-step alone is no saturation.
            full = why_waiting(drift[1] if drift else found) if waits(load, run) else ""
        figures = {}
        for metric in METRICS:
            for level in ("mean", "std", *LEVELS):
                own = [each.figure(metric, level) for each in (seen, *ends)]
                name = f"p{level}" if isinstance(level, int) else level
                figures[f"{metric}/{name}"] = Interval.outer(own)
        good = [each.good(slo) for each in (seen, *ends)]
        spent = Interval.outer(spans)
        requests, tokens = (
            Interval(total / spent.value, total / spent.hi, total / spent.lo)
            for total in (load.count, found.output_tokens)
        )
        if overload > LIKELY and min(slo.ttft, slo.e2e) < inf:
            # Under overload the share of requests that meet the SLO falls towards 0 over time.
            good.append(0.0)
        memory = engine_memory(found.deployment, deployment.engine)
        cache = found.stations[0].cache
        return ServingPrediction(
            deployment=deployment,
            spec=spec,
            load=load,
            run=run,
            seen=seen,
            clock=found.clock,
            figures=figures,
            requests_per_s=requests,
            tokens_per_s=tokens,
            good=Interval.outer(good),
            slo=slo,
            memory=memory.to_dict() | cache.parts,
            cache_tokens=cache.tokens,
            queued=queued,
            known=tier,
            notes=(
                *filter(None, [deployment.model.left_out]),
                *wide_notes(found.deployment),
                *engine_notes(deployment.options, memory),
                *_notes(found, tier, full, self.model.effects),
                *_drift_note(drift),
                *tail_note(found, overload),
                *context_note(deployment.context, load),
                *release_note(deployment.framework, deployment.version),
                *self.model.source_note(deployment.source, deployment.spec.name),
            ),
            states=states_of(run, cache.tokens, deployment.engine.count),
            energy=serving_energy(deployment, load, run, spent),
            overload=overload,
        )

    def _spreads(self, found: Simulated) -> dict[str, float]:
        """Return the standard deviation of the logarithm of each predicted metric."""
        spread = self.model.effects.spread
        metrics = (*MODEL_METRICS, REQUEST_TIME)
        return {metric: spread(found.context, metric, found.shares(metric)) for metric in metrics}

    def factors(self, found: Simulated) -> dict[str, tuple[float, float]]:
        """Return 90 % interval bounds of the metrics of an open load, as factors on estimates."""
        tier, spreads = self.model.tier(found.context), self._spreads(found)
        return {
            metric: self.model.interval(metric, tier, found.queued, found.context, spreads[metric])
            for metric in MODEL_METRICS
        }

    def _open(self, found: Simulated) -> tuple[list[Served], list[float], float]:
        """Return latencies at both bounds, run times in seconds and the probability of overload.

        The load is open: faster engines do not bring more requests, and slower engines let queues
        grow. Queues of overloaded engines grow without limit, so the upper bounds are simulated
        with engines that are just stable.

        Args:
            found: Simulation at the estimated costs.
        """
        load, run, room = found.load, found.run, found.room
        factors = self.factors(found)
        fast, slow = factors["per_token"]
        ends, spans = [], [run.makespan]
        for side, slower in enumerate((fast, min(slow, max(1.0, STABLE * room)))):
            other = found.again(slower)
            times = factors["ttft"][side], factors["tpot"][side]
            own = served(load, run, found.first * times[0], times[1], found.floor)
            # Different queues may leave different prompts in the prefix caches.
            least = request_floors(found.deployment, load, other.found)
            ends.append(wider(own, served(load, other, found.first, floor=least), side))
            spans.append(other.makespan)
        # The run time of overloaded engines follows from their throughput, not from the arrivals.
        spans.append(max(spans[2], slow / room * float(load.arrivals.max())))
        # The interval describes kernels; an overloaded link is certain whatever they take.
        overload = 1.0 - Interval(1.0, fast, slow).chance_below(room)
        return ends, spans, 1.0 if found.link_room < 1.0 else overload

    def _drift(self, found: Simulated) -> tuple[str, Simulated] | None:
        """Simulate a closed loop in lock-step with its lengths spread.

        Args:
            found: Simulation of the load.

        Returns:
            The option that spreads the lengths, and the simulation; ``None`` if the requests are
            not in lock-step, or wait as long when they are spread.
        """
        spread = drifted(found.load, found.spec.seed)
        # The longest of the spread requests may be too long for the cache.
        with suppress(PlanError):
            if spread:
                loose = self.simulate(found.asked, found.spec, spread[1])
                before, after = (own.seen.figure("ttft", "mean") for own in (found, loose))
                return (spread[0], loose) if after < DRIFTED * before else None
        return None

    def _tied(self, found: Simulated, tier: str, queued: float) -> tuple[list[Served], list[float]]:
        """Return latencies at both bounds, and run times in seconds: estimate, lower, upper."""
        first, whole = (found.seen.figure(metric, "mean") for metric in ("ttft", "e2e"))
        known = self.model.tied_intervals(
            tier,
            queued,
            found.context,
            (first, whole - first),
            REQUEST_TIME if found.load.concurrency else "per_token",
            self._spreads(found),
        )
        sides = zip(known["ttft"], known["tpot"], known[REQUEST_TIME], strict=True)
        ends = [tied(found.seen, one, later, both, found.floor) for one, later, both in sides]
        times = [end.figure("e2e", "mean") / whole for end in (found.seen, *ends)]
        return ends, [found.span * time for time in times]


def _notes(
    found: Simulated,
    tier: str,
    full: str,
    learned: ServingEffects,
) -> tuple[str, ...]:
    """Return notes on what lies outside the measured runs.

    Args:
        found: The simulated run.
        tier: How closely measured runs resemble this one (``ServingModel.tier``).
        full: Note on what requests wait for; empty if they hardly wait.
        learned: Random effects of the serving model.
    """
    own = found.deployment
    known = {
        "new": "no run on chips of this generation was measured; intervals come from predicting "
        "held-out generations",
        "vendor": "no run on chips of this vendor was measured: operator times are rooflines at "
        "the efficiency of its tuned kernels, and intervals are guesses",
    }
    notes = [known[tier]] if tier in known else []
    if not learned.knows("engine", found.context.get("engine", "")):
        notes.append(
            "no run of this framework was measured on any chip; its host time is an average"
        )
    if own.prefill is not None:
        named = f"request/handover/{own.framework}|"
        measured = any(key.startswith(named) for key in learned.values)
        said = "" if measured else "no run of this framework with prefill workers was measured; "
        notes.append(
            f"{said}with separate prefill workers, times to the first token can be wrong by a "
            "factor of several where prompts queue"
        )
    spec, model = own.spec, own.model
    formats = {model.weights, model.attention_format, model.expert_weights}
    notes += [
        f"{spec.name} has no {name} units: matrix products convert the weights and run in 16 bits"
        for name in sorted(formats)
        if weight_only(name, spec)
    ]
    notes += generation_note(spec)
    if full:
        notes.append(full)
    return tuple(notes)


def _drift_note(drift: tuple[str, Simulated] | None) -> tuple[str, ...]:
    """Return a note on a closed loop in lock-step.

    Args:
        drift: Result of :meth:`ServingPredictor._drift`.
    """
    if drift is None:
        return ()
    option, loose = drift
    mean = loose.seen.figure("ttft", "mean")
    return (
        "requests of a closed loop with (nearly) equal output lengths start and end together, as "
        "in benchmarks with fixed lengths, and wait for each other's prompts; where lengths vary "
        f"as with {option}, the time to the first token is {duration(mean * 1e6)} on average",
    )
