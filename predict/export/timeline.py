"""Write a predicted schedule as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from ...common.chrome_trace import ChromeTrace, write_trace
from ..program.predictor import Prediction


def chrome_trace(prediction: Prediction) -> dict[str, object]:
    """Trace events of a prediction, kernels in schedule order on one track.

    Kernels are scaled so that the last one ends at the predicted program time: gaps between
    kernels, and overlap, are spread over all of them.
    """
    total = sum(k.total_us for k in prediction.kernels) or 1.0
    scale = prediction.latency_us / total
    trace = ChromeTrace()
    trace.process(f"{prediction.device} ({prediction.model}, {prediction.lowering})")
    trace.track("kernels", 0)
    now = 0.0
    for k in prediction.kernels:
        details = {
            "latency_us": k.latency_us,
            "runs": k.multiplicity,
            "bound": k.bound,
            "source": k.source,
            "from": f"{k.source_op} {k.source_line}".strip(),
        }
        trace.span(k.name, k.kind, now, k.total_us * scale, details=details)
        now += k.total_us * scale
    return trace.to_dict()


def write_chrome_trace(prediction: Prediction, path: Path) -> None:
    """Write the trace as JSON."""
    write_trace(chrome_trace(prediction), path)
