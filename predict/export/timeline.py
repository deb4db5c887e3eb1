"""Chrome traces of predicted schedules, for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.chrome_trace import ChromeTrace, free_tracks, write_trace
from ...common.types import JsonObject
from ...simulate.step.compose import StepTime
from ...simulate.step.pipeline import BACKWARD, FORWARD, NAMES, WEIGHTS
from ...simulate.step.plan import Plan
from ..cluster.serving_prediction import ServingPrediction
from ..program.predictor import KernelEstimate, Prediction

if TYPE_CHECKING:
    from ..cluster.partitioned import PartitionedPrediction
    from ..operator.torch_price import AtenEstimate, TorchPrediction


def chrome_trace(prediction: Prediction | TorchPrediction) -> dict[str, object]:
    """Return the trace of a prediction, with kernels in schedule order on one track.

    Kernels are scaled so that the last one ends at the predicted program time: gaps and overlap are
    spread over all of them.
    """
    total = sum(k.total_us for k in prediction.kernels) or 1.0
    scale = prediction.latency_us / total
    trace = ChromeTrace()
    if isinstance(prediction, Prediction):
        how = f"{prediction.model}, {prediction.lowering}"
    else:
        how = prediction.framework
    trace.process(f"{prediction.device} ({how})")
    trace.track("kernels", 0)
    now = 0.0
    for k in prediction.kernels:
        trace.span(k.name, k.kind, now, k.total_us * scale, details=_details(k))
        now += k.total_us * scale
    return trace.to_dict()


def _details(k: KernelEstimate | AtenEstimate) -> dict[str, object]:
    own: dict[str, object] = {"latency_us": k.latency_us, "source": k.source}
    if isinstance(k, KernelEstimate):
        own |= {"runs": k.multiplicity, "bound": k.bound}
    else:
        own |= {"shape": list(k.shape), "dtype": k.dtype, "phase": k.phase, "module": k.module}
    return {**own, "from": f"{k.what} {k.source_line}".strip()}


def stream_trace(prediction: PartitionedPrediction) -> dict[str, object]:
    """Return the Chrome trace of one device: computation, and communication in parallel."""
    trace = ChromeTrace()
    trace.process(f"{prediction.device} of {prediction.cluster}")
    for track, name in enumerate(("compute", "communication")):
        trace.track(name, track)
    critical = set(prediction.run.critical)
    for place, node in enumerate(prediction.nodes):
        start, end = prediction.run.start[place] * 1e6, prediction.run.end[place] * 1e6
        if end <= start:
            continue
        own = node.collective
        details: dict[str, object] = {"critical": place in critical, "runs": node.times}
        if own is not None:
            details |= {"bytes": own.size, "devices": len(own.group)}
        trace.span(
            node.name,
            own.kind if own else node.opcode,
            start,
            end - start,
            track=int(own is not None),
            details=details,
        )
    return trace.to_dict()


def write_chrome_trace(prediction: Prediction | TorchPrediction, path: Path) -> None:
    """Write the trace as JSON."""
    write_trace(chrome_trace(prediction), path)


#: Maximum spans of passes and of requests. Later ones are omitted, which the name of the trace's
#: process states. Engineering estimate of what viewers can draw.
MOST_SPANS = 50_000


def serving_trace(prediction: ServingPrediction) -> dict[str, object]:
    """Return the trace of a serving prediction; times in microseconds.

    Every engine is a process with its passes, and counters of batch, queue and cache. The requests
    are another process; each takes the first free track, waiting until its first token and then
    decoding. Requests have the predicted latencies, passes the engines' simulated times; those of a
    closed loop are scaled so that both end together.
    """
    trace = ChromeTrace()
    engines = prediction.deployment.engine.count
    scale = prediction.clock * 1e6
    for number, history in enumerate(prediction.run.histories):
        role = "engine" if number < engines else "prefill worker"
        trace.process(f"{role} {number if number < engines else number - engines}", number)
        trace.track("passes", 0, number)
        for at in range(min(len(history.time), MOST_SPANS)):
            end, batch, chunk = history.time[at], history.batch[at], history.chunk[at]
            name = f"prompts, {chunk} tokens" if chunk else f"{history.passes[at]} x decode"
            trace.span(
                name,
                "prefill" if chunk else "decode",
                (end - history.spans[at]) * scale,
                history.spans[at] * scale,
                process=number,
                details={"batch": batch, "waiting": history.waiting[at]},
            )
            values = {"batch": batch, "queue": history.waiting[at]}
            trace.counter("requests", end * scale, values, number)
            trace.counter("cache", end * scale, {"tokens": round(history.held[at])}, number)
    _requests(trace, prediction, len(prediction.run.histories))
    return trace.to_dict()


def _requests(trace: ChromeTrace, prediction: ServingPrediction, process: int) -> None:
    seen, counts = prediction.seen, prediction.load.counts
    begin = prediction.run.sent * prediction.clock
    shown = min(len(begin), MOST_SPANS // 2)
    left = len(begin) - shown
    trace.process("requests" + (f", {left} later ones omitted" if left else ""), process)
    order = np.argsort(begin, kind="stable")[:shown]
    tracks = free_tracks(begin[order].tolist(), (begin + seen.e2e)[order].tolist())
    for index, track in zip(order.tolist(), tracks, strict=True):
        sent, first, whole = (float(a[index]) * 1e6 for a in (begin, seen.ttft, seen.e2e))
        details = {
            "prompt": int(prediction.load.prompts[index]),
            "output": int(prediction.load.outputs[index]),
        }
        if counts[index] != 1.0:
            details["stands_for"] = int(counts[index])
        options = {"track": track, "process": process, "details": details}
        trace.span(f"{index} first token", "ttft", sent, first, **options)  # type: ignore[arg-type]
        trace.span(f"{index} decode", "decode", sent + first, whole - first, **options)  # type: ignore[arg-type]


#: Maximum stages with a track, from the first on (engineering choice, for the size of the trace).
MOST_STAGES = 64


def step_events(step: StepTime, plan: Plan) -> list[JsonObject]:
    """Return spans of a step: ``stage``, ``track``, ``name``, ``kind``, ``start`` and ``end`` (us).

    A task's exposed communication is drawn at its end; its position within the task is unknown.
    """
    spans: list[dict[str, object]] = []
    for stage, track in enumerate(step.run.tasks[:MOST_STAGES]):
        times = step.stages[stage]
        parts = {FORWARD: times.forward, BACKWARD: times.backward, WEIGHTS: times.weights}
        for task, start, end in track:
            part = parts[task.kind]
            # The split of the stage's mean task applies to every task.
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
    """Return the trace of a step."""
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
