"""What libraries' attention kernels cost, by the class of kernel that runs a row.

Constants are least-squares fits to rows of split ``train`` of the tensor-core pack on A100, H100,
H200 and RTX PRO 6000, each class and chip with equal weight, rounded. What they carry over to a
chip that is left out of the fit, too: docs/operators.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .columns import Machine, OpTable
from .physics import non_nvidia

#: Architectures that libraries have attention kernels made for: asynchronous copies and matrix
#: instructions of the data-centre chips from Hopper on.
MADE_FOR = ("hopper", "blackwell", "blackwell-ultra")


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

    prefill_floor: float = 1.0
    decode_floor: float = 1.0
    prefill_block: float = 6200.0
    decode_block: float = 4600.0
    products: float = 0.8
    exponential: float = 1.0
    merge: float = 1.0
    rate: float = 1.0
    stream: float = 0.92
    converted: float = 1.8
    fp8_cache: float = 1.3
    rows: float = 16.0


#: By class. FlashAttention-3 hides exponentials of one tile behind products of another (Shah et
#: al., 2024). FlashAttention's tiles have 64 rows at least, others' those of a matrix instruction.
KERNELS: dict[str, AttentionKernel] = {
    "flash-2": AttentionKernel(
        prefill_floor=0.6, decode_block=6200.0, merge=1.8, rate=0.8, rows=64.0
    ),
    "flash-3": AttentionKernel(
        decode_floor=1.6, prefill_block=8400.0, decode_block=6000.0, exponential=0.7, merge=0.75,
        rate=1.15, rows=64.0,
    ),
    "flashinfer": AttentionKernel(decode_floor=0.5, decode_block=4400.0, merge=0.63, fp8_cache=1.8),
    # SGLang on chips before Hopper.
    "flash-sglang": AttentionKernel(
        prefill_floor=1.6, decode_floor=1.4, merge=2.3, stream=1.6, rows=64.0
    ),
    "triton": AttentionKernel(
        prefill_floor=0.6, prefill_block=13_000.0, decode_block=3700.0, products=0.39,
        fp8_cache=1.05,
    ),
    "trt": AttentionKernel(
        prefill_floor=1.8, decode_floor=1.3, prefill_block=3700.0, decode_block=2800.0,
        products=0.55, merge=1.3, rate=0.8, converted=1.3, fp8_cache=0.9,
    ),
    "trt-made": AttentionKernel(
        prefill_floor=1.65, decode_floor=1.3, prefill_block=8300.0, decode_block=2800.0, merge=1.3,
        rate=0.8, converted=1.3, fp8_cache=0.9,
    ),
    "other": AttentionKernel(),
}  # fmt: skip
_ORDER = tuple(KERNELS)

#: Latent keys of an absorbed head (512 and 64 rotary elements) and their values, the first 512
#: (DeepSeek-V2, 2024).
LATENT_KEYS, LATENT_VALUES = 576, 512
#: TensorRT-LLM where no latent kernel was made for the chip: two blocks for 64 heads of a sequence,
#: each with half of the values, walk all keys in tiles of 64. Cycles of a block besides them, those
#: of a key besides products and bytes, and bytes of keys in a cycle: read off A100 in bf16 (170
#: cycles a key) and RTX PRO 6000 in both formats (206 and 136).
WHOLE_HEADS, WHOLE_TILE, WHOLE_BLOCK, WHOLE_KEY, WHOLE_RATE = 64.0, 64.0, 2800.0, 60.0, 25.0
#: Its seconds and cycles without work; and the time of two blocks on a core, over that of one after
#: the other, where the queries of both fit into its memory (A100 0.69 at up to 19 blocks a core).
WHOLE_S, WHOLE_FLOOR, PAIRED = 2e-6, 5000.0, 0.69
#: Triton's latent decode in SGLang: a block for 16 heads of a sequence, each reading the keys for
#: itself; at least eight splits, the more the longer the keys beyond 8192; cycles of a core for all
#: splits of a block, whose partial results are written in float32, and of a lone split's key. Read
#: off RTX PRO 6000, the only chip with such rows.
TRITON_HEADS, TRITON_SPLITS, TRITON_KEYS, TRITON_MORE = 16.0, 8.0, 8192.0, 0.7
TRITON_BLOCK, TRITON_KEY, TRITON_S = 233_000.0, 128.0, 14e-6


class RowKernels:
    """The class of kernel of each of ``n`` rows, and its costs."""

    def __init__(self, table: OpTable) -> None:
        """Tell the classes of a table's rows."""
        made = table.of_device([float(d.architecture in MADE_FOR) for d in table.devices]) > 0
        trt = table.is_("backend", "trtllm")
        flash = table.says("kernel", "fa2", "flash_attn", "flash_attention")
        sglang = table.is_("backend", "sglang") & flash
        third = table.says("kernel", "fa3", "fa4", "attention_v3") | (sglang & made)
        rules = (
            ("triton", table.says("kernel", "triton")),
            ("trt-made", trt & made),
            ("trt", trt),
            ("flash-3", third),
            ("flashinfer", table.says("kernel", "flashinfer", "fiprefill", "fidecode")),
            ("flash-sglang", sglang),
            ("flash-2", flash),
        )
        conditions = [is_it for _, is_it in rules]
        codes = [_ORDER.index(name) for name, _ in rules]
        self.code = np.select(conditions, codes, _ORDER.index("other"))
        self.made = made
        self.foreign = non_nvidia(table) > 0

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
        cases = [self.is_("triton"), self.is_("trt-made"), self.is_("trt")]
        return np.asarray(np.select(cases, [power, made, sixteen], flash))


