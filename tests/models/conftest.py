"""Synthetic tables and datasets: small, seeded, no kernels and no features needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from opcast.features.dataset import COLUMNS, sample_frame
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.program import Program
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.models.core.kernel_table import KernelTable, cells
from opcast.models.training_data.prepared import PreparedDataset, ProgramSample

SCHEMA = "synthetic"


def synthetic_table(n: int, seed: int, noise: float = 0.05) -> tuple[KernelTable, np.ndarray]:
    """A table of gemms and fusions on a CPU, and latencies that depend on six of its features."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 12)).astype(np.float32)
    X[:, 6:9] = X[:, 6:9] > 0.5
    X[:, 11] = 1.0
    kinds = rng.choice(["gemm", "fusion"], n)
    base = np.exp(rng.normal(size=n) - 11.0)
    ratio = (
        0.4 * X[:, 0] + 0.3 * np.abs(X[:, 1]) + 0.3 * X[:, 6] * X[:, 2] + 0.2 * (kinds == "gemm")
    )
    X[:, 9] = kinds == "gemm"
    latency = base * np.exp(ratio + noise * rng.normal(size=n))
    names = tuple(f"f{i}" for i in range(12))
    table = KernelTable(X, names, base, np.full(n, "memory", object), cells(kinds, "cpu"), SCHEMA)
    return table, latency


@pytest.fixture(scope="session")
def make_table() -> Callable[..., tuple[KernelTable, np.ndarray]]:
    return synthetic_table


@pytest.fixture(scope="session")
def cpu() -> DeviceSpec:
    return DeviceSpec(
        name="cpu-test",
        platform="cpu",
        peak_flops={"f32": 1e11},
        vector_flops={"f32": 2e10},
        levels=(MemoryLevel(1e6, 1e11), MemoryLevel(1e10, 1e10)),
        floor=1e-6,
        launch_gap=2e-6,
        dispatch=1e-5,
        core_count=2,
    )


@pytest.fixture(scope="session")
def make_kernel() -> Callable[..., Kernel]:
    def make(name: str, kind: str = "fusion", **values: object) -> Kernel:
        return Kernel(name=name, kind=kind, body=Program(), ir=name, hash=name, **values)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_frame() -> Callable[..., pd.DataFrame]:
    def make(**columns: list[object]) -> pd.DataFrame:
        n = len(next(iter(columns.values())))
        defaults: dict[str, list[object]] = {
            "sample_id": [f"s{i}" for i in range(n)],
            "kernel_hash": [f"h{i}" for i in range(n)],
            "level": ["kernel"] * n,
            "kind": ["gemm"] * n,
            "device": ["d0"] * n,
            "run_id": ["r0"] * n,
            "family": ["random"] * n,
            "program": [f"p{i}" for i in range(n)],
            "flops": [float(i) for i in range(n)],
            "bytes": [float(i) for i in range(n)],
            "latency_us_p50": [10.0] * n,
        }
        full = {c: [0 if t != "str" else ""] * n for c, t in COLUMNS.items()}
        return pd.DataFrame({**full, **defaults, **columns})

    return make


@pytest.fixture(scope="session")
def prepared(cpu: DeviceSpec) -> PreparedDataset:
    """Nine families and 30 generated programs; some kernels are shared by all programs.

    A program's wall time is 1.2 times the sum of its kernels' plus 30 µs, within 3 %.
    """
    rng = np.random.default_rng(0)
    table, latency = synthetic_table(700, 0)
    table.base_s *= 20
    latency = latency * 20
    kinds = [("gemm" if x else "fusion") for x in table.X[:, 9]]
    rows: list[dict[str, object]] = []
    samples: list[ProgramSample] = []
    names = [f"net{i % 9}-{i}" for i in range(45)] + [f"random-{i}" for i in range(30)]
    fresh = iter(range(20, 700))
    for name in names:
        family = name.split("-")[0]
        own = [next(fresh) for _ in range(int(rng.integers(4, 12)))]
        entries = np.array([*rng.choice(20, 3, replace=False), *own])
        for entry in entries:
            noisy = latency[entry] * np.exp(0.02 * rng.normal())
            rows.append(row_of(f"h{entry}", "kernel", kinds[entry], family, name, noisy))
        kernels = [
            Kernel(f"h{e}", kinds[e], Program(), "", f"h{e}", multiplicity=1.0) for e in entries
        ]
        wall = (1.2 * latency[entries].sum() + 30e-6) * np.exp(0.03 * rng.normal())
        lowered = LoweredProgram(kernels, "xla", "cpu")
        samples.append(ProgramSample(len(rows), lowered, entries, wall, cpu, name, family))
        rows.append(row_of(name, "program", "program", family, name, wall))
    frame = sample_frame(rows)
    frame["sample_id"] = [f"s{i}" for i in range(len(frame))]
    is_program = frame["level"] == "program"
    entry = [-1 if p else int(h[1:]) for p, h in zip(is_program, frame["kernel_hash"], strict=True)]
    return PreparedDataset(
        frame=frame,
        devices={cpu.name: cpu},
        table=table,
        entry=np.array(entry),
        programs=samples,
        irs=[""] * 700,
        entry_device=[cpu.name] * 700,
        dataset_hash="synthetic",
    )


def row_of(
    digest: str, level: str, kind: str, family: str, program: str, latency_s: float
) -> dict[str, object]:
    us = latency_s * 1e6
    return {
        "sample_id": "",
        "kernel_hash": digest,
        "kernel_ir": "",
        "level": level,
        "kind": kind,
        "dtype": "f32",
        "device": "cpu-test",
        "latency_us_p10": us,
        "latency_us_p50": us,
        "latency_us_p90": us,
        "repeats": 1,
        "flops": us,
        "bytes": us,
        "source": "measured:trace",
        "run_id": "r0",
        "family": family,
        "program": program,
    }
