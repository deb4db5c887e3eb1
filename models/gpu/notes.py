"""Notes on predictions of the GPU model: the route of each kernel, and the model's limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .memory_passes import MemoryParams, pass_seconds
from .routes import (
    ATTENTION,
    CONV,
    DEPTHWISE,
    LONG_ROWS,
    PASS,
    PRODUCT,
    describe,
    products,
    traffic,
)

#: Share of the bytes of passes over long rows from which a note mentions them.
_MUCH = 0.2
_PRODUCTS = {PRODUCT: "a product", CONV: "a convolution, a product of"}


def route_notes(kernels: Sequence[Kernel], device: DeviceSpec, params: MemoryParams) -> list[str]:
    """Describe, one sentence a kernel, the published operator it is predicted from."""
    described = describe(kernels, device)
    moves = traffic(described.row)
    times = pass_seconds(moves, device, params)
    notes = []
    for i, kernel in enumerate(kernels):
        route = str(described.route[i])
        if route in _PRODUCTS:
            row = products(described, np.array([i])).iloc[0]
            sizes = f"b={row.b} m={row.m} n={row.n} k={row.k}"
            text = f"estimated as {_PRODUCTS[route]} {sizes} at the rate of {row.rate}"
        elif route == ATTENTION:
            own = described.attention[i].items()
            text = "estimated as attention " + " ".join(f"{name}={value}" for name, value in own)
        elif route == DEPTHWISE:
            text = "estimated by the loads and the traffic of a direct kernel"
        elif route == PASS:
            parts = {"launch": times.launch, "memory": times.memory, "arithmetic": times.vector}
            text = "estimated as a memory-bound kernel: " + ", ".join(
                f"{name} {seconds[i] * 1e6:.1f} µs" for name, seconds in parts.items()
            )
            if moves.again[i] > 0:
                text += f"; of long rows, at up to {1 + LONG_ROWS:.1f} times a stream's traffic"
        else:
            text = "no published operator is like it: roofline"
        notes.append(f"{kernel.name}: {text}")
    return notes


def limit_notes(
    kernels: Sequence[Kernel], device: DeviceSpec, known: Collection[str]
) -> tuple[str, ...]:
    """Limits of the predictions on a device, for the user.

    Args:
        kernels: The kernels.
        device: Device they run on.
        known: Names of the devices with published rows.
    """
    notes = ["kernels are predicted from published library operators, not from XLA's own"]
    if device.name not in known:
        notes.append(
            f"no published rows of {device.name}, so intervals are wider: errors on devices that "
            f"were left out in turn (rows exist of {', '.join(sorted(known))})"
        )
    described = describe(kernels, device)
    moves = traffic(described.row)
    runs = np.array([k.multiplicity for k in kernels], float)
    passes = runs * (described.route == PASS)
    if (passes * moves.again).sum() > _MUCH * LONG_ROWS * (passes * moves.moved).sum():
        notes.append(
            f"softmax over long rows, its gradient and reductions of such rows take up to "
            f"{1 + LONG_ROWS:.1f} times the time of other passes of equal bytes, as whole training "
            "steps took; no such kernel was measured alone"
        )
    sized = described.column("gemm_m") > 0
    # Devices before Ampere have no TF32: their "tf32" rate is the f32 rate, and the note would be
    # wrong.
    has_unit = device.matrix_peak("tf32") > device.matrix_peak("f32")
    if has_unit and bool((described.rate[sized] == "tf32").any()):
        notes.append(
            "f32 products at default precision run as TF32 on this device, as XLA does; ask for "
            "precision 'highest' for true FP32"
        )
    return tuple(notes)