class LatentBlocks(NamedTuple):
    """How libraries cut a latent decode on chips that they made no kernel for, ``(n,)`` each.

    Attributes:
        known: Rows of such a kernel.
        cycles: Cycles of the core that is busy longest.
        passes: Times that the keys are read.
        floor_s: Seconds without work.
    """

    known: np.ndarray
    cycles: np.ndarray
    passes: np.ndarray
    floor_s: np.ndarray

    @classmethod
    def of(
        cls,
        table: OpTable,
        kernel: RowKernels,
        batch: np.ndarray,
        heads: np.ndarray,
        keys: np.ndarray,
        machine: Machine,
    ) -> LatentBlocks:
        """Cut the latent decodes of a table's rows over their devices' cores."""
        whole, triton = kernel.is_("trt"), kernel.is_("triton")
        by_head = np.ceil(heads / TRITON_HEADS)
        splits = TRITON_SPLITS * np.maximum(keys / TRITON_KEYS, 1.0) ** TRITON_MORE
        parts = batch * by_head / machine.cores * TRITON_BLOCK + keys / splits * TRITON_KEY
        return cls(
            whole | triton,
            np.where(whole, _whole_keys(table, batch, heads, keys, machine), parts),
            np.where(triton, by_head, 1.0),
            np.where(whole, WHOLE_S + WHOLE_FLOOR / machine.clock, TRITON_S),
        )


def _whole_keys(
    table: OpTable, batch: np.ndarray, heads: np.ndarray, keys: np.ndarray, machine: Machine
) -> np.ndarray:
    """Return the cycles of blocks that walk all keys of their sequence, shape ``(n,)``."""
    wide, narrow = (
        table.of_device([d.matrix_peak(kind) for d in table.devices])
        for kind in ("bf16", "f8e4m3fn")
    )
    # An fp8 cache is computed with as it is, where there are units for it.
    as_fp8 = table.is_("kv_dtype", "fp8") & (narrow > wide)
    peak = np.where(as_fp8, narrow, wide) / machine.cores / machine.clock
    products = 2 * WHOLE_HEADS * (LATENT_KEYS + LATENT_VALUES / 2) / peak
    key = products + WHOLE_KEY + LATENT_KEYS * np.where(as_fp8, 1.0, 2.0) / WHOLE_RATE
    block = WHOLE_BLOCK + np.ceil(keys / WHOLE_TILE) * WHOLE_TILE * key
    waves = np.ceil(2 * batch * np.ceil(heads / WHOLE_HEADS) / machine.cores)
    # Both blocks keep their 64 queries in the memory of the core.
    room = table.of_device([d.shared_bytes_per_core for d in table.devices])
    together = room >= 2 * WHOLE_HEADS * LATENT_KEYS * 2
    return np.asarray(block * np.maximum(waves * np.where(together, PAIRED, 1.0), 1.0))
