"""Check that a compiled program still does its source's work; list calls without a known cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..cost.flops import op_work
from ..cost.library_calls import kernel_name
from ..kernels.kernel import Kernel

#: Products may be removed as dead or equal, or padded; a note reports changes beyond this ratio.
_TOLERANCE = 0.02
#: Ops whose work has to survive compilation.
_PRODUCTS = frozenset(("dot", "ragged-dot", "scaled-dot", "convolution"))


def product_flops(kernels: Iterable[Kernel]) -> float:
    """Sum the FLOPs of matrix products and convolutions over all executions."""
    total = 0.0
    for kernel in kernels:
        if kernel.takes_time:
            total += kernel.multiplicity * _product_flops(kernel)
    return total


def work_notes(before: Iterable[Kernel], after: Iterable[Kernel], devices: int) -> list[str]:
    """Compare the work before and after compiling.

    Args:
        before: The source's ops as kernels, for all devices or for one.
        after: Kernels of one device.
        devices: Number of devices.

    Returns:
        A note if work went missing, or if products are computed more than once on one device.
    """
    after = list(after)
    source, products = product_flops(before), product_flops(after)
    # A compiler may write small products as multiplications and sums, so all FLOPs count here.
    # The source's FLOPs cover all devices, the compiled kernels one.
    done = devices * sum(k.flops * k.multiplicity for k in after if k.takes_time)
    if done < (1 - _TOLERANCE) * source:
        return [
            f"products of the program are {source / 1e9:.4g} GFLOP, all its kernels "
            f"{done / 1e9:.4g}: the compiler removed some, or a kernel was not understood"
        ]
    # Over several devices some products are meant to be replicated: only lost work is reported
    # there.
    if devices == 1 and products > (1 + _TOLERANCE) * source > 0:
        return [
            f"products of the program are {source / 1e9:.4g} GFLOP, of its kernels "
            f"{products / 1e9:.4g}: the compiler computes some again or pads them"
        ]
    return []


def uncosted_notes(kernels: Iterable[Kernel]) -> list[str]:
    """Note each library call of unknown work, for which only the bytes count."""
    counts = Counter(
        ":".join(filter(None, (str(k.op.attrs.get("target", "")), kernel_name(k.op)))) or k.opcode
        for k in kernels
        if k.kind == "custom_call" and k.takes_time and not (k.flops or k.transcendentals)
    )
    return [
        f"no cost is known for the library call {name} ({count} kernels): only its bytes count"
        f"{_remedy(name)}"
        for name, count in sorted(counts.items())
    ]


def _remedy(target: str) -> str:
    if "tpu_custom_call" in target:
        return "; state it by pallas_call(…, cost_estimate=pl.CostEstimate(…))"
    if "triton" in target or "mosaic" in target:
        return f"; give it by an entry point {target!r} of opcast.ops (docs/tutorials/extend.md)"
    return ""


def _product_flops(kernel: Kernel) -> float:
    total = 0.0
    for computation in kernel.body.computations.values():
        for op in computation.ops:
            library = op.opcode == "custom-call" and kernel.kind in ("gemm", "conv")
            if library or op.opcode in _PRODUCTS:
                total += op_work(op, computation, kernel.body)[0]
    return total
