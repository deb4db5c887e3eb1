"""Behavior of one replica of a pool under load, from simulated runs at several utilizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...common.interval import Interval
from ...simulate.serving.fleet import capacity
from ...simulate.serving.latencies import Slo, served
from ...simulate.serving.load import Load
from ...simulate.serving.pools import Curve
from .deployment import Deployment
from .energy import serving_energy
from .fleet_file import ModelLoad, Startup
from .serving import ServingPredictor
from .serving_case import LoadSpec
from .serving_engine import engine_memory
from .serving_run import Simulated, tail_note

#: Utilizations at which a replica is simulated; requests of each run, and those that are evaluated
#: once the engines have filled: with 600 requests and all of them evaluated, an 8B model on an H100
#: near maximum throughput has half the requests in flight of a run of 6000.
SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
COUNT, SETTLED = 1500, slice(500, None)


@dataclass(frozen=True)
class Replica:
    """Behavior of one replica of a pool.

    Attributes:
        deployment: The replica's deployment.
        warm: Curves at the estimate and at the fast and slow bounds of the 90 % interval.
        cold: The same without hits in the prefix cache; empty without such a cache.
        start_s: Seconds from allocated devices to the first request served.
        warm_s: Seconds from then until the prefix cache is filled.
        known: How closely measured runs resemble the deployment (docs/serving.md).
        notes: Assumptions, and what lies outside the measured runs.
        powered: Whether the power of the devices is known.
    """

    deployment: Deployment
    warm: tuple[Curve, ...]
    cold: tuple[Curve, ...]
    start_s: float
    warm_s: float
    known: str
    notes: tuple[str, ...]
    powered: bool


def replica_of(
    predictor: ServingPredictor,
    own: Deployment,
    asked: ModelLoad,
    startup: Startup,
    notice: float = 0.0,
    seed: int = 0,
) -> Replica:
    """Simulate a replica over a range of utilizations.

    Args:
        predictor: Predictor of serving.
        own: Deployment of the replica.
        asked: Load of the model.
        startup: Start-up times.
        notice: Seconds of notice before an interruption, in which requests may finish.
        seed: Random seed of the requests.

    Raises:
        PlanError: The model or a request does not fit into memory.
    """
    prompts, outputs = asked.lengths(COUNT, seed)
    most, found = _runs(predictor, own, prompts, outputs, seed)
    middle = found[len(SHARES) // 2]
    judged = predictor.judge(middle, asked.slo)
    # The note on the tail of a short run does not apply to a week.
    ended = tail_note(middle, judged.overload)
    cold: tuple[Curve, ...] = ()
    warm_s = 0.0
    if own.options.prefix_hits:
        empty = replace(own, options=replace(own.options, prefix_hits=0.0))
        cold_most, others = _runs(predictor, empty, prompts, outputs, seed)
        cold = _curves(predictor, cold_most, others, asked.slo, notice)
        tokens = found[0].stations[0].cache.tokens * own.engine.count
        warm_s = startup.warm_s or tokens / (cold_most * float(prompts.mean()))
    return Replica(
        own,
        _curves(predictor, most, found, asked.slo, notice),
        cold,
        startup.seconds
        or _loading(own) / (startup.storage_gbps or np.inf) / 1e9 + startup.engine_s,
        warm_s,
        judged.known,
        tuple(note for note in judged.notes if note not in ended),
        judged.energy is not None,
    )


def _loading(own: Deployment) -> float:
    """Return bytes of the weights of all workers, which are loaded at the same time."""
    workers = [w for w in (own.engine, own.prefill) if w]
    return sum(engine_memory(own, w).held * w.devices for w in workers)


def _runs(
    predictor: ServingPredictor,
    own: Deployment,
    prompts: np.ndarray,
    outputs: np.ndarray,
    seed: int,
) -> tuple[float, list[Simulated]]:
    """Return the maximum rate of a replica (requests/s), and runs at :data:`SHARES` of it."""
    count = len(prompts)
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, count))
    times *= count / times[-1]

    def run(rate: float) -> Simulated:
        load = Load(prompts, outputs, times / rate)
        return predictor.simulate(own, LoadSpec(rate=rate, count=count), load)

    first = run(1.0)
    most = min(capacity(first.load, *first.stations), first.link_room)
    return most, [run(share * most) for share in SHARES]


def _curves(
    predictor: ServingPredictor,
    most: float,
    found: Sequence[Simulated],
    slo: Slo,
    notice: float,
) -> tuple[Curve, ...]:
    """Return the curves at the estimate and at both bounds.

    A replica slower by a factor behaves, at the same utilization, like the estimate with all times
    (including arrivals) stretched by that factor.
    """
    factors = [predictor.factors(one) for one in found]
    curves = []
    for side in (None, 0, 1):
        slower = 1.0 if side is None else factors[-1]["per_token"][side]
        rows = [
            _point(one, of, share * most / slower, slower, side, slo, notice)
            for one, of, share in zip(found, factors, SHARES, strict=True)
        ]
        figures, slack = zip(*rows, strict=True)
        flight, waiting, cut, watts = np.array(figures).T
        room = max(0.0, found[-1].run.largest_batch * found[-1].asked.engine.count - flight[-1])
        curves.append(
            Curve(
                most / slower,
                np.array(SHARES),
                flight,
                waiting,
                cut,
                watts,
                np.array(slack),
                room,
            )
        )
    return tuple(curves)


def _point(
    found: Simulated,
    factors: dict[str, tuple[float, float]],
    rate: float,
    slower: float,
    side: int | None,
    slo: Slo,
    notice: float,
) -> tuple[tuple[float, float, float, float], np.ndarray]:
    """Return a curve's figures at one utilization, and the sorted slack of its requests (s)."""
    first = later = 1.0
    if side is not None:
        outer = (min, max)[side]
        first, later = (outer(factors[name][side], slower) for name in ("ttft", "tpot"))
    seen = served(found.load, found.run, found.first * first, later, found.floor)
    ttft, whole_s = seen.ttft[SETTLED], seen.e2e[SETTLED]
    span = found.run.makespan
    joules = serving_energy(found.asked, found.load, found.run, Interval(span, span, span))
    figures = (
        # Little's law: requests in a state are the rate times the mean time in that state.
        rate * float(whole_s.mean()),
        rate * float(ttft.mean()) * found.queued,
        rate * float(np.maximum(whole_s - notice, 0.0).mean()),
        joules[0 if side is None else side + 1] / span if joules else 0.0,
    )
    slack = np.minimum(slo.ttft - ttft, slo.e2e - whole_s)
    slack[np.nan_to_num(seen.tpot[SETTLED], nan=0.0) > slo.tpot] = -1.0
    return figures, np.sort(slack)
