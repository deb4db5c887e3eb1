"""The timeline of a simulated service as a Chrome trace: passes of engines, and requests."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from ...common.chrome_trace import ChromeTrace
from ..cluster.serving import ServingPrediction

#: Most spans of passes and of requests; what comes later is left out, and the name of the trace's
#: process states it. Engineering estimate of what viewers still draw.
MOST_SPANS = 50_000


def serving_trace(prediction: ServingPrediction) -> dict[str, object]:
    """Make the trace; times in microseconds.

    Every engine is a process with its passes, and counters of batch, queue and cache; the requests
    are one more, each on the first track that is free, waiting until its first token and decoding.
    """
    trace = ChromeTrace()
    engines = prediction.deployment.engine.count
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
                (end - history.spans[at]) * 1e6,
                history.spans[at] * 1e6,
                process=number,
                details={"batch": batch, "waiting": history.waiting[at]},
            )
            values = {"batch": batch, "queue": history.waiting[at]}
            trace.counter("requests", end * 1e6, values, number)
            trace.counter("cache", end * 1e6, {"tokens": round(history.held[at])}, number)
    _requests(trace, prediction, len(prediction.run.histories))
    return trace.to_dict()


def _requests(trace: ChromeTrace, prediction: ServingPrediction, process: int) -> None:
    run = prediction.run
    shown = min(len(run.sent), MOST_SPANS // 2)
    left = len(run.sent) - shown
    trace.process("requests" + (f", {left} later ones left out" if left else ""), process)
    busy: list[tuple[float, int]] = []
    tracks = 0
    for index in np.argsort(run.sent, kind="stable")[:shown].tolist():
        if busy and busy[0][0] <= run.sent[index]:
            track = heappop(busy)[1]
        else:
            track, tracks = tracks, tracks + 1
        heappush(busy, (float(run.finished[index]), track))
        sent, first, end = (float(a[index]) * 1e6 for a in (run.sent, run.first, run.finished))
        details = {
            "prompt": int(prediction.load.prompts[index]),
            "output": int(prediction.load.outputs[index]),
        }
        options = {"track": track, "process": process, "details": details}
        trace.span(f"{index} first token", "ttft", sent, first - sent, **options)  # type: ignore[arg-type]
        trace.span(f"{index} decode", "decode", first, end - first, **options)  # type: ignore[arg-type]
