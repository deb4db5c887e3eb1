"""HTML pages of a step on a cluster and of a simulated service: times, memory and timelines."""

from __future__ import annotations

import numpy as np

from ...common.types import JsonObject
from ...common.units import duration
from ...simulate.serving.latencies import FREE, LEVELS, METRICS
from ...simulate.serving.load import History
from ..cluster.serving_prediction import ServingPrediction
from ..cluster.step import StepPrediction, breakdown
from ..export.timeline import step_events
from .assemble import Page, assemble, rounded, short

STEP_SCRIPTS = ("breakdown.js", "timeline.js", "step.js")
SERVING_SCRIPTS = ("serving.js",)
#: Maximum spans of a timeline; the page states how many are omitted. Engineering estimate.
MOST_SPANS = 30_000
#: Maximum points of a curve, and maximum requests drawn: about one per pixel.
MOST_POINTS, MOST_REQUESTS = 800, 4000
_NAMES = ("mean", *(f"p{level}" for level in LEVELS))


def step_page(prediction: StepPrediction) -> str:
    """Return the page of a step as self-contained HTML."""
    data = step_data(prediction)
    return assemble(Page(data["title"], data, STEP_SCRIPTS))


def step_data(prediction: StepPrediction) -> JsonObject:
    """Return the page's data; times in microseconds."""
    s, work = prediction.step, prediction.workload
    return {
        "title": f"{work.parameters / 1e9:.1f}B parameters on {prediction.cluster}",
        "cluster": prediction.cluster,
        "device": prediction.device,
        "devices": prediction.plan.devices,
        "plan": prediction.plan.text(),
        "total": {
            "us": short(s.total * 1e6),
            "lo": short(prediction.interval.lo * 1e6),
            "hi": short(prediction.interval.hi * 1e6),
        },
        "flops": short(prediction.flops_per_device),
        "peak": short(prediction.peak_flops),
        "peakFormat": prediction.peak_format,
        "tokens": short(work.batch * work.seq / s.total),
        "sizes": {
            "micro-batches": prediction.plan.microbatches,
            "tokens of a sequence": work.seq,
            "sequences a step": work.batch,
        },
        "breakdown": _times(dict(breakdown(prediction))),
        "operators": _times(prediction.operators),
        "communication": _times(s.communication),
        "memory": [[name, short(value)] for name, value in prediction.fit.worst.to_dict().items()],
        "capacity": short(prediction.fit.capacity),
        "fits": prediction.fit.fits,
        "run": prediction.run.lines() if prediction.run else [],
        "spread": _times(prediction.spread.to_dict(), 1.0) if prediction.spread else [],
        "notes": list(prediction.notes()),
        "spans": _spans(prediction),
    }


def _times(seconds: dict[str, float], scale: float = 1e6) -> list[list[object]]:
    return [[name, short(value * scale)] for name, value in seconds.items()]


def _spans(prediction: StepPrediction) -> dict[str, object]:
    """Return all stages' spans by start, as columns; ``kind`` and ``name`` index ``words``."""
    spans = sorted(
        step_events(prediction.step, prediction.plan), key=lambda s: (s["start"], s["stage"])
    )
    # Sorted by start, so that truncation keeps the beginning of the step complete.
    kept = spans[:MOST_SPANS]
    words: dict[str, int] = {}
    return {
        "left_out": len(spans) - len(kept),
        "stage": [s["stage"] for s in kept],
        "kind": [words.setdefault(s["kind"], len(words)) for s in kept],
        "name": [words.setdefault(s["name"], len(words)) for s in kept],
        "start": rounded([s["start"] for s in kept], 7),
        "end": rounded([s["end"] for s in kept], 7),
        "words": list(words),
    }


def serving_page(prediction: ServingPrediction) -> str:
    """Return the page of a service as self-contained HTML."""
    data = serving_data(prediction)
    return assemble(Page(data["title"], data, SERVING_SCRIPTS))


def serving_data(prediction: ServingPrediction) -> JsonObject:
    """Return the page's data; times in microseconds."""
    own, run, clock = prediction.deployment, prediction.run, prediction.clock
    makespan = run.makespan * clock * 1e6
    work = own.model.workload
    every = max(1, -(-len(run.sent) // MOST_REQUESTS))
    shown = slice(None, None, every)
    tokens = prediction.tokens_per_s
    return {
        "title": f"{work.parameters / 1e9:.1f}B parameters on {own.devices} × {own.spec.name}",
        "plan": own.text(),
        "framework": own.framework,
        "tokens": [short(end) for end in tokens],
        "per_device": short(tokens.value / own.devices),
        "requests": short(prediction.requests_per_s.value),
        "good": None if prediction.slo == FREE else short(prediction.good.value),
        "latencies": [
            [
                metric,
                [
                    [short(end * 1e6) for end in prediction.figures[f"{metric}/{name}"]]
                    for name in _NAMES
                ],
            ]
            for metric in METRICS
        ],
        "levels": list(_NAMES),
        "memory": [[name, short(value)] for name, value in prediction.memory.items()],
        "states": {name: short(value) for name, value in prediction.states.items()},
        "evicted": run.evicted,
        "makespan": short(makespan),
        "engines": [
            _curves(h, prediction.cache_tokens, clock) for h in run.histories[: own.engine.count]
        ],
        "sent": rounded((run.sent[shown] * clock * 1e6).tolist(), 6),
        "ttft": rounded((prediction.seen.ttft[shown] * 1e6).tolist(), 4),
        "e2e": rounded((prediction.seen.e2e[shown] * 1e6).tolist(), 4),
        "left_out": len(run.sent) - len(run.sent[shown]),
        "notes": [
            *prediction.notes,
            f"the simulated load takes {duration(makespan)}; curves and dots show the "
            "estimate, without its interval",
        ],
    }


def _curves(history: History, room: int, clock: float) -> dict[str, list[float | None]]:
    """Sample an engine's history at even steps of time, scaled by ``clock``."""
    if not history.time:
        return {"time": [], "batch": [], "waiting": [], "held": []}
    times = np.array(history.time)
    grid = np.linspace(0.0, times[-1], MOST_POINTS + 1)[1:]
    at = np.minimum(np.searchsorted(times, grid), len(times) - 1)
    # An idle engine runs nothing between events.
    idle = grid < times[at] - np.array(history.spans)[at]
    columns = {
        "batch": np.where(idle, 0, np.array(history.batch)[at]),
        "waiting": np.where(idle, 0, np.array(history.waiting)[at]),
        "held": np.where(idle, 0.0, np.array(history.held)[at]) / room,
    }
    return {
        "time": rounded((grid * clock * 1e6).tolist(), 5),
        **{name: rounded(values.tolist(), 3) for name, values in columns.items()},
    }
