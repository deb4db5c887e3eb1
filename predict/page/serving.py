"""The page of a simulated service: figures, memory, and what happened over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...common.units import duration
from ...simulate.serving.latencies import FREE, LEVELS, METRICS
from ...simulate.serving.load import History
from ..cluster.serving import ServingPrediction
from .assemble import Page, assemble, rounded, short

SCRIPTS = ("serving.js",)
#: Most points of a curve, and most requests that are drawn: about a pixel each.
MOST_POINTS, MOST_REQUESTS = 800, 4000


def serving_page(prediction: ServingPrediction) -> str:
    """Make the page as self-contained HTML."""
    data = serving_data(prediction)
    return assemble(Page(data["title"], data, SCRIPTS))


def serving_data(prediction: ServingPrediction) -> dict[str, Any]:
    """Collect what the page shows as plain data; times in microseconds."""
    own, run = prediction.deployment, prediction.run
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
        "makespan": short(run.makespan * 1e6),
        "engines": [_curves(h, prediction.cache_tokens) for h in run.histories[: own.engine.count]],
        "sent": rounded((run.sent[shown] * 1e6).tolist(), 6),
        "ttft": rounded(((run.first - run.sent)[shown] * 1e6).tolist(), 4),
        "e2e": rounded(((run.finished - run.sent)[shown] * 1e6).tolist(), 4),
        "left_out": len(run.sent) - len(run.sent[shown]),
        "notes": [
            *prediction.notes,
            f"the simulated load takes {duration(run.makespan * 1e6)}; curves and dots are of the "
            "estimate, without its interval",
        ],
    }


_NAMES = ("mean", *(f"p{level}" for level in LEVELS))


def _curves(history: History, room: int) -> dict[str, list[float | None]]:
    """Curves over time in even steps: means of what held during each."""
    if not history.time:
        return {"time": [], "batch": [], "waiting": [], "held": []}
    times = np.array(history.time)
    grid = np.linspace(0.0, times[-1], MOST_POINTS + 1)[1:]
    at = np.minimum(np.searchsorted(times, grid), len(times) - 1)
    # Between events an engine that is idle runs nothing.
    idle = grid < times[at] - np.array(history.spans)[at]
    columns = {
        "batch": np.where(idle, 0, np.array(history.batch)[at]),
        "waiting": np.where(idle, 0, np.array(history.waiting)[at]),
        "held": np.where(idle, 0.0, np.array(history.held)[at]) / room,
    }
    return {
        "time": rounded((grid * 1e6).tolist(), 5),
        **{name: rounded(values.tolist(), 3) for name, values in columns.items()},
    }
