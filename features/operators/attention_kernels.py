"""Costs of libraries' attention kernels by kernel class.

The constants are in section ``attention`` of ``fitted.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .columns import OpTable
from .machine import Machine
from .physics import fitted

#: Classes of TensorRT-LLM's dedicated kernels, and of all its kernels.
MADE = ("trt-made", "trt-generated")
TENSORRT = ("trt", *MADE)


class AttentionKernel(NamedTuple):
    """Costs of a class of kernels.

    Attributes:
        prefill_floor, decode_floor: Factors on the fixed cost of a kernel in seconds.
        prefill_block, decode_block: Cycles of a thread block in addition to its arithmetic.
        products: Fraction of the matrix peak reached by the two products of a prefill tile.
        exponential: Fraction of the time of exponentials that products do not hide.
        merge: Factor on the seconds to merge the splits of a decode.
        rate: Factor on the bytes per cycle that a core streams in a decode.
        stream: Factor on the memory time of a decode.
        converted: Equivalent bytes of an fp8 key inside a core, where it is converted.
        fp8_cache: Factor on the fixed cost of a decode from an fp8 cache.
        rows: Fewest rows of a product in a decode; the heads of a group are its rows.
    """

    prefill_floor: float
    decode_floor: float
    prefill_block: float
    decode_block: float
    products: float
    exponential: float
    merge: float
    rate: float
    stream: float
    converted: float
    fp8_cache: float
    rows: float


FIT = fitted("attention")
#: Costs by kernel class.
KERNELS = {name: AttentionKernel(**{**FIT.values, **FIT.numbers(name)}) for name in FIT.tables}
_ORDER = tuple(KERNELS)


class RowKernels:
    """The class of kernel that runs each of ``n`` rows, and its costs."""

    def __init__(self, table: OpTable) -> None:
        """Classify the rows of a table."""
        heads, groups = table.numbers("q_heads", "kv_heads")
        repeat = heads / groups
        made = table.is_on(lambda d: d.rules.asynchronous)
        names_made = table.mentions("kernel", "trtllm")
        flashinfer = table.mentions("kernel", "flashinfer", "fiprefill", "fidecode")
        # On data-centre Blackwell, vLLM's FlashInfer calls TensorRT-LLM's kernels by default
        # (use_trtllm_attention in its source), unless the name states which kernel was chosen.
        vllm = table.is_("backend", "vllm")
        blackwell = table.is_on(lambda d: d.rules.paired_cores)
        said = table.mentions("kernel", "fiprefill", "fidecode")
        names_made |= vllm & flashinfer & blackwell & ~said
        # TensorRT-LLM can call FlashInfer's kernels; their name then shows it.
        trt = names_made | (table.is_("backend", "trtllm") & ~flashinfer)
        flash = table.mentions("kernel", "fa2", "flash_attn", "flash_attention")
        # SGLang's build of FlashAttention 3 also runs on older chips, as a different kernel.
        sglang = table.is_("backend", "sglang") & (flash | table.mentions("kernel", "fa3"))
        third = table.mentions("kernel", "fa3", "fa4", "attention_v3") | (sglang & made)
        third &= ~sglang | made
        # vLLM uses FlashAttention 3 by default on Hopper only (get_flash_attn_version in its
        # source); releases before 0.24 do not name it.
        hopper = table.is_on(lambda d: d.rules.warp_groups)
        third |= flash & hopper & vllm & ~table.mentions("kernel", "fa2")
        plain = table.is_("backend", "sglang") & (repeat < 4) & ~table.is_("kv_dtype", "fp8")
        rules = (
            ("triton", table.mentions("kernel", "triton")),
            ("trt-generated", names_made & blackwell),
            ("trt-made", trt & made),
            ("trt", trt),
            ("flash-3", third),
            ("flashinfer-plain", plain & table.mentions("kernel", "flashinfer")),
            ("flashinfer", flashinfer),
            ("flash-sglang", sglang),
            ("flash-2", flash),
        )
        conditions = [is_it for _, is_it in rules]
        codes = [_ORDER.index(name) for name, _ in rules]
        self.code = np.select(conditions, codes, _ORDER.index("other"))
        self.made = made
        self.whole_keys = table.is_on(lambda d: d.rules.whole_keys)
        self.foreign = table.is_on(lambda d: not d.runs_cuda)

    def __call__(self, cost: str) -> np.ndarray:
        """Return one of the costs of :class:`AttentionKernel` by row, shape ``(n,)``."""
        costs = np.array([getattr(KERNELS[name], cost) for name in _ORDER], np.float64)
        return np.asarray(costs[self.code])

    def is_(self, *names: str) -> np.ndarray:
        """Return which rows belong to any of the classes, bool, shape ``(n,)``."""
        return np.isin(self.code, [_ORDER.index(name) for name in names])

    def padded(self, width: np.ndarray) -> np.ndarray:
        """Return the head widths that kernels compute with, shape ``(n,)``.

        FlashAttention has kernels for multiples of 32, and of 64 above 128. Tiles of Triton and of
        TensorRT-LLM's dedicated kernels are powers of two, except the latter's 192.
        """
        flash = np.where(width <= 128, np.ceil(width / 32) * 32, np.ceil(width / 64) * 64)
        power = np.exp2(np.ceil(np.log2(np.maximum(width, 1))))
        made = np.where(width == 192, width, power)
        sixteen = np.ceil(width / 16) * 16
        cases = [self.is_("triton"), self.is_(*MADE), self.is_("trt")]
        return np.asarray(np.select(cases, [power, made, sixteen], flash))


@dataclass(slots=True)
class Attention:
    """Attention of ``n`` rows as arrays of shape ``(n,)``; times in seconds."""

    table: OpTable
    mc: Machine
    peak: np.ndarray
    batch: np.ndarray
    heads: np.ndarray
    groups: np.ndarray
    d_key: np.ndarray
    d_value: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray
    window: np.ndarray
    keys: np.ndarray
    pairs: np.ndarray
    flops: np.ndarray
    kv_width: np.ndarray
    resident: np.ndarray
    t_memory: np.ndarray
    trt: np.ndarray
    kernel: RowKernels

    @property
    def repeat(self) -> np.ndarray:
        """Query heads that share keys."""
        return np.asarray(self.heads / self.groups)


class Tiles(NamedTuple):
    """How the work is split: blocks and splits, and their costs in seconds.

    Tiles, blocks and memory traffic overlap (``t_both``); ``t_extra`` and ``floor`` are added.
    """

    blocks: np.ndarray
    split: np.ndarray
    t_tiles: np.ndarray
    t_blocks: np.ndarray
    t_both: np.ndarray
    t_extra: np.ndarray
    floor: np.ndarray
