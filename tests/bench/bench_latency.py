"""Single latencies: first and repeated, CPU time of one thread."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import opcast
from common import show
from opcast.features.kernels.extract import kernels_from_irs

IR = (
    "HloModule m\nENTRY e {{\n  a = f32[{n},256]{{1,0}} parameter(0)\n"
    "  b = f32[256,512]{{1,0}} parameter(1)\n"
    "  ROOT r = f32[{n},512]{{1,0}} dot(a, b), lhs_contracting_dims={{1}}, "
    "rhs_contracting_dims={{0}}\n}}\n"
)
OPERATOR = "linear m={} n=4096 k=4096 dtype=bf16 backend=vllm"
REPEATS = 20_000
#: Queries before the first that counts: by then few rows are walked through trees by ourselves.
WARM = 25


def first(own, name, queries, device) -> None:
    """CPU time of queries that were not asked before, by a model in use."""
    times = []
    for query in queries:
        start = time.process_time()
        own.latency_us(query, device)
        times.append(time.process_time() - start)
    times = times[WARM:]
    show(name, float(np.median(times)), 200e-6, f"quickest {min(times) * 1e6:,.0f} µs")


def main() -> None:
    kernels = kernels_from_irs([IR.format(n=8 * i) for i in range(1, 80)])
    known = opcast.load()
    device = next(iter(known.model.devices.values()))
    for name, own in (("first query", known), ("first query, featurised", opcast.load())):
        first(own, name, kernels, device)
    first(known, "first query of an operator", [OPERATOR.format(m) for m in range(1, 80)], "l4")
    start = time.process_time()
    for _ in range(REPEATS):
        known.latency_us(kernels[1], device)
    show("repeated query", (time.process_time() - start) / REPEATS, 5e-6)


if __name__ == "__main__":
    main()
