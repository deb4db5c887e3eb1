"""Latencies of a training step's operators, from the operator model or the roofline.

On NVIDIA GPUs the model prices products and attention as PyTorch's and FlashAttention's kernels,
and memory passes as fused CUDA kernels. Other devices, and f32, get the roofline at the fractions
of peak and bandwidth that well-tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.operators.op import QUANTIZED, Op
from ...features.operators.physics import fitted
from ...models.gpu.attention import attention_key, flash_attention, lacks_bf16
from ...models.operators import OpModel
from ...models.power.caps import capped
from ...models.power.law import board_law
from ..locate import load_operators
from .prices import MATRIX_SHARE, REACH, Reach, Row, price, work_of

#: Format in operator tables by dtype of a workload.
TABLE_DTYPE = {"bf16": "bf16", "f16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
#: Families of the model that a step's operators belong to; the others need not be loaded.
FAMILIES = (
    "graph/linear",
    "graph/context_attention",
    "graph/encoder_attention",
    "graph/generation_attention",
    "graph/moe",
    "kernel/norm",
    "kernel/elementwise",
)
FIT = fitted("steps")
#: Time of FlashAttention-2 over that of the fused attention of the tables, by architecture.
FLASH2 = FIT.numbers("flash2")
#: Columns of the tensor that represents moved bytes.
_MOVED_COLS = 8192


class OperatorLatency:
    """Prices operators on one device.

    Args:
        spec: The device.
        model: Operator model; ``None`` for rooflines only.
        cap: Sustained power as a fraction of the device's limit.

    Attributes:
        scopes: Scope of the model (``known``, ``unseen`` …, or ``roofline``) by operator.
    """

    def __init__(self, spec: DeviceSpec, model: OpModel | None, cap: float = 1.0) -> None:
        self.spec, self.cap = spec, cap
        # The rows are CUDA kernels; another vendor's GPU has other libraries.
        self.model = model if spec.runs_cuda else None
        self.scopes: dict[Op, str] = {}

    def __call__(self, calls: Sequence[Op]) -> np.ndarray:
        """Return seconds with both bounds of the 90 % interval, shape ``(n, 3)``."""
        rows = [step_row(op, self.spec) if self.model else None for op in calls]
        reaches = [step_reach(op, self.spec) for op in calls]
        factors = np.array([stand_in_factor(op, self.spec) for op in calls])
        times, _, scopes = price(calls, rows, reaches, self.spec, self.model, factors)
        self.scopes.update(zip(calls, scopes, strict=True))
        if self.cap < 1.0 and len(calls):
            work = work_of(calls, times[:, 0], self.spec)
            times = capped(times, work, self.cap, board_law(self.spec))
        return times


def stand_in_factor(op: Op, spec: DeviceSpec) -> float:
    """Return the time of an operator over that of the row that stands for it."""
    if op.variant == QUANTIZED:
        # Narrow products in the tables include the quantization of their input, which a training
        # step does separately; so the 16-bit product is scaled by the ratio of the peaks.
        return min(1.0, spec.matrix_peak("bf16") / spec.matrix_peak(op.format.rate))
    # The rows are the tables' fastest kernels.
    return FLASH2.get(spec.architecture, 1.0) if op.variant == "flash2" else 1.0


#: The families of a model of operators that steps need; ``None`` for ``roofline``.
load_step_model = partial(load_operators, only=FAMILIES)


def step_reach(op: Op, spec: DeviceSpec) -> Reach:
    """Return what the kernels of an operator reach if no row stands for it."""
    vendor = REACH.get(spec.vendor) if spec.platform == "gpu" else None
    if vendor and op.family in ("linear", "bmm") and op.dtype in TABLE_DTYPE:
        return vendor.product
    return Reach(spec.floor, _matrix_share(op, spec))


def _matrix_share(op: Op, spec: DeviceSpec) -> float:
    """Return the fraction of the matrix peak that an operator's kernels reach."""
    if spec.platform != "tpu":
        return MATRIX_SHARE
    if op.family == "attention":
        sizes = op.sizes()
        # A product over a head fills head_dim rows of the systolic array.
        filled = min(1.0, sizes["head_dim"] / spec.array_rows) if spec.array_rows else 1.0
        return FIT.splash_share * filled * sizes["kv_len"] / (sizes["kv_len"] + FIT.splash_keys)
    return FIT.numbers("array_share").get(str(spec.array_rows), MATRIX_SHARE)


def step_row(op: Op, spec: DeviceSpec) -> Row | None:
    """Return the row that stands for an operator; ``None`` if no table has its format."""
    if op.dtype not in TABLE_DTYPE:
        return None
    sizes = op.sizes()
    dtype = "bf16" if op.variant == QUANTIZED else TABLE_DTYPE[op.dtype]
    # Chips before Ampere have tensor cores for f16 alone, which the tables call fp16.
    dtype = "fp16" if op.dtype == "f16" and lacks_bf16(spec) else dtype
    if op.family == "linear":
        # Kernel names of vLLM's measurements: cuBLAS behind PyTorch, CUTLASS for scaled fp8.
        narrow = dtype == "fp8"
        kernel = "CutlassFP8ScaledMMLinearKernel" if narrow else "torch.nn.functional.linear"
        return named("graph/linear", "vllm", kernel, dtype) | {"b": 1} | sizes
    if op.family == "attention":
        # No sliding window: the workloads have no such variant.
        row = named(attention_key(sizes)) | flash_attention(sizes, spec) | sizes | {"window": 0}
        return row | ({"dtype": "fp16", "kv_dtype": "fp16"} if dtype == "fp16" else {})
    if op.family == "moe":
        # TensorRT-LLM's CUTLASS grouped GEMM, which large token batches use; routing is balanced,
        # as an auxiliary loss trains it to be.
        row = named("graph/moe", "trtllm", "moe_torch_flow_cutlass", dtype)
        return row | {"distribution": "balanced"} | sizes
    # Memory passes were published in fp16 only; bf16 moves the same bytes.
    if op.family == "move":
        # An addition of that traffic: reads two tensors, writes one, two bytes per element.
        rows = max(1, round(sizes["bytes"] / (6 * _MOVED_COLS)))
        added = {"rows": rows, "cols": _MOVED_COLS, "n_in": 2}
        return named("kernel/elementwise", dtype="fp16") | added | {"op": "add"}
    family = "norm" if op.family.endswith("norm") else "elementwise"
    # The tables count input tensors; silu_and_mul reads one tensor of twice the width.
    inputs = 2 if op.family == "add" else 1
    pass_ = {"n_in": inputs, "op": op.family}
    return named(f"kernel/{family}", dtype="fp16") | sizes | pass_


def named(key: str, backend: str = "", kernel: str = "", dtype: str = "") -> dict[str, object]:
    """Return the columns of a row that identify its kernel."""
    name = key.split("/")[1]
    own = {"key": key, "family": name, "op": name, "backend": backend, "kernel": kernel}
    return {**own, "dtype": dtype, "kv_dtype": "", "distribution": ""}
