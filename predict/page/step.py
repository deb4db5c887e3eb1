"""The page of a step on a cluster: total time, its parts, timeline of the stages, memory."""

from __future__ import annotations

from typing import Any

from ...simulate.step.trace import step_events
from ..cluster.step import StepPrediction, breakdown
from .assemble import Page, assemble, rounded, short

SCRIPTS = ("breakdown.js", "timeline.js", "step.js")
#: Most spans of a timeline; the page counts the ones left out. Engineering estimate.
MOST_SPANS = 30_000


def step_page(prediction: StepPrediction) -> str:
    """Make the page as self-contained HTML."""
    data = step_data(prediction)
    return assemble(Page(data["title"], data, SCRIPTS))


def step_data(prediction: StepPrediction) -> dict[str, Any]:
    """Collect what the page shows as plain data; times in microseconds."""
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
        "spread": _times(prediction.spread.to_dict(), 1.0) if prediction.spread else [],
        "notes": list(prediction.notes()),
        "spans": _spans(prediction),
    }


def _times(seconds: dict[str, float], scale: float = 1e6) -> list[list[object]]:
    return [[name, short(value * scale)] for name, value in seconds.items()]


def _spans(prediction: StepPrediction) -> dict[str, object]:
    """Spans of all stages by time, as columns; ``kind`` and ``name`` are positions in ``words``."""
    spans = sorted(
        step_events(prediction.step, prediction.plan), key=lambda s: (s["start"], s["stage"])
    )
    # Sorted by start: a cut leaves the beginning of the step whole.
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
