"""Rows of a dataset from the durations of a program's kernels."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ...features.kernels.kernel import Kernel, LoweredProgram
from ...features.kernels.program_json import schedule_to_json

Row = dict[str, object]


def sample_rows(
    lowered: LoweredProgram,
    durations: Mapping[str, Sequence[float]],
    wall: Sequence[float],
    *,
    family: str,
    program: str,
    sources: tuple[str, str] = ("measured:trace", "measured:wall"),
) -> list[Row]:
    """Make a row of each distinct kernel with a duration, and one of the program.

    Args:
        lowered: The program; kernels that take no time have no row.
        durations: Seconds of every execution by the kernel's name.
        wall: Seconds of whole executions; without any, or without kernels, no row of the program.
        family: Family of the program; ``op:…`` for a single op.
        program: The column ``program``.
        sources: Where the labels of kernels and of the program are from.

    Returns:
        Rows without ``sample_id``, ``device`` and ``run_id``.
    """
    kernels = [k for k in lowered.kernels if k.takes_time]
    # Where XLA split an op into several kernels, none of them alone labels the op.
    single = family.startswith("op:") and len(kernels) == 1
    # Equal kernels of a program are one sample with more executions.
    pooled: dict[str, list[float]] = defaultdict(list)
    for name, kernel in {k.name: k for k in kernels}.items():
        pooled[kernel.hash] += durations.get(name, [])
    by_hash = {k.hash: k for k in kernels}
    level = "op" if single else "kernel"
    common = {"family": family, "program": program}
    rows = [
        _kernel_row(by_hash[h], s) | common | {"level": level, "source": sources[0]}
        for h, s in pooled.items()
        if s
    ]
    if len(wall) and rows:
        known = {str(row["kernel_hash"]) for row in rows}
        rows.append(_program_row(lowered, wall, known) | common | {"source": sources[1]})
    return rows


def _kernel_row(kernel: Kernel, seconds: Sequence[float]) -> Row:
    return latency_columns(seconds) | {
        "kernel_hash": kernel.hash,
        "kernel_ir": kernel.ir,
        "kind": kernel.kind,
        "dtype": kernel.dtype,
        "flops": float(kernel.flops),
        "bytes": float(kernel.bytes),
    }


def _program_row(lowered: LoweredProgram, wall: Sequence[float], known: set[str]) -> Row:
    kernels = lowered.kernels
    text = schedule_to_json(lowered, known)
    # The program's type is its heaviest kernel's.
    dtypes = [k.dtype for k in sorted(kernels, key=lambda k: k.flops + k.bytes)]
    return latency_columns(wall) | {
        "kernel_hash": hashlib.sha256(text.encode()).hexdigest()[: len(kernels[0].hash)],
        "kernel_ir": text,
        "level": "program",
        "kind": "program",
        "dtype": dtypes[-1],
        "flops": float(sum(k.flops * k.multiplicity for k in kernels)),
        "bytes": float(sum(k.bytes * k.multiplicity for k in kernels)),
    }


def latency_columns(seconds: Sequence[float]) -> Row:
    """Quantiles in microseconds, and the number of executions."""
    # Quantiles, not minima: sums of minima over kernels under-predict programs.
    p10, p50, p90 = np.quantile(np.asarray(seconds, float), [0.1, 0.5, 0.9]) * 1e6
    return {
        "latency_us_p10": float(p10),
        "latency_us_p50": float(p50),
        "latency_us_p90": float(p90),
        "repeats": len(seconds),
    }
