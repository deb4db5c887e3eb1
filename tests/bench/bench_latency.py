"""Single latencies: first and repeated, CPU time of one thread."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import show

import opcast
from opcast.features.kernels import kernels_from_irs

IR = (
    "HloModule m\nENTRY e {{\n  a = f32[{n},256]{{1,0}} parameter(0)\n"
    "  b = f32[256,512]{{1,0}} parameter(1)\n"
    "  ROOT r = f32[{n},512]{{1,0}} dot(a, b), lhs_contracting_dims={{1}}, "
    "rhs_contracting_dims={{0}}\n}}\n"
)
REPEATS = 20_000


def main() -> None:
    kernels = kernels_from_irs([IR.format(n=8 * i) for i in range(1, 80)])
    known = opcast.load()
    device = next(iter(known.model.devices.values()))
    for name, own in (("first query", known), ("first query, featurised", opcast.load())):
        own.latency_us(kernels[0], device)
        times = []
        for kernel in kernels[1:]:
            start = time.process_time()
            own.latency_us(kernel, device)
            times.append(time.process_time() - start)
        show(name, float(np.median(times)), 200e-6, f"slowest {max(times) * 1e6:,.0f} µs")
    start = time.process_time()
    for _ in range(REPEATS):
        known.latency_us(kernels[1], device)
    show("repeated query", (time.process_time() - start) / REPEATS, 5e-6)


if __name__ == "__main__":
    main()
