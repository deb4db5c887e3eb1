"""Latencies of a step's operators: from the model of library operators, or from the roofline.

On NVIDIA GPUs, the model prices products and attention as PyTorch's and FlashAttention's kernels,
and passes over memory as fused CUDA kernels. Other devices, and f32, get the roofline at the
shares of peak and bandwidth that well-tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...models.gpu.attention import attention_key, flash_attention, lacks_bf16
from ...models.operators import OpModel
from ...models.power.law import Work, capped
from ...simulate.step.calls import SHAPES, OpCall
from ..locate import find_model

#: Shares of the matrix peak and of the memory bandwidth that the roofline assumes where nothing was
#: learned. Engineering estimates; not fitted.
MATRIX_SHARE, MEMORY_SHARE = 0.7, 0.85
#: Kernels of a decoding pass are replayed from a captured graph, so that the roofline's fixed cost
#: of a kernel is what one waits for the next, not a launch: as the tables' passes over memory, half
#: of a graph-timed product's 5200 cycles (docs/operators.md).
_GAP = 1.5e-6


class Reach(NamedTuple):
    """What a vendor's kernels reach, where no model of operators knows them.

    Attributes:
        gap: Fixed seconds of a kernel.
        experts: Fixed seconds of a layer's experts.
        matrix: Share of the matrix peak.
        scaled: The same of operands with scales for blocks.
        memory: Share of the memory's bandwidth.
        beside: Whether arithmetic hides behind memory, or the reverse; otherwise both add up.
    """

    gap: float = _GAP
    experts: float = _GAP
    matrix: float = MATRIX_SHARE
    scaled: float = MATRIX_SHARE
    memory: float = MEMORY_SHARE
    beside: bool = True

    def seconds(
        self, flops: np.ndarray, moved: np.ndarray, peak: np.ndarray, bandwidth: float
    ) -> np.ndarray:
        """Times of products of plain formats, seconds, shape ``(n,)``."""
        work, stream = flops / (peak * self.matrix), moved / (bandwidth * self.memory)
        return np.asarray((np.maximum(work, stream) if self.beside else work + stream) + self.gap)


#: Fitted to tuned products and fused experts of aiter and to XLA's products on MI300X and MI308X
#: (published-kernels pack, gemm and attention_moe: 23,000 rows, bins of equal work counting the
#: same): fixed 3 to 9 us, 0.49 to 0.56 of the peak, 0.36 to 0.43 with block scales, 0.5 to 0.9 of
#: the bandwidth; of experts 16 to 24 us, 0.48 to 0.50, 0.37 and 0.58 to 0.65. Sums fit better than
#: maxima by a tenth. Fitted to MI308X alone, the 713 bf16 rows of the MI300X err by 16 % (mean),
#: with these constants by 13 %, at 0.7 of the peak by 52 %.
REACH = {"AMD": Reach(6e-6, 20e-6, 0.5, 0.38, 0.62, beside=False)}
#: Share of the matrix peak that products reach on TPUs, by rows of the systolic array: what libtpu
#: 0.0.42 estimates for a product of 8192 × 8192 × 28672 in bf16 (v4 93 %, v5e 88, v5p 90; v6e 71,
#: whose arrays outrun their registers).
_ARRAY_SHARE = {128: 0.9, 256: 0.71}
#: Share of the matrix peak that fused attention reaches on TPUs over long sequences, with heads as
#: wide as the array, and the keys at which half of that is reached. Tokamax's tables have 50 %
#: (v5p) and 25 % (v6e, heads of 128 on arrays of 256) at 8,192 keys; blocks tuned for training do
#: better, so the share is between theirs and that of products (engineering estimate).
_SPLASH_SHARE, _SPLASH_KEYS = 0.78, 900.0
#: Half-width of the roofline's interval, as a factor either way. Engineering estimate; not fitted.
ROOFLINE_FACTOR = 1.6
#: Dtypes that operator tables hold, by dtype of a workload.
TABLE_DTYPE = {"bf16": "bf16", "f16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
#: Families of the model that operators of a step belong to; the others need not be read.
FAMILIES = (
    "graph/linear",
    "graph/context_attention",
    "graph/encoder_attention",
    "graph/generation_attention",
    "graph/moe",
    "kernel/norm",
    "kernel/elementwise",
)
#: Time of FlashAttention-2 over that of the fused attention of the tables, by architecture: it uses
#: neither asynchronous copies nor Hopper's group products (Shah et al., FlashAttention-3, 2024,
#: figure 5: 35 against 60 % of the peak and less; for Blackwell an engineering estimate).
FLASH2 = {"hopper": 1.65, "blackwell": 2.2, "blackwell-ultra": 2.2}
#: Columns of the tensor that stands for moved bytes: an addition reads two and writes one.
_MOVED_COLS = 8192


class OperatorLatency:
    """Prices operators on one device.

    Args:
        spec: The device.
        model: Model of library operators; ``None`` for the roofline throughout.
        cap: Sustained power as a share of the device's limit.

    Attributes:
        scopes: Scope of the model (``known``, ``unseen`` …, or ``roofline``) by operator.
    """

    def __init__(self, spec: DeviceSpec, model: OpModel | None, cap: float = 1.0) -> None:
        self.spec, self.cap = spec, cap
        # The rows name CUDA kernels; on another vendor's GPU they would describe libraries that it
        # lacks.
        self.model = model if spec.runs_cuda else None
        self.scopes: dict[OpCall, str] = {}
        if self.model is not None and spec.name not in self.model.devices:
            self.model.devices[spec.name] = spec

    def __call__(self, calls: Sequence[OpCall]) -> np.ndarray:
        """Return seconds and both ends of the 90 % interval, shape ``(n, 3)``."""
        # Everything gets the roofline first; what the model knows is then overwritten.
        times = roofline_seconds(calls, self.spec)
        scope = np.full(len(calls), "roofline", object)
        if self.model is not None:
            at = [i for i, c in enumerate(calls) if c.dtype in TABLE_DTYPE]
            if at:
                rows = pd.DataFrame([op_row(calls[i], self.spec) for i in at])
                said = self.model.predict(rows)
                # ``scale`` prices a backward pass as a multiple of the forward kernel that was
                # measured.
                scale = np.array([calls[i].scale for i in at])
                scale = scale * [self._narrower(calls[i]) for i in at]
                scale = scale * [self._older(calls[i]) for i in at]
                times[at] = np.stack([said.latency, said.lo, said.hi], axis=1) * scale[:, None]
                scope[at] = said.scope
        self.scopes.update(zip(calls, map(str, scope), strict=True))
        if self.cap < 1.0 and len(calls):
            times = capped(times, work_of(calls, times[:, 0], self.spec), self.cap)
        return times

    def _older(self, call: OpCall) -> float:
        """Time of attention by FlashAttention-2 over that of the tables' fastest kernel."""
        if call.variant != "flash2":
            return 1.0
        return FLASH2.get(self.spec.architecture, 1.0)

    def _narrower(self, call: OpCall) -> float:
        """Time of a product over that of the type in the tables that stands for its own."""
        if call.variant != "quantized":
            return 1.0
        # Products of narrow types in the tables quantise their input within the time, which a
        # training step does apart: so the product in 16 bits, at the ratio of the rates.
        own = self.spec.matrix_peak(FORMATS[call.dtype].rate)
        return min(1.0, self.spec.matrix_peak("bf16") / own)


