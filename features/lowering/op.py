"""Lowering without a compiler, op by op; notes on work that a lowering loses or cannot cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..cost.flops import op_work
from ..cost.library_calls import is_host_call, unknown_calls
from ..devices.device import DeviceSpec
from ..devices.rules import narrow_floats_of
from ..ir.precision import as_computed
from ..ir.program import DTYPE_BITS, Program
from ..ir.reader import SourceProgram
from ..kernels.extract import extract_kernels
from ..kernels.kernel import Kernel, LoweredProgram
from ..kernels.memory import entry_bytes, peak_memory


def lower_op(source: SourceProgram, device: DeviceSpec | None = None) -> LoweredProgram:
    """List a program's ops as kernels.

    Functions are inlined where they are called, loops multiply, scalar regions (reducers,
    comparators) belong to their op, and constants and reshapes cost nothing.

    Args:
        source: StableHLO or HLO.
        device: Determines how products are computed; without one, as they are written.

    Raises:
        ProgramError: The program is malformed.
    """
    program = source.program
    if device is not None:
        # For a chip without rules, all floats are assumed to be supported.
        narrow = narrow_floats_of(str(device.compiler.get("target", "")))
        known = narrow if narrow is not None else frozenset(DTYPE_BITS)
        program = as_computed(program, device.platform, known)
    kernels, notes = extract_kernels(program)
    notes += [*whole_notes(program, kernels), *uncosted_notes(kernels)]
    return LoweredProgram(
        kernels=kernels,
        lowering="op",
        target="any",
        peak_memory_bytes=peak_memory(program),
        memory_source="liveness",
        notes=notes,
        entry_bytes=entry_bytes(program),
        module=program,
    )


def whole_notes(program: Program, kernels: Sequence[Kernel]) -> list[str]:
    """Return a note if only a compiler would partition the program."""
    if program.num_partitions <= 1 or any(k.kind == "collective" for k in kernels):
        return []
    return [
        f"the program is to be partitioned over {program.num_partitions} devices, "
        "but without a compiler it is counted whole"
    ]


#: Compilers may remove dead or duplicate products, or pad them; larger relative changes are noted.
_TOLERANCE = 0.02
#: Ops whose work has to survive compilation.
_PRODUCTS = frozenset(("dot", "ragged-dot", "scaled-dot", "convolution"))
#: Opcode of ragged products.
_RAGGED = "ragged-dot"


def product_flops(kernels: Iterable[Kernel]) -> float:
    """Sum the FLOPs of matrix products and convolutions over all executions."""
    total = 0.0
    for kernel in kernels:
        if kernel.takes_time:
            total += kernel.multiplicity * _product_flops(kernel)
    return total


def ragged_notes(opcodes: Iterable[str], kernels: Iterable[Kernel]) -> list[str]:
    """Return a note if a compiler without a kernel for ragged products multiplies densely.

    Args:
        opcodes: Opcodes of the source.
        kernels: Kernels of the compiled program.
    """
    if _RAGGED not in opcodes or any(_RAGGED in k.name for k in kernels):
        return []
    return [
        "the compiler has no kernel for ragged products: it multiplies the rows of every group, "
        "all others set to zero, which is the work of a dense product for each group"
    ]


def work_notes(before: Iterable[Kernel], after: Iterable[Kernel], devices: int) -> list[str]:
    """Compare the work before and after compiling.

    Args:
        before: The source's ops as kernels, for all devices or for one.
        after: Kernels of one device.
        devices: Number of devices.

    Returns:
        A note if work is missing, or if products are computed repeatedly on one device.
    """
    before, after = list(before), list(after)
    source, products = product_flops(before), product_flops(after)
    # A compiler may rewrite small products as multiplications and sums, so all FLOPs count here.
    # The source's FLOPs cover all devices, the compiled kernels one.
    done = devices * sum(k.flops * k.multiplicity for k in after if k.takes_time)
    if done < (1 - _TOLERANCE) * source:
        return [
            f"products of the program are {source / 1e9:.4g} GFLOP, all its kernels "
            f"{done / 1e9:.4g}: the compiler removed some, or a kernel was not understood"
        ]
    # Over several devices, replicating some products is intended, so only lost work is reported.
    ragged = any(k.opcode == _RAGGED for k in before)
    if devices == 1 and not ragged and products > (1 + _TOLERANCE) * source > 0:
        return [
            f"products of the program are {source / 1e9:.4g} GFLOP, of its kernels "
            f"{products / 1e9:.4g}: the compiler computes some again or pads them"
        ]
    return []


def uncosted_notes(kernels: Iterable[Kernel]) -> list[str]:
    """Note calls to the host, and custom calls of unknown cost, of which only bytes count."""
    kernels = list(kernels)
    counts = Counter(name for k in kernels if k.takes_time for name in unknown_calls(k.body))
    return [
        f"no cost is known for the custom call {name} ({count} of them): only its bytes count; "
        f"{call_remedy(name)}"
        for name, count in sorted(counts.items())
    ] + _host_notes(kernels)


def _host_notes(kernels: Iterable[Kernel]) -> list[str]:
    calls = [k for k in kernels if is_host_call(k.op)]
    if not calls:
        return []
    moved = sum(_host_bytes(k) * k.multiplicity for k in calls)
    return [
        f"calls of the host (jax.debug.print, pure_callback, io_callback …) are left out: neither "
        f"their transfers of {moved / 1e6:.4g} MB nor the host's time, for which the device waits, "
        "is counted"
    ]


def _host_bytes(kernel: Kernel) -> float:
    """Return the bytes that a host call sends and receives; the end of a transfer adds none."""
    *operands, own = kernel.body.entry_computation.ops
    sent = sum(op.result_bytes for op in operands)
    return {"send": sent, "recv": own.result_bytes, "custom-call": sent + own.result_bytes}.get(
        own.opcode, 0.0
    )


def call_remedy(name: str) -> str:
    """Describe how to provide the cost of a custom call."""
    if "tpu_custom_call" in name:
        return "state it by pallas_call(…, cost_estimate=pl.CostEstimate(…))"
    if "triton" in name or "mosaic" in name:
        return (
            "give a Pallas kernel's function instead of a file, or pallas_call(…, cost_estimate="
            f"pl.CostEstimate(…)); others by an entry point {name!r} of opcast.ops "
            "(docs/tutorials/extend.md)"
        )
    return f"give it by an entry point {name!r} of opcast.ops (docs/tutorials/extend.md)"


def _product_flops(kernel: Kernel) -> float:
    total = 0.0
    for computation in kernel.body.computations.values():
        for op in computation.ops:
            library = op.opcode == "custom-call" and kernel.kind in ("gemm", "conv")
            if library or op.opcode in _PRODUCTS:
                total += op_work(op, computation, kernel.body)[0]
    return total
