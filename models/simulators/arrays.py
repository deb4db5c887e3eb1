"""Maps kernels to matrix products on systolic arrays, and distributes products over arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from ...common.errors import DeviceError
from ...features.devices.device import DeviceSpec
from ...features.ir.program import DTYPE_BITS, DTYPES, REDUCED
from ...features.kernels.kernel import Kernel
from ...features.table.columns import INDEX

#: Attributes of a device that a model of its arrays needs, with their keys in a device file.
_NEEDED = {
    "array_rows": "array_rows",
    "array_columns": "array_columns",
    "arrays_per_core": "arrays_per_core",
    "clock_hz": "boost_mhz",
}
#: Attributes that a model of its memories needs.
_VMEM = {"shared_bytes_per_core": "shared_kb_per_core", "memory_bytes": "memory_gb"}


@dataclass(frozen=True)
class Product:
    """``batch`` products of ``m × k`` by ``k × n`` matrices.

    Attributes:
        batch: Independent products: batched ones, or groups of a convolution.
        m: Rows; for a convolution its output positions.
        n: Columns; for a convolution the features of a group.
        k: Reduction size; for a convolution the channels of a group times the window.
        times: Work of all products of the kernel over that of this one, the largest.
        rate: Matrix rate that it runs at.
        bits: Bits of an element.
        fold: Bytes of the first operand over its bytes unfolded to ``m × k``; 1 unless a
            convolution reads elements several times.
    """

    batch: int
    m: int
    n: int
    k: int
    times: float
    rate: str
    bits: int
    fold: float


def product_of(kernel: Kernel, row: np.ndarray) -> Product | str:
    """The matrix product or implicit product of a convolution in a kernel, or why there is none.

    Zeros between the elements of a dilated input are not multiplied: rows shrink by their share of
    the products.
    """
    if kernel.kind not in ("gemm", "conv"):
        return f"no matrix product ({kernel.kind})"
    m, n, k, batch = (int(row[INDEX[f"gemm_{c}"]]) for c in ("m", "n", "k", "batch"))
    if min(m, n, k, batch) < 1:
        return f"product of unknown size ({kernel.opcode})"
    dense = float(row[INDEX["dense_flops"]])
    # A fusion may have several products: the largest represents all, scaled by their FLOPs.
    times = max(dense / (2.0 * batch * m * n * k), 1.0)
    # Gradients of strided convolutions dilate their input: ``dense_flops`` counts the zeros between
    # its elements, ``matmul_flops`` does not.
    if row[INDEX["conv_dilates_input"]] > 0:
        m = max(ceil(m * float(row[INDEX["matmul_flops"]]) / dense), 1)
    rate = DTYPES[int(row[INDEX["matrix_dtype"]])]
    bits = DTYPE_BITS.get(rate, 32)
    unfolded = batch * m * k * bits / 8
    fold = min(float(row[INDEX["gemm_lhs_bytes"]]) / unfolded, 1.0)
    return Product(batch, m, n, k, times, rate, bits, fold if kernel.kind == "conv" else 1.0)


def passes(rate: str, device: DeviceSpec) -> float:
    """Passes of an array over a product of a type: 1 for bf16, 6 for true f32 on a TPU.

    Operands that may be rounded take one pass, the default of the TPU compiler.
    """
    if rate == REDUCED:
        return 1.0
    return device.matrix_peak("bf16") / device.matrix_peak(rate)


def require_arrays(device: DeviceSpec, tool: str, memory: bool = False) -> None:
    """Reject a device whose description lacks figures for a model of its arrays.

    Args:
        device: The device.
        tool: Name of the tool, for the message.
        memory: Whether sizes of the memories are also needed.

    Raises:
        DeviceError: Something is missing.
    """
    needed = {**_NEEDED, **(_VMEM if memory else {})}
    missing = [key for name, key in needed.items() if not getattr(device, name)]
    if missing:
        raise DeviceError(
            f"{tool} cannot model it: its description lacks {', '.join(missing)}",
            where=device.name,
            hint="TPUs of the catalogue have them; add them to a device file (docs/devices.md)",
        )


def arrays_of(device: DeviceSpec) -> int:
    """Number of systolic arrays of all cores."""
    return device.arrays_per_core * device.core_count


def shared_cycles(folds: int, length: int, overhead: int, arrays: int) -> int:
    """Cycles of equal folds on several arrays, where a fold takes ``overhead + length``.

    A fold's rows may be split into ``p`` parts on different arrays: the minimum over ``p`` of
    ``ceil(folds · p / arrays) · (overhead + ceil(length / p))``.

    Args:
        folds: Folds of the product, including its batch.
        length: Cycles of a fold that a split divides (the streaming rows).
        overhead: Cycles of a fold that it does not divide (fill, drain, loading).
        arrays: Number of arrays.
    """
    # More parts use idle arrays, but each repeats the overhead.
    # More parts fill idle arrays, but each of them pays the overhead again.
    return min(
        ceil(folds * parts / arrays) * (overhead + ceil(length / parts))
        for parts in range(1, arrays + 1)
    )
