"""What is predicted of a deployment under a load, as plain data, and what its notes tell."""

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
        deployment: What serves.
        spec: The load.
        load: Its requests.
        run: What became of them on the engines, whose clock nothing learned of first tokens is in.
        seen: Their latencies, those that ``figures`` are of.
        clock: Factor on times of the run, by which a closed loop keeps those latencies.
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
        load = self.load
        parts = {"request": load.count, "output_token": float(load.outputs @ load.counts)}
        return {name: self.energy.times(1.0 / count) for name, count in parts.items()}

    def to_dict(self, price: float = 0.0) -> dict[str, object]:
        """Plain data in the terms of ``vllm bench serve``, with ends of intervals.

        Args:
            price: Dollars of a device and hour; 0 for none.
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
