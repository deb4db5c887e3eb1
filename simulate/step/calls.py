"""Calls: operators that a device runs and collectives that it takes part in, given by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...features.operators.flops import attention_flops, causal_pairs, expert_flops
from .plan import Group

#: Parameters of an operator by kind; ``move`` stands for anything that only moves bytes.
SHAPES = {
    "linear": ("m", "n", "k"),
    "attention": ("batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len", "causal"),
    "decode": ("batch", "q_heads", "kv_heads", "head_dim", "kv_len"),
    "moe": ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep"),
    "rmsnorm": ("rows", "cols"),
    "layernorm": ("rows", "cols"),
    "silu_and_mul": ("rows", "cols"),
    "gelu": ("rows", "cols"),
    "rope": ("rows", "cols"),
    "add": ("rows", "cols"),
    "move": ("bytes",),
}
#: Kernels that a framework launches for an operator when it runs line by line: its own, and the
#: casts, copies and reshapes around it. Counted in eager PyTorch for a bf16 decoder layer: rotary
#: positions alone are a dozen element-wise kernels; a mixture of experts sorts, permutes, counts
#: and scatters.
_LAUNCHES = {
    "linear": 2,
    "attention": 4,
    "decode": 4,
    "moe": 60,
    "rmsnorm": 2,
    "layernorm": 2,
    "silu_and_mul": 3,
    "gelu": 2,
    "rope": 8,
    "add": 1,
    "move": 2,
}
#: Class of an operator in :class:`~.costs.StepEffects`; the rest are passes over memory.
_KIND = {"linear": "product", "attention": "attention", "decode": "attention", "moe": "experts"}
#: Tensors of ``rows × cols`` that a pass over memory touches.
_TENSORS = {
    "rmsnorm": 2.0,
    "layernorm": 2.0,
    "silu_and_mul": 1.5,
    "gelu": 2.0,
    "rope": 2.0,
    "add": 3.0,
}


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator of a device.

    Attributes:
        name: Its role in the model, such as ``qkv``.
        op: A key of :data:`SHAPES`.
        shape: Its parameters.
        dtype: Element type.
        scale: Its time over that of the operator of this shape: backward passes of operators that
            are only known forward.
        variant: Of attention, as :attr:`~.workload.Workload.attention`; ``quantized`` for products
            whose operands were quantised by passes of their own.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    scale: float = 1.0
    variant: str = ""

    @property
    def kind(self) -> str:
        """``product``, ``attention``, ``experts`` or ``memory``."""
        return _KIND.get(self.op, "memory")

    @property
    def launches(self) -> int:
        """Kernels that the host launches where nothing is compiled or captured."""
        return _LAUNCHES[self.op]

    def flops(self) -> float:
        """Return the matrix FLOPs, ``scale`` included; passes over memory count as none."""
        if self.op == "linear":
            m, n, k = self.shape
            return 2.0 * m * n * k * self.scale
        if self.op == "attention":
            batch, heads, _, dim, q_len, kv_len, causal = self.shape
            # Visible pairs alone: flash attention skips blocks above the diagonal.
            pairs = causal_pairs(q_len, kv_len) if causal else float(q_len) * kv_len
            return attention_flops(batch, heads, pairs, 2.0 * dim) * self.scale
        if self.op == "decode":
            batch, heads, _, dim, kv_len = self.shape
            return attention_flops(batch, heads, kv_len, 2.0 * dim) * self.scale
        if self.op == "moe":
            tokens, hidden, inter, topk, _, tp, ep = self.shape
            # Gated experts have three matrices: 2 FLOPs each per weight and token.
            return expert_flops(tokens, topk, ep, hidden, inter, 6.0) / tp * self.scale
        return 0.0

    def moved(self, width: float) -> float:
        """Bytes that have to be read or written once, ``scale`` included.

        Args:
            width: Bytes of an element.
        """
        if self.op == "move":
            return float(self.shape[0]) * self.scale
        if self.op == "linear":
            m, n, k = self.shape
            return float(width) * (m * n + m * k + n * k) * self.scale
        if self.op == "attention":
            batch, heads, groups, dim, q_len, kv_len, _ = self.shape
            # Queries and results, keys and values; fused attention keeps the scores on the chip.
            rows = 2 * heads * q_len + 2 * groups * kv_len
            return float(width) * batch * dim * rows * self.scale
        if self.op == "decode":
            batch, heads, groups, dim, kv_len = self.shape
            # One query row per head; reading the cache dominates.
            return float(width) * batch * dim * (2 * heads + 2 * groups * kv_len) * self.scale
        if self.op == "moe":
            tokens, hidden, inter, topk, experts, tp, ep = self.shape
            # All resident experts are read: with a real batch each of them gets some token.
            weights = 3.0 * experts / ep * hidden * inter / tp
            return (
                width * (weights + tokens * topk / ep * (2 * hidden + 3 * inter / tp)) * self.scale
            )
        rows, cols = self.shape
        return width * _TENSORS[self.op] * rows * cols * self.scale


@dataclass(frozen=True, slots=True)
class CommCall:
    """One collective that a device takes part in.

    Attributes:
        name: Its purpose, such as ``tensor``.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``alltoall`` or ``send_recv``.
        size: Bytes as nccl-tests counts them: the buffer of an all-reduce or transfer, the full
            buffer of a gather or scatter, one device's send buffer of an all-to-all.
        group: Devices that take part.
        times: How often.
        copies: Of an all-to-all that sends each token to several experts: to how many.
        boxes: Most boxes that these lie in; 0 for any number.
    """

    name: str
    kind: str
    size: float
    group: Group
    times: float = 1.0
    copies: int = 1
    boxes: int = 0

    def across(self, box: int) -> float:
        """Share of the bytes that cross from box to box where a box gets each token once.

        Dispatchers send a token once to every box that needs it and copy it inside (DeepSeek-V3
        2024, section 3.2.2). ``copies`` drawn from ``b`` boxes meet ``b (1 - (1 - 1/b)^copies)`` of
        them, and routing limited to some boxes draws from these alone (section 2.1.2).

        Args:
            box: Devices of a box.
        """
        boxes = -(-self.group.size * self.group.stride // box)
        if self.copies <= 1 or boxes <= 1:
            return 1.0
        drawn = min(boxes, self.boxes or boxes)
        return drawn * (1.0 - (1.0 - 1.0 / drawn) ** self.copies) / self.copies

    @property
    def needed(self) -> bool:
        """Whether any bytes are sent."""
        return self.group.size > 1 and self.size > 0 and self.times > 0


class Estimate(NamedTuple):
    """Seconds, with both ends of a 90 % interval."""

    seconds: float
    lo: float
    hi: float

    def times(self, factor: float) -> Estimate:
        """Return the estimate with all three values multiplied."""
        return Estimate(self.seconds * factor, self.lo * factor, self.hi * factor)


class OpLatency(Protocol):
    """Latencies of operators on the device of interest."""

    def __call__(self, calls: Sequence[OpCall]) -> np.ndarray:
        """Seconds and both ends of the interval, shape ``(n, 3)``."""


class Network(Protocol):
    """Latencies of collectives in the cluster of interest."""

    def __call__(self, kind: str, size: float, group: Group) -> Estimate:
        """Time of one collective; ``size`` as in :class:`CommCall`."""
