"""A predicted schedule as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..features.files import write_text
from .predictor import Prediction


def chrome_trace(prediction: Prediction) -> dict[str, Any]:
    """Trace events of a prediction, kernels in schedule order on one track.

    The kernels are scaled so that the last one ends at the predicted program time: what lies
    between kernels, or overlaps, is spread over them.
    """
    total = sum(k.total_us for k in prediction.kernels) or 1.0
    scale = prediction.latency_us / total
    events: list[dict[str, Any]] = []
    now = 0.0
    for k in prediction.kernels:
        length = k.total_us * scale
        events.append({
            "name": k.name, "cat": k.kind, "ph": "X", "pid": 0, "tid": 0, "ts": now, "dur": length,
            "args": {
                "latency_us": k.latency_us, "runs": k.multiplicity, "bound": k.bound,
                "source": k.source, "from": f"{k.source_op} {k.source_line}".strip(),
            },
        })  # fmt: skip
        now += length
    names = [{
        "name": "process_name", "ph": "M", "pid": 0,
        "args": {"name": f"{prediction.device} ({prediction.model}, {prediction.lowering})"},
    }]  # fmt: skip
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def write_chrome_trace(prediction: Prediction, path: Path) -> None:
    """Write the trace as JSON."""
    write_text(path, json.dumps(chrome_trace(prediction)))
