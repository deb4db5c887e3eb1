"""Write a predicted schedule as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...common.chrome_trace import ChromeTrace, write_trace
from ..program.predictor import KernelEstimate, Prediction

if TYPE_CHECKING:
    from ..cluster.partitioned import PartitionedPrediction
    from ..operator.torch_framework import AtenEstimate, TorchPrediction


def chrome_trace(prediction: Prediction | TorchPrediction) -> dict[str, object]:
    """Trace events of a prediction, kernels in schedule order on one track.

    Kernels are scaled so that the last one ends at the predicted program time: gaps between
    kernels, and overlap, are spread over all of them.
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
    """Chrome trace of one device: computation, and communication beside it."""
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
