"""Prediction of a deployment under a load: figures with intervals, notes and JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...common.interval import Interval, end_fields, latency_fields
from ...models.power.energy import energy_fields
from ...simulate.serving.latencies import FREE, LEVELS, METRICS, Served, Slo
from ...simulate.serving.load import Load, Run
from .deployment import Deployment
from .serving_case import LoadSpec


@dataclass(frozen=True)
class ServingPrediction:
    """Latencies, throughput and memory of a deployment under a load.

    Attributes:
        deployment: The engines.
        spec: The load.
        load: Requests of the load.
        run: Simulated times of the requests, without the learned factor on times to first token.
        seen: Latencies of the requests with that factor; ``figures`` summarizes them.
        clock: Factor on times of the run that makes a closed loop consistent with ``seen``.
        figures: Seconds with their intervals by ``metric/level``, such as ``ttft/p99``,
            ``ttft/mean`` and ``ttft/std``.
        requests_per_s: Throughput with its interval.
        tokens_per_s: Output tokens per second of all engines, with its interval.
        good: Share of the requests that meet the SLO, with its interval.
        slo: The SLO.
        memory: Bytes per device of a decode engine, by use; parts of the KV cache come last.
        cache_tokens: Tokens that fit into the KV cache of an engine.
        queued: Share of the time to the first token that is spent waiting for other requests.
        known: How closely measured runs resemble the deployment (docs/serving.md).
        notes: Assumptions, and what lies outside the measured runs.
        states: Means over time of caches, queues and batches; empty without histories.
        energy: Joules of all devices over the run; ``None`` if a power limit is unknown.
        overload: Probability that an open load exceeds the engines' maximum throughput, so that
            queues grow without limit.
    """

    deployment: Deployment
    spec: LoadSpec
    load: Load
    run: Run
    seen: Served
    clock: float
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
        """Return the cost in dollars of a million output tokens and of a request.

        Args:
            price: Dollars per device hour; 0 for an unknown price, for which nothing is returned.
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
        """Return joules per request and per output token; empty if power is unknown."""
        if self.energy is None:
            return {}
        load = self.load
        parts = {"request": load.count, "output_token": float(load.outputs @ load.counts)}
        return {name: self.energy.times(1.0 / count) for name, count in parts.items()}

    def to_dict(self, price: float = 0.0) -> dict[str, object]:
        """Return JSON data under the names of ``vllm bench serve``, with interval bounds.

        Args:
            price: Dollars per device hour; 0 if unknown.
        """
        load, count = self.load, self.load.count
        prompts, outputs = (round(float(own @ load.counts)) for own in (load.prompts, load.outputs))
        rate, run, gpus = self.requests_per_s, self.run, self.deployment.devices
        prompt_rate = prompts / count
        data: dict[str, object] = {
            **latency_fields(*self.figures["e2e/mean"]),
            "num_prompts": count,
            "burstiness": self.spec.burstiness,
            "duration": count / rate.value,
            "completed": count,
            "total_input_tokens": prompts,
            "total_output_tokens": outputs,
            "max_concurrency": self.load.concurrency or None,
            "request_rate": self.spec.rate or self.load.rate or "inf",
            **end_fields("request_throughput", rate),
            **end_fields("output_throughput", self.tokens_per_s),
            **end_fields("output_throughput_per_gpu", self.tokens_per_s.times(1.0 / gpus)),
            "total_token_throughput": rate.value * prompt_rate + self.tokens_per_s.value,
        }
        if self.slo != FREE:
            data |= end_fields(
                "request_goodput:", Interval(*(r * g for r, g in zip(rate, self.good, strict=True)))
            )
            data |= end_fields("slo_attainment", self.good)
        for metric in METRICS:
            named = "e2el" if metric == "e2e" else metric
            for level in ("mean", "std", *LEVELS):
                name = f"p{level}" if isinstance(level, int) else level
                key, name = f"{metric}/{name}", {"p50": "median"}.get(name, name)
                data |= end_fields(f"{name}_{named}_ms", self.figures[key].times(1e3))
        for name, joules in self.joules().items():
            data |= end_fields(f"joules_per_{name}", joules)
        for name, dollars in self.dollars(price).items():
            data |= end_fields(f"dollars_per_{name}", dollars)
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
