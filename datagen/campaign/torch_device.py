"""PyTorch on a GPU: synchronisation, memory, CUDA graphs, kernels of a trace."""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from ...common.types import JsonObject
from ...common.versions import installed

#: One call of the measured code; its result is waited for.
Step = Callable[[], object]
#: Steps before a graph is captured, on a separate stream, and steps under the profiler.
_WARM, _TRACED = 3, 3


def device() -> str:
    """The measured device, by PyTorch's name."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait(value: object = None) -> object:
    """Wait for everything that was launched; returns the value."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return value


def release() -> None:
    """Free what a case left: compiled code, tensors in cycles, and PyTorch's memory cache."""
    # Dynamo compiles a function at most 8 times, and then silently runs it eagerly; the ``forward``
    # of a module class is one function for all its models.
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe() -> JsonObject:
    """Device and versions of this process."""
    found: JsonObject = {
        "platform": "gpu" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "python": platform.python_version(),
        "device_count": torch.cuda.device_count(),
    }
    found |= installed(("triton", "timm", "transformers", "torchvision", "diffusers"))
    if torch.cuda.is_available():
        own = torch.cuda.get_device_properties(0)
        found |= {
            "device_kind": own.name,
            "memory_bytes": own.total_memory,
            "multiprocessors": own.multi_processor_count,
            "cache_bytes": getattr(own, "L2_cache_size", 0),
            "capability": f"{own.major}.{own.minor}",
            "arch": getattr(own, "gcnArchName", ""),
            "cudnn": torch.backends.cudnn.version() or 0,
        }
    else:
        found["device_kind"] = platform.processor() or platform.machine()
        found["no_accelerator"] = _no_accelerator()
    return found


def _no_accelerator() -> str:
    if not (torch.version.cuda or torch.version.hip):
        return "built without CUDA and ROCm"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "the driver lists no device"


def captured(step: Step) -> Step:
    """Capture a step as a CUDA graph; returns its replay.

    As in PyTorch's notes on CUDA semantics ("Whole-network capture"): some steps on another stream
    first, then the capture, which keeps gradients in its private memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


def peak(step: Step) -> JsonObject:
    """Peak bytes that a step allocates and that PyTorch reserves; empty on a CPU.

    A replayed graph allocates nothing: its memory is reserved.
    """
    if not torch.cuda.is_available():
        return {}
    wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    wait(step())
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def kernels(key: str, step: Step, steps: int = _TRACED) -> list[JsonObject]:
    """Operators with a row of a table, and all kernels by name, from a trace of some steps.

    Empty on a CPU; a note if tracing fails.
    """
    if not torch.cuda.is_available():
        return []
    try:
        return _kernels(key, step, steps)
    except Exception as error:  # no permission to trace, NumPy is missing, an unknown trace format
        text = f"no kernels: {type(error).__name__}: {error}"
        return [{"table": "notes", "key": key, "text": text}]


def _kernels(key: str, step: Step, steps: int) -> list[JsonObject]:
    from ..traces.aten import traced_operators
    from ..traces.kineto import read_kineto

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            step()
        wait()
    with tempfile.TemporaryDirectory(prefix="opcast-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for d in read_kineto(path).devices for e in d.executed.events]
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append((event.end - event.start) * 1e-3)
    found: list[JsonObject] = [
        {"table": "kernels", "key": key, "name": name, "steps": steps, "us": us}
        for name, us in times.items()
    ]
    for operator in traced_operators(events):
        if operator.row:
            us = [s * 1e6 for s in operator.seconds]
            row = {"table": "operators", "key": key, "row": json.dumps(operator.row), "us": us}
            found.append(row | {"kernels": sorted(operator.kernels)})
    return found
