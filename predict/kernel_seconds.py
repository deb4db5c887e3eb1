"""Seconds of compiled kernels on a device that only a model of library operators knows.

Products are asked for as library calls, passes over memory by their traffic; what is neither
(convolutions, sorts, batched products) takes its roofline and the device's floor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..features._columns import INDEX
from ..features._row import rows
from ..features.device import DeviceSpec
from ..features.kernel import Kernel
from ..features.roofline import roofline_of_rows
from ..models.ops import OpModel
from ..simulate.step.calls import OpCall
from .op_calls import MATRIX_SHARE, ROOFLINE_FACTOR, OperatorLatency

#: Dtypes of workloads by HLO's.
_DTYPE = {"bf16": "bf16", "f16": "f16", "f8e4m3fn": "fp8", "f8e5m2": "fp8"}
#: Kinds whose time is that of their traffic.
_PASSES = ("fusion", "reduce", "copy", "gather_scatter")
#: A pass does not move less than this many bytes: below, the launch counts.
_LEAST = 4096


def operator_seconds(
    kernels: Sequence[Kernel], spec: DeviceSpec, model: OpModel | None
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one execution with both ends of the interval, and who says so.

    Args:
        kernels: ``n`` kernels; collectives and control count nothing.
        spec: The device.
        model: Model of library operators; ``None`` for rooflines.

    Returns:
        Shape ``(n, 3)``, and shape ``(n,)``: ``learned``, ``roofline``, or empty.
    """
    if not kernels:
        return np.zeros((0, 3)), np.zeros(0, object)
    table = rows(kernels)
    bound = roofline_of_rows(table, spec)
    middle = np.maximum(bound.compute_s / MATRIX_SHARE, bound.memory_s) + spec.floor
    found = np.stack([middle, middle / ROOFLINE_FACTOR, middle * ROOFLINE_FACTOR], axis=1)
    source = np.full(len(kernels), "roofline", object)
    latency = OperatorLatency(spec, model)
    calls = {i: _call(k, table[i]) for i, k in enumerate(kernels)}
    asked = {i: call for i, call in calls.items() if call is not None}
    if latency.model is not None and asked:
        unique = list(dict.fromkeys(asked.values()))
        said = dict(zip(unique, latency(unique), strict=True))
        for i, call in asked.items():
            found[i] = np.maximum(said[call], bound.latency_s[i])
            source[i] = "learned"
    free = np.array([k.kind in ("collective", "control") or not k.takes_time for k in kernels])
    found[free], source[free] = 0.0, ""
    return found, source


def _call(kernel: Kernel, row: np.ndarray) -> OpCall | None:
    """The library call that a kernel is like."""
    if kernel.kind == "gemm" and row[INDEX["gemm_batch"]] <= 1 and kernel.dtype in _DTYPE:
        m, n, k = (int(max(1, row[INDEX[f"gemm_{c}"]])) for c in "mnk")
        return OpCall("product", "linear", (m, n, k), _DTYPE[kernel.dtype])
    if kernel.kind in _PASSES:
        return OpCall("pass", "move", (max(_LEAST, int(kernel.bytes)),))
    return None
