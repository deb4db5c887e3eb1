"""A step as a Chrome trace: one track of computation and one of communication per stage."""

from __future__ import annotations

from ...common.chrome_trace import ChromeTrace
from ...common.types import JsonObject
from .compose import StepTime
from .pipeline import BACKWARD, FORWARD, WEIGHTS
from .plan import Plan

NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weight gradients"}
#: Most stages that get a track, from the first on; more make a trace unwieldy (engineering choice).
MOST_STAGES = 64


def step_events(step: StepTime, plan: Plan) -> list[JsonObject]:
    """Return spans of a step: ``stage``, ``track``, ``name``, ``kind``, ``start`` and ``end`` (us).

    A task's exposed communication is drawn at its end; where it lies within the task is unknown.
    """
    spans: list[dict[str, object]] = []
    for stage, track in enumerate(step.run.tasks[:MOST_STAGES]):
        times = step.stages[stage]
        parts = {FORWARD: times.forward, BACKWARD: times.backward, WEIGHTS: times.weights}
        for task, start, end in track:
            part = parts[task.kind]
            # The split of the stage's mean task is applied to every task.
            share = part.compute / part.total if part.total else 1.0
            middle = start + (end - start) * share
            chunk = f" chunk {task.chunk}" if plan.virtual > 1 else ""
            name = f"{NAMES[task.kind]} {task.micro}{chunk}"
            spans.append(_span(stage, "compute", name, NAMES[task.kind], start, middle))
            if end > middle:
                spans.append(_span(stage, "communication", name, "exposed", middle, end))
        now = step.run.end(stage)
        for name, kind, length in (
            ("gradients", "exposed", times.reduction),
            ("update", "update", times.update.compute),
            ("after update", "exposed", times.update.exposed),
        ):
            if length > 0:
                track_name = "communication" if kind == "exposed" else "compute"
                spans.append(_span(stage, track_name, name, kind, now, now + length))
                now += length
    return spans


def step_trace(step: StepTime, plan: Plan, title: str) -> dict[str, object]:
    """Trace events for Perfetto and chrome://tracing."""
    trace = ChromeTrace()
    trace.process(title)
    places = {"compute": 0, "communication": 1}
    for stage in range(min(len(step.run.tasks), MOST_STAGES)):
        for name, place in places.items():
            trace.track(f"stage {stage}: {name}", 2 * stage + place)
    for span in step_events(step, plan):
        length = span["end"] - span["start"]
        track = 2 * span["stage"] + places[span["track"]]
        trace.span(span["name"], span["kind"], span["start"], length, track=track)
    return trace.to_dict()


def _span(
    stage: int, track: str, name: str, kind: str, start: float, end: float
) -> dict[str, object]:
    return {
        "stage": stage,
        "track": track,
        "name": name,
        "kind": kind,
        "start": start * 1e6,
        "end": end * 1e6,
    }