def work_of(calls: Sequence[OpCall], seconds: np.ndarray, spec: DeviceSpec) -> Work:
    """How busy operators keep a device's units.

    Args:
        calls: ``n`` operators.
        seconds: Time of one execution of each, shape ``(n,)``.
        spec: The device.
    """
    return Work.of(
        np.array([call.flops() for call in calls]),
        np.array([call.moved(FORMATS[call.dtype].element_bytes) for call in calls]),
        seconds,
        np.full(len(calls), spec.floor),
        np.array([spec.matrix_peak(FORMATS[c.dtype].rate) for c in calls]),
        spec.bandwidth,
        np.array([call.kind == "attention" for call in calls], bool),
    )


def load_step_model(model: str | Path) -> OpModel | None:
    """Load the families of an operator model that steps need; ``None`` for ``roofline``.

    Raises:
        ModelError: There is no such model, or it is of another kind.
    """
    if str(model) == "roofline":
        return None
    return OpModel.load(find_model(model), only=FAMILIES)


def roofline_seconds(calls: Sequence[OpCall], spec: DeviceSpec) -> np.ndarray:
    """Estimate operators by the roofline: seconds and interval ends, shape ``(n, 3)``."""
    flops = np.array([c.flops() for c in calls])
    moved = np.array([c.moved(FORMATS[c.dtype].element_bytes) for c in calls])
    peak = np.array([spec.matrix_peak(FORMATS[c.dtype].rate) for c in calls])
    share = np.array([_matrix_share(c, spec) for c in calls])
    middle = np.maximum(flops / (peak * share), moved / (spec.bandwidth * MEMORY_SHARE))
    # Added rather than a third bound: the launch precedes the work.
    middle = middle + spec.floor
    if spec.platform == "gpu" and spec.vendor in REACH:
        at = [c.op == "linear" and c.dtype in TABLE_DTYPE for c in calls]
        known = REACH[spec.vendor].seconds(flops, moved, peak, spec.bandwidth)
        middle = np.where(at, known, middle)
    return np.stack([middle, middle / ROOFLINE_FACTOR, middle * ROOFLINE_FACTOR], axis=1)


