"""Library operators with family, sizes and formats; their FLOPs and bytes.

Steps, serving, PyTorch programs and published tables all describe operators and count their work
with the functions here. An addition and a multiplication count as one FLOP each, so a product of
``m × k`` by ``k × n`` is ``2 m n k``. Sizes may be numbers or arrays. Factors are multiplied from
left to right as written: products of whole numbers are exact below ``2**53``, so that a step and a
table agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from ...common.types import JsonMapping
from ..cost.formats import FORMATS, Format
from ..devices.device import DeviceSpec
from .routing import routed
from .schema import PARAMETERS

Size = TypeVar("Size", float, np.ndarray)

#: (inner width, experts per token, experts) of models without a gate, whose activation is a squared
#: ReLU: Nemotron 3 (``mlp_hidden_act`` in the configurations).
UNGATED = ((1856, 6, 128), (2688, 22, 512), (5120, 22, 512))

#: Part of the names of TensorRT-LLM's kernels for experts without a gate.
NO_GATE = "nongated"


class Family(NamedTuple):
    """Properties of a family of operators.

    Attributes:
        sizes: Names of the dimensions of an operator's shape.
        kind: ``product``, ``attention``, ``experts`` or ``memory`` (a pass over memory).
        launches: Kernels that an eager framework launches: the operator's kernel and the casts,
            copies and reshapes around it. Counted in eager PyTorch for a bf16 decoder layer: rotary
            positions alone are a dozen element-wise kernels; a mixture of experts sorts, permutes,
            counts and scatters.
        tensors: Tensors of ``rows × cols`` elements that a pass over memory touches.
    """

    sizes: tuple[str, ...]
    kind: str = "memory"
    launches: int = 2
    tensors: float = 2.0


_PASS = ("rows", "cols")
#: Attention has the heads of one rank; one causal query is a decode step. The shape of a
#: convolution is that of its implicit product, one per group. ``move`` is any operation that only
#: moves bytes.
OP_FAMILIES = {
    "linear": Family(("m", "n", "k"), "product"),
    "bmm": Family(("b", "m", "n", "k"), "product"),
    "conv": Family(("b", "m", "n", "k"), "product"),
    "attention": Family(
        tuple(n for n in PARAMETERS["attention"] if n != "window"), "attention", launches=4
    ),
    "moe": Family(PARAMETERS["moe"], "experts", launches=60),
    "rmsnorm": Family(_PASS),
    "layernorm": Family(_PASS),
    "softmax": Family(_PASS),
    "silu_and_mul": Family(_PASS, launches=3, tensors=1.5),
    "gelu": Family(_PASS),
    "rope": Family(_PASS, launches=8),
    "add": Family(_PASS, launches=1, tensors=3.0),
    "move": Family(("bytes",)),
}
#: Variants of latent attention whose work differs: keys and values of each head expanded from the
#: latent beforehand, or one latent for all heads whose values are part of its keys (DeepSeek-V2,
#: 2024, section 2.1.2).
EXPANDED, ABSORBED = "expanded", "absorbed"
#: Variant of products and experts whose operands are quantised by separate passes.
QUANTIZED = "quantized"
#: Variant of experts that receive rows already sorted by expert from other ranks.
DISPATCHED = "dispatched"


class Op(NamedTuple):
    """One operator on one device.

    Attributes:
        family: A key of :data:`OP_FAMILIES`.
        shape: Its sizes.
        dtype: Format of the weights, or of the arithmetic of attention and passes.
        scale: Ratio of its work and time to those of the operator of this shape, for backward
            passes of operators that are only measured forward.
        variant: Such as :data:`QUANTIZED`, :data:`ABSORBED`, or an attention library.
        name: Role in the model, such as ``qkv``.
        cache: Format of the KV cache; empty for that of the queries.
        window: Most tokens that attention sees; 0 for all.
        skew: Exponent of the expert load distribution (:func:`busy_rank`).
        traffic: Bytes moved where they do not follow from the shape; 0 where they do.
    """

    family: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    scale: float = 1.0
    variant: str = ""
    name: str = ""
    cache: str = ""
    window: int = 0
    skew: float = 0.0
    traffic: float = 0.0

    @property
    def kind(self) -> str:
        """``product``, ``attention``, ``experts`` or ``memory``."""
        return OP_FAMILIES[self.family].kind

    @property
    def launches(self) -> int:
        """Kernels that the host launches if nothing is compiled or captured."""
        return OP_FAMILIES[self.family].launches

    @property
    def format(self) -> Format:
        """Format of its operands."""
        return FORMATS[self.dtype]

    def sizes(self) -> dict[str, int]:
        """Return the shape by dimension name."""
        return dict(zip(OP_FAMILIES[self.family].sizes, self.shape, strict=True))

    def flops(self) -> float:
        """Return the matrix FLOPs, including ``scale``; passes over memory count as zero."""
        if self.kind == "product":
            return 2.0 * prod(self.shape) * self.scale
        if self.kind == "attention":
            batch, heads, _, keys, values, q_len, kv_len, causal = self.shape
            # Visible pairs only: fused attention skips blocks above the diagonal.
            pairs = visible_pairs(q_len, kv_len, self.window, bool(causal))
            return attention_flops(batch, heads, pairs, float(keys + values)) * self.scale
        if self.kind == "experts":
            tokens, hidden, inter, topk, _, tp, ep = self.shape
            # Gated experts have three matrices: 2 FLOPs each per weight and token.
            return expert_flops(tokens, topk, ep, hidden, inter, 6.0) / tp * self.scale
        return 0.0

    def moved(self) -> float:
        """Return the bytes that have to be read or written once, including ``scale``."""
        return (self.traffic or self._moved()) * self.scale

    def _moved(self) -> float:
        width = self.format.element_bytes
        if self.kind == "product":
            b, m, n, k = self.shape if len(self.shape) == 4 else (1, *self.shape)
            own = self.format
            return float(
                sum(product_bytes(b, m, n, k, own.weight_bytes, own.activation_bits / 8.0))
            )
        if self.kind == "attention":
            batch, heads, groups, keys, values, q_len, kv_len, _ = self.shape
            cached = (
                width
                if self.variant == EXPANDED
                else FORMATS[self.cache or self.dtype].element_bytes
            )
            stored = keys if self.variant == ABSORBED else keys + values
            read = min(kv_len, self.window + q_len) if self.window else kv_len
            # Queries and results, keys and values; fused attention keeps the scores on the chip.
            return batch * (
                width * heads * q_len * (keys + values) + cached * groups * read * stored
            )
        if self.kind == "experts":
            tokens, hidden, inter, topk, experts, tp, ep = self.shape
            rows, touched = routed(tokens, topk, experts, ep, self.skew)
            out = max(width, 2.0)
            return self.format.weight_bytes * 3.0 * touched * hidden * inter / tp + out * rows * (
                2.0 * hidden + 3.0 * inter / tp
            )
        if self.family == "move":
            return float(self.shape[0])
        return width * OP_FAMILIES[self.family].tensors * prod(self.shape)

    def least_s(self, spec: DeviceSpec) -> float:
        """Return the seconds of its arithmetic at the dense peak of its format, a lower bound."""
        return self.flops() / self.format.peak_on(spec)


def least_seconds(ops: Sequence[Op], spec: DeviceSpec) -> np.ndarray:
    """Return lower bounds on operators' times in seconds, shape ``(n,)``.

    The bound is the larger of FLOPs at the dense peak of the format and bytes (:func:`moving_s`).
    Convolutions by Winograd or Fourier transforms save multiplications, so only bytes bound them.
    """
    products = np.array([0.0 if op.family == "conv" else op.least_s(spec) for op in ops])
    return np.asarray(np.maximum(products, moving_s(np.array([op.moved() for op in ops]), spec)))


def moving_s(moved: np.ndarray, spec: DeviceSpec) -> np.ndarray:
    """Return a lower bound on the seconds to move bytes, shape ``(n,)``.

    On-chip memory may serve the bytes that fit there at its bandwidth, whichever kernel left them,
    and main memory the rest at the data sheet's. Beyond its capacity a cache retains less and less,
    and nothing from twice its capacity on, since each pass evicts what the next one needs. Of
    850,000 published rows, 205 are below the bound by up to 5 %, and 88 attention rows by more.
    """
    near, rate = spec.cache_bytes, max(level.bandwidth for level in spec.levels)
    if spec.platform == "tpu":
        # Data that the compiler keeps in VMEM may never be moved, however much else there is.
        near, rate = max(near, spec.core_count * spec.shared_bytes_per_core), np.inf
        kept = np.minimum(moved, near)
    else:
        kept = np.minimum(moved, np.clip(2.0 * near - moved, 0.0, near))
    return np.asarray((moved - kept) / spec.bandwidth + kept / rate)


def product_bytes(
    b: Size, m: Size, n: Size, k: Size, weight: Size, activation: Size
) -> tuple[Size, Size, Size]:
    """Return the bytes of weights, activations and result of ``b`` products.

    Args:
        b: Number of products.
        m: Rows of the activations.
        n: Columns of the weights.
        k: Depth.
        weight: Bytes per weight.
        activation: Bytes per activation.
    """
    # Frameworks let 8- and 4-bit products return 16 bits for the next layer.
    out = np.maximum(activation, 2.0)
    return b * n * k * weight, b * m * k * activation, b * m * n * out


def visible_pairs(q_len: float, kv_len: float, window: float = 0.0, causal: bool = True) -> float:
    """Count the (query, key) pairs of attention over the last ``q_len`` of ``kv_len`` positions.

    Causal query ``i`` sees ``kv_len - q_len + 1 + i`` keys, at most ``window`` (0: no window). The
    sum grows arithmetically until the window is reached and is constant afterwards.
    """
    reach = min(window or kv_len, kv_len)
    if not causal:
        return float(q_len) * reach
    first = kv_len - q_len + 1
    growing = min(max(reach - first + 1, 0), q_len)
    return growing * (first + (growing - 1) / 2) + (q_len - growing) * reach


def attention_flops(batch: Size, heads: Size, pairs: Size, width: Size) -> Size:
    """Return the FLOPs of the two products of attention, ``2 · batch · heads · pairs · width``.

    Softmax is excluded: its exponentials run on special-function units.

    Args:
        batch: Sequences.
        heads: Query heads.
        pairs: Computed (query, key) pairs per head.
        width: Elements of a key and a value together.
    """
    # The order of factors is part of the contract (exact whole numbers, see the module docstring).
    flops: Size = 2 * batch * heads * pairs * width
    return flops


def expert_flops(
    tokens: Size, topk: Size, ep: Size, hidden: Size, inner: Size, per_weight: float
) -> Size:
    """Return the FLOPs of one rank's share of the routed (token, expert) pairs.

    Args:
        tokens: Tokens of all ranks.
        topk: Experts per token.
        ep: Ranks that the experts are spread over.
        hidden: Width of the model.
        inner: Width of an expert.
        per_weight: FLOPs per entry of a ``hidden × inner`` matrix over an expert's matrices: 2 per
            matrix, of which a gated expert has three.
    """
    # Division by ep after the exact product of whole numbers, for the same reason.
    flops: Size = per_weight * tokens * topk / ep * hidden * inner
    return flops


def ungated(inner: float, topk: float, experts: float, kernel: str) -> bool:
    """Return whether an expert has two matrices instead of three.

    The names of TensorRT-LLM's kernels show it. Where other libraries call them (``trtllm`` in the
    name), it follows from the model's sizes. Other kernels are always estimated as gated: some
    compute a gate even for these models, and the learned operator models correct for it.

    Args:
        inner: Width of an expert.
        topk: Experts per token.
        experts: Experts of the layer.
        kernel: Name of the kernel, empty if unknown.
    """
    known = (inner, topk, experts) in UNGATED
    return NO_GATE in kernel or (known and "trtllm" in kernel)


def op_flops(params: JsonMapping) -> float:
    """Count the FLOPs of one execution from the result of :func:`read_op`; 0 for other operators.

    Products count two FLOPs per pair of operands, gradients of convolutions as many as the
    convolution, including padding. Attention counts two products over the visible pairs of queries
    and keys, experts their two or three matrices over every routed row.
    """
    if "trans_a" in params:
        return float(2 * params["b"] * params["m"] * params["n"] * params["k"])
    if "stride_h" in params:
        return _convolution(params)
    if "head_dim" in params:
        one = params["causal"] and not params["family"].startswith("generation")
        pairs = visible_pairs(params["q_len"], params["kv_len"], params["window"], one)
        width = params["head_dim"] + params["v_head_dim"]
        return float(attention_flops(params["batch"], params["q_heads"], pairs, width))
    if "topk" in params:
        rows = params["tokens"] * params["topk"] / params["ep"]
        # A gated expert has gate, up and down projections, others only up and down.
        sizes = params["inter"], params["topk"], params["experts"]
        matrices = 2 if ungated(*sizes, params.get("kernel", "")) else 3
        return float(2 * rows * params["hidden"] * params["inter"] / params["tp"] * matrices)
    return 0.0


def _convolution(params: JsonMapping) -> float:
    taps, places = 1, 1
    for axis in "dhw":
        reach = (params[f"k{axis}"] - 1) * params[f"dil_{axis}"] + 1
        inside = params[axis] + 2 * params[f"pad_{axis}"]
        places *= max((inside - reach) // params[f"stride_{axis}"] + 1, 1)
        taps *= params[f"k{axis}"]
    pairs = params["c"] * params["k"] / params["groups"]
    return float(2 * params["n"] * places * taps * pairs)
