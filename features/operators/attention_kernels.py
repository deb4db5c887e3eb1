"""What libraries' attention kernels cost, by the class of kernel that runs a row.

Their constants are in the section ``attention`` of ``fitted.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .columns import OpTable
from .machine import Machine
from .physics import fitted

#: Architectures that libraries have attention kernels made for: asynchronous copies and matrix
#: instructions of the data-centre chips from Hopper on.
MADE_FOR = ("hopper", "blackwell", "blackwell-ultra")
#: Architectures that TensorRT-LLM has generated kernels for, which other libraries call by way of
#: FlashInfer ("trtllm-gen": ``trtllm_mha`` and ``trtllm_mla`` in SGLang).
GENERATED = ("blackwell", "blackwell-ultra")
#: Classes of TensorRT-LLM's kernels that were made for a chip, and of all of its kernels.
MADE = ("trt-made", "trt-generated")
TENSORRT = ("trt", *MADE)
#: Architectures on which TensorRT-LLM's grouped decode does not split the keys of an fp8 cache.
WHOLE_KEYS = ("blackwell-gb20x",)


class AttentionKernel(NamedTuple):
    """Costs of a class of kernels.

    Attributes:
        prefill_floor, decode_floor: Factors on the seconds of a kernel without work.
        prefill_block, decode_block: Cycles that a thread block costs besides its arithmetic.
        products: Share of the matrix peak that the two products of a prefill tile reach.
        exponential: Share of the time of the exponentials that products do not hide.
        merge: Factor on the seconds to merge the parts of a split decode.
        rate: Factor on the bytes that a core streams in a cycle of a decode.
        stream: Factor on the time of the memory in a decode.
        converted: Bytes that an fp8 key costs in a core, as it is converted.
        fp8_cache: Factor on the floor of a decode from an fp8 cache.
        rows: Rows of the smallest product in a decode; the heads of a group are its rows.
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
#: By class.
KERNELS = {name: AttentionKernel(**{**FIT.values, **FIT.numbers(name)}) for name in FIT.tables}
_ORDER = tuple(KERNELS)


class RowKernels:
    """The class of kernel of each of ``n`` rows, and its costs."""

    def __init__(self, table: OpTable) -> None:
        """Tell the classes of a table's rows."""
        heads, groups = table.numbers("q_heads", "kv_heads")
        repeat = heads / groups
        made = table.is_on(lambda d: d.architecture in MADE_FOR)
        names_made = table.says("kernel", "trtllm")
        flashinfer = table.says("kernel", "flashinfer", "fiprefill", "fidecode")
        # vLLM's FlashInfer calls the kernels that TensorRT-LLM has for data-centre Blackwell on its
        # own accord (use_trtllm_attention in its source), unless the name says which it took.
        vllm = table.is_("backend", "vllm")
        blackwell = table.is_on(lambda d: d.architecture in GENERATED)
        said = table.says("kernel", "fiprefill", "fidecode")
        names_made |= vllm & flashinfer & blackwell & ~said
        # TensorRT-LLM can call FlashInfer's kernels, and names them then.
        trt = names_made | (table.is_("backend", "trtllm") & ~flashinfer)
        flash = table.says("kernel", "fa2", "flash_attn", "flash_attention")
        # SGLang's build of FlashAttention 3 runs on older chips, too, where it is another kernel.
        sglang = table.is_("backend", "sglang") & (flash | table.says("kernel", "fa3"))
        third = table.says("kernel", "fa3", "fa4", "attention_v3") | (sglang & made)
        third &= ~sglang | made
        # vLLM takes the third on Hopper alone where it is told no other (get_flash_attn_version in
        # its source); releases before 0.24 do not name it.
        hopper = table.is_on(lambda d: d.architecture == "hopper")
        third |= flash & hopper & vllm & ~table.says("kernel", "fa2")
        plain = table.is_("backend", "sglang") & (repeat < 4) & ~table.is_("kv_dtype", "fp8")
        rules = (
            ("triton", table.says("kernel", "triton")),
            ("trt-generated", names_made & blackwell),
            ("trt-made", trt & made),
            ("trt", trt),
            ("flash-3", third),
            ("flashinfer-plain", plain & table.says("kernel", "flashinfer")),
            ("flashinfer", flashinfer),
            ("flash-sglang", sglang),
            ("flash-2", flash),
        )
        conditions = [is_it for _, is_it in rules]
        codes = [_ORDER.index(name) for name, _ in rules]
        self.code = np.select(conditions, codes, _ORDER.index("other"))
        self.made = made
        self.whole_keys = table.is_on(lambda d: d.architecture in WHOLE_KEYS)
        self.foreign = table.is_on(lambda d: not d.runs_cuda)

    def __call__(self, cost: str) -> np.ndarray:
        """Return one of the costs of :class:`AttentionKernel` by row, shape ``(n,)``."""
        costs = np.array([getattr(KERNELS[name], cost) for name in _ORDER], np.float64)
        return np.asarray(costs[self.code])

    def is_(self, *names: str) -> np.ndarray:
        """Return the rows of some classes, bool, shape ``(n,)``."""
        return np.isin(self.code, [_ORDER.index(name) for name in names])

    def padded(self, width: np.ndarray) -> np.ndarray:
        """Return the widths of heads that kernels compute with, shape ``(n,)``.

        FlashAttention has kernels for multiples of 32, and of 64 from 128 on; Triton's tiles and
        those of TensorRT-LLM's made kernels are powers of two, but for the latter's 192.
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
    """How the work is cut: blocks, their splits, and what all that costs in seconds.

    Tiles, blocks and memory overlap (``t_both``); what comes before or after is added.
    """

    blocks: np.ndarray
    split: np.ndarray
    t_tiles: np.ndarray
    t_blocks: np.ndarray
    t_both: np.ndarray
    t_extra: np.ndarray
    floor: np.ndarray
