"""Latencies of a served decoder's operators: kernels of its framework, or the roofline.

The model of library operators knows the kernels that vLLM, SGLang and TensorRT-LLM run; what it
does not know (formats, other vendors' devices) gets the roofline at the shares that the vendor's
tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.ir.dtypes import DTYPE_BITS
from ...features.operators.op import ABSORBED, EXPANDED, Op
from ...models.operators import OpModel
from ..locate import find_model
from .prices import REACH, Reach, Row, arithmetic_share, price, weight_only
from .step_operators import named

#: Families of the model that serving asks; the others need not be read.
FAMILIES = (
    "graph/linear",
    "graph/bmm",
    "graph/context_attention",
    "graph/generation_attention",
    "graph/context_mla",
    "graph/generation_mla",
    "graph/moe",
)
#: Backends of the tables by framework; another framework's kernels are taken for vLLM's.
BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
#: Kernels by backend and format, as the tables name them.
_LINEAR = {
    ("vllm", "bf16"): "torch.nn.functional.linear",
    ("vllm", "fp8"): "CutlassFP8ScaledMMLinearKernel",
    ("vllm", "nvfp4"): "FlashInferCutlassNvFp4LinearKernel",
    ("sglang", "bf16"): "sglang_torch_linear",
    ("sglang", "fp8"): "sglang_sgl_kernel_fp8_scaled_mm",
    ("sglang", "fp8_block"): "sglang_deepgemm_gemm_nt_f8f8bf16",
    ("sglang", "nvfp4"): "sglang_flashinfer_cutlass_nvfp4",
    ("trtllm", "bf16"): "torch_flow",
    ("trtllm", "fp8"): "torch_flow",
    ("trtllm", "fp8_block"): "torch_flow",
    ("trtllm", "nvfp4"): "torch_flow",
}
#: vLLM's FlashInfer experts in fp8 are left out: on Hopper they were measured at a tenth of the
#: memory's rate, which no serving run shows.
_MOE = {
    ("vllm", "bf16"): "vllm_unquantizedfusedmoe_triton_tritonexperts",
    ("vllm", "fp8_block"): "vllm_fp8moe_triton_tritonexperts",
    ("vllm", "int4"): "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts",
    ("vllm", "mxfp4"): "vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic",
    ("vllm", "nvfp4"): "vllm_compressedtensorsw4a4nvfp4moe_flashinfer_cutlass_flashinferexperts",
    ("sglang", "bf16"): "sglang_fused_moe_triton",
    ("sglang", "fp8_block"): "sglang_fused_moe_triton",
    ("sglang", "int4"): "sglang_marlin_moe",
    ("sglang", "mxfp4"): "sglang_fused_moe_triton",
    ("sglang", "nvfp4"): "sglang_flashinfer_cutlass_moe",
    ("trtllm", "bf16"): "moe_torch_flow_cutlass",
    ("trtllm", "fp8"): "moe_torch_flow_cutlass",
    ("trtllm", "fp8_block"): "moe_torch_flow_cutlass",
    ("trtllm", "mxfp4"): "moe_torch_flow",
    ("trtllm", "nvfp4"): "moe_torch_flow_cutlass",
}
#: Formats, as the tables name them, of experts of which vLLM's passes take as long as if tokens
#: reached all of them, and draws of each expert at which the tables show them reached. Qwen3 235B
#: under vLLM 0.12 takes 51 to 58 ms on two H200 and 34 to 37 on four, with 4 requests as with 48;
#: Kimi-K2 and Qwen3-Coder 480B are slower likewise (published-serving pack).
_ALL_EXPERTS, _REACHING = ("fp8", "fp8_block"), 4.0
#: Distribution of tokens over experts of the tables that serving runs show (``ROUTING_SKEW``).
ROUTING = "power_law_1.2"
#: Kernels of a captured graph are replayed, so that the roofline's fixed cost of a kernel is what
#: one waits for the next, not a launch: as the tables' passes over memory, half of a graph-timed
#: product's 5200 cycles (docs/operators.md).
_REPLAYED = Reach(1.5e-6)
#: Names of formats in the tables.
_TABLE_DTYPE = {"int4": "int4_wo", "mxfp4": "w4a16_mxfp4", "f16": "bf16"}
#: Format that stands for another in a kernel's table where the table lacks it.
_STANDS_FOR = {"fp8_block": "fp8", "fp8": "fp8_block", "int8": "fp8"}


def load_serving_operators(model: str) -> OpModel | None:
    """The families of a model of operators that serving needs; ``None`` for ``roofline``.

    Raises:
        ModelError: There is no such model, or it is of another kind.
    """
    return None if model == "roofline" else OpModel.load(find_model(model), only=FAMILIES)


class ServingLatency:
    """Prices operators of one framework on one device; answers are remembered.

    Args:
        spec: The device.
        model: Model of library operators; ``None`` for rooflines.
        framework: Such as ``vllm``.
    """

    def __init__(self, spec: DeviceSpec, model: OpModel | None, framework: str) -> None:
        self.spec = spec
        self.backend = BACKENDS.get(framework, "vllm")
        self.model = model if spec.runs_cuda else None
        self._known: dict[Op, float] = {}

    def prepare(self, ops: Sequence[Op]) -> None:
        """Ask for many operators at once."""
        new = [op for op in dict.fromkeys(ops) if op not in self._known]
        if not new:
            return
        rows = [self._row(op) if self.model else None for op in new]
        vendor = REACH.get(self.spec.vendor)
        reaches = [vendor.of(op) if vendor else _REPLAYED for op in new]
        times = price(new, rows, reaches, self.spec, self.model).times[:, 0]
        self._known.update(zip(new, times.tolist(), strict=True))

    def __call__(self, op: Op) -> float:
        """Seconds of an operator."""
        if op not in self._known:
            self.prepare([op])
        return self._known[op]

    def arithmetic(self, op: Op) -> float:
        """Share of arithmetic in the roofline of an operator; the rest is moving its bytes."""
        return arithmetic_share(op, self.spec)

    def _kernel(self, table: dict[tuple[str, str], str], dtype: str) -> tuple[str, str, str] | None:
        """Backend, kernel and format in the tables that an operator is looked up as."""
        if dtype == "nvfp4" and weight_only(dtype, self.spec):
            # As Marlin's kernels widen weights of 4 bits of either kind.
            dtype = "int4"
        if _peakless(dtype, self.spec):
            # Without units of its format, a product runs on widened operands.
            return None
        for name in (dtype, _STANDS_FOR.get(dtype, dtype)):
            for backend in (self.backend, "trtllm", "sglang", "vllm"):
                if (backend, name) in table:
                    return backend, table[backend, name], _TABLE_DTYPE.get(name, name)
        return None

    def _row(self, op: Op) -> Row | None:
        """Row for the model of operators; ``None`` for what it does not know."""
        sizes = op.sizes()
        dtype = "bf16" if op.dtype == "f16" else op.dtype
        if op.family == "linear":
            found = self._kernel(_LINEAR, dtype)
            return found and {**sizes, **named("graph/linear", *found), "b": 1}
        if op.family == "moe":
            found = self._kernel(_MOE, dtype)
            if self.backend == "vllm" and found and found[2] in _ALL_EXPERTS:
                reached = ceil(_REACHING * sizes["experts"] / sizes["topk"])
                sizes["tokens"] = max(sizes["tokens"], reached)
            return found and {**sizes, **named("graph/moe", *found), "distribution": ROUTING}
        if op.family == "bmm":
            kernel = {"vllm": "vllm_torch_bmm", "sglang": "sglang_torch_bmm"}
            name = kernel.get(self.backend, "trtllm_bmm_out")
            return {**sizes, **named("graph/bmm", self.backend, name, "bf16")}
        return self._attention(op) if op.family == "attention" else None

    def _attention(self, op: Op) -> Row:
        hopper = self.spec.architecture == "hopper"
        latent = op.variant in (ABSORBED, EXPANDED)
        sizes = op.sizes()
        if latent:
            backend, kernel = ("trtllm", "default")
            if self.backend == "sglang" and hopper:
                backend, kernel = ("sglang", "flash_attention")
        elif self.backend == "trtllm":
            backend, kernel = ("trtllm", "torch_flow")
        elif self.backend == "sglang" and hopper:
            backend, kernel = ("sglang", "fa3")
        elif self.backend == "sglang":
            backend, kernel = ("sglang", "flash_attention")
        else:
            backend, kernel = ("vllm", "vllm_flash_attn_fa3" if hopper else "vllm_flash_attn_fa2")
        phase = "generation" if sizes["q_len"] == 1 else "context"
        key = f"graph/{phase}_{'mla' if latent else 'attention'}"
        cache = "fp8" if op.cache in ("fp8", "int8") else "bf16"
        columns = named(key, backend, kernel, "bf16") | {"kv_dtype": cache, "window": op.window}
        return sizes | columns


def _peakless(dtype: str, spec: DeviceSpec) -> bool:
    """Whether a device has no units for a format that is multiplied as it is."""
    unit = FORMATS[dtype].rate
    return DTYPE_BITS[unit] < 16 and unit not in spec.peak_flops