def _matrix_share(call: OpCall, spec: DeviceSpec) -> float:
    """Share of the matrix peak that the kernels of an operator reach."""
    if spec.platform != "tpu":
        return MATRIX_SHARE
    if call.op == "attention":
        head, keys = call.shape[3], call.shape[5]
        # Products over a head fill as many rows of the array, and no more.
        filled = min(1.0, head / spec.array_rows) if spec.array_rows else 1.0
        return _SPLASH_SHARE * filled * keys / (keys + _SPLASH_KEYS)
    return _ARRAY_SHARE.get(spec.array_rows, MATRIX_SHARE)


def op_row(call: OpCall, spec: DeviceSpec) -> dict[str, Any]:
    """Convert an operator to a row for :meth:`OpModel.predict`; ``scale`` is left out."""
    sizes: dict[str, Any] = dict(zip(SHAPES[call.op], call.shape, strict=True))
    dtype = "bf16" if call.variant == "quantized" else TABLE_DTYPE[call.dtype]
    # Chips before Ampere have tensor cores for f16 alone, which the tables call fp16.
    row: dict[str, Any] = {
        "device": spec.name,
        "dtype": "fp16" if call.dtype == "f16" and lacks_bf16(spec) else dtype,
    }
    if call.op == "linear":
        # The kernels that vLLM's measurements name: cuBLAS behind PyTorch, CUTLASS for scaled fp8.
        kernel = "torch.nn.functional.linear"
        if row["dtype"] == "fp8":
            kernel = "CutlassFP8ScaledMMLinearKernel"
        return {**row, **_table("graph/linear", "vllm", kernel), "b": 1, **sizes}
    if call.op == "attention":
        columns = _attention(sizes, spec)
        if row["dtype"] == "fp16":
            columns |= {"dtype": "fp16", "kv_dtype": "fp16"}
        return {**row, **columns}
    if call.op == "decode":
        return {**row, **_attention({**sizes, "q_len": 1, "causal": 1}, spec)}
    if call.op == "moe":
        # TensorRT-LLM's CUTLASS grouped GEMM, which large batches of tokens run as; balanced
        # routing is what an auxiliary loss trains for.
        experts = _table("graph/moe", "trtllm", "moe_torch_flow_cutlass")
        return {**row, **experts, "distribution": "balanced", **sizes}
    # Passes over memory were published in fp16 only; bf16 moves the same bytes.
    return {**row, "dtype": "fp16", **_pass(call, sizes)}


def _table(key: str, backend: str = "", kernel: str = "") -> dict[str, Any]:
    name = key.split("/")[1]
    return {"key": key, "family": name, "op": name, "backend": backend, "kernel": kernel}


def _attention(sizes: dict[str, Any], spec: DeviceSpec) -> dict[str, object]:
    columns = {**_table(attention_key(sizes)), **flash_attention(sizes, spec)}
    # Values as wide as keys, and no sliding window: the workloads have neither variant.
    return {**columns, **sizes, "v_head_dim": sizes["head_dim"], "window": 0}


def _pass(call: OpCall, sizes: dict[str, Any]) -> dict[str, object]:
    if call.op == "move":
        # An addition of that traffic: three tensors of two bytes an element, hence six.
        rows = max(1, round(sizes["bytes"] / (6 * _MOVED_COLS)))
        shape = {"rows": rows, "cols": _MOVED_COLS, "n_in": 2}
        return {**_table("kernel/elementwise"), **shape, "op": "add"}
    family = "norm" if call.op.endswith("norm") else "elementwise"
    # The tables count input tensors; silu_and_mul reads one tensor, of twice the width.
    inputs = 2 if call.op == "add" else 1
    return {**_table(f"kernel/{family}"), **sizes, "n_in": inputs, "op": call.op}
