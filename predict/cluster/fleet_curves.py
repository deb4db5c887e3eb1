"""What one replica of a pool does under load, by simulated runs at shares of what it serves."""

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
from .serving_load import tail_note
from .serving_run import Simulated

#: Shares of what a replica serves at most that are simulated, and requests of each run, the first
#: of which meet engines that are still empty: with 600 and all of them, requests in flight of an 8B
#: model on an H100 near what it serves at most are half of those of 6000.
SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
COUNT, SETTLED = 1500, slice(500, None)


@dataclass(frozen=True)
class Replica:
    """What one replica of a pool does.

    Attributes:
        deployment: What it is.
        warm: By estimate, and by both ends of the 90 % intervals: fast and slow.
        cold: The same without what its cache of prompts has; empty without such a cache.
        start_s: Seconds from its devices to its first request.
        warm_s: After that, until its cache is filled.
        known: What is known of it (docs/serving.md).
        notes: What lies outside of what was measured.
        powered: Whether the power of its devices is known.
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
    """Simulate a replica under some loads.

    Args:
        predictor: Of serving.
        own: The replica.
        asked: What its model is asked.
        startup: How it starts.
        notice: Seconds before an interruption in which requests may end.
        seed: Of the requests.

    Raises:
        PlanError: The model does not fit, or a request.
    """
    prompts, outputs = asked.lengths(COUNT, seed)
    most, found = _runs(predictor, own, prompts, outputs, seed)
    middle = found[len(SHARES) // 2]
    judged = predictor.judge(middle, asked.slo)
    # How a run of a thousand requests ends says nothing of a week.
    ended = tail_note(middle.spec, middle.load, middle.run, saturated=judged.overload > 0.5)
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
    """Bytes of the weights of all workers, which start at once."""
    workers = [w for w in (own.engine, own.prefill) if w]
    return sum(engine_memory(own, w).held * w.devices for w in workers)


def _runs(
    predictor: ServingPredictor,
    own: Deployment,
    prompts: np.ndarray,
    outputs: np.ndarray,
    seed: int,
) -> tuple[float, list[Simulated]]:
    """Requests a second that a replica serves at most, and runs at :data:`SHARES` of it."""
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
    """The estimate, and both ends.

    A replica that is slower by a factor does at a share of what it serves what the estimate does at
    that share, later by the factor: requests come later as well.
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
    """Figures of a curve at one share, and what its requests may wait longer."""
    first = later = 1.0
    if side is not None:
        outer = (min, max)[side]
        first, later = (outer(factors[name][side], slower) for name in ("ttft", "tpot"))
    seen = served(found.load, found.run, found.first * first, later, found.floor)
    ttft, whole_s = seen.ttft[SETTLED], seen.e2e[SETTLED]
    span = found.run.makespan
    joules = serving_energy(found.asked, found.load, found.run, Interval(span, span, span))
    figures = (
        # Little's law: a rate times a time is how many there are.
        rate * float(whole_s.mean()),
        rate * float(ttft.mean()) * found.queued,
        rate * float(np.maximum(whole_s - notice, 0.0).mean()),
        joules[0 if side is None else side + 1] / span if joules else 0.0,
    )
    slack = np.minimum(slo.ttft - ttft, slo.e2e - whole_s)
    slack[np.nan_to_num(seen.tpot[SETTLED], nan=0.0) > slo.tpot] = -1.0
    return figures, np.sort(slack)
