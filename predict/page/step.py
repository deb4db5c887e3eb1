"""The page of a step on a cluster: total, where the time goes, timeline of the stages, memory."""

from __future__ import annotations

from typing import Any

from ...simulate.step.trace import step_events
from ..render_step import breakdown
from ..step import StepPrediction
from .assemble import Page, assemble, rounded, short

SCRIPTS = ("breakdown.js", "timeline.js", "step.js")
#: Most spans that a page holds; what lies beyond is left out and said so.
MOST_SPANS = 30_000


def step_page(found: StepPrediction) -> str:
    """The page as HTML that needs nothing else."""
    data = step_data(found)
    return assemble(Page(data["title"], data, SCRIPTS))


def step_data(found: StepPrediction) -> dict[str, Any]:
    """Everything that the page shows as plain data; times in microseconds."""
    s, work = found.step, found.workload
    return {
        "title": f"{work.parameters / 1e9:.1f}B parameters on {found.cluster}",
        "cluster": found.cluster,
        "device": found.device,
        "devices": found.plan.devices,
        "plan": found.plan.text(),
        "total": {
            "us": short(s.total * 1e6), "lo": short(found.lo * 1e6), "hi": short(found.hi * 1e6)
        },
        "flops": short(found.flops_per_device),
        "peak": short(found.peak_flops),
        "tokens": short(work.batch * work.seq / s.total),
        "sizes": {
            "micro-batches": found.plan.microbatches, "tokens of a sequence": work.seq,
            "sequences a step": work.batch,
        },
        "breakdown": _times(dict(breakdown(found))),
        "operators": _times(found.operators),
        "communication": _times(s.communication),
        "memory": [[name, short(value)] for name, value in found.fit.worst.to_dict().items()],
        "capacity": short(found.fit.capacity),
        "fits": found.fit.fits,
        "spread": _times(found.spread.to_dict(), 1.0) if found.spread else [],
        "notes": list(found.notes()),
        "spans": _spans(found),
    }  # fmt: skip


def _times(seconds: dict[str, float], scale: float = 1e6) -> list[list[Any]]:
    return [[name, short(value * scale)] for name, value in seconds.items()]


def _spans(found: StepPrediction) -> dict[str, Any]:
    """Spans of all stages by time, as columns; ``kind`` and ``name`` are positions in ``words``."""
    spans = sorted(step_events(found.step, found.plan), key=lambda s: (s["start"], s["stage"]))
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
