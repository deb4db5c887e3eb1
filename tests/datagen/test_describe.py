from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opcast.datagen.describe import describe, noise_floor, plot, tables
from opcast.features.dataset import Dataset, sample_frame
from opcast.features.devices.device import DeviceSpec, MemoryLevel

SPEC = DeviceSpec("cpu-x", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e9, 1e10),), 1e-6)


def row(
    program: str, kernel: str, p50: float, level: str = "kernel", **more: Any
) -> dict[str, Any]:
    return {
        "sample_id": f"{program}/{kernel}/{level}", "kernel_hash": kernel, "kernel_ir": "",
        "level": level, "kind": "gemm", "dtype": "f32", "device": "cpu-x",
        "latency_us_p10": 0.9 * p50, "latency_us_p50": p50, "latency_us_p90": 1.1 * p50,
        "repeats": 9, "flops": 1.0, "bytes": 1.0, "source": "measured:trace", "run_id": "r",
        "family": "mlp", "program": program,
    } | more  # fmt: skip


@pytest.fixture
def dataset() -> Dataset:
    rows = [
        row("a", "k1", 100.0),
        row("a#1", "k1", 110.0),
        row("b", "k1", 140.0),
        row("b", "k2", 10.0, kind="reduce", family="op:reduce", level="op"),
        row("a", "p", 200.0, level="program", kind="program"),
    ]
    runs = {"r": {"device": asdict(SPEC), "state": "done", "elapsed_s": 3.0}}
    return Dataset(sample_frame(rows), runs)


def test_counts_and_ranges(dataset: Dataset) -> None:
    found = describe(dataset)
    assert found["samples"] == 5
    assert found["programs"] == 2
    assert found["distinct_kernels"] == 2
    assert found["by_level"] == {"kernel": 3, "op": 1, "program": 1}
    assert found["by_family"] == {"mlp": 4, "op": 1}
    assert found["latency_us"]["kernel"]["p50"] == 110.0
    assert found["runs"]["r"]["device"] == "cpu-x"


def test_noise_floor_by_hand(dataset: Dataset) -> None:
    kernels = noise_floor(dataset.frame)["kernels"]
    # a and its replicate: |100 - 110| / 105
    assert kernels["replicates"] == pytest.approx(
        {"pairs": 1, "median_ape": 10 / 105, "mean_ape": 10 / 105}
    )
    # k1 in a and in b: |100 - 140| / 120
    assert kernels["same_kernel"]["mean_ape"] == pytest.approx(40 / 120)
    assert kernels["within"]["median"] == pytest.approx(0.2)  # (1.1 - 0.9) / 1
    assert noise_floor(dataset.frame)["programs"]["replicates"] == {"pairs": 0}


def test_empty_dataset_is_described() -> None:
    found = describe(Dataset(sample_frame([]), {}))
    assert found["samples"] == 0
    assert found["noise"]["kernels"]["within"] == {}


def test_tables(dataset: Dataset) -> None:
    found = tables(describe(dataset))
    assert found["by_kind"].set_index("kind").loc["gemm", "samples"] == 3
    assert list(found["latency_us"]["level"]) == ["kernel", "op", "program"]


def test_plot_writes_an_image(dataset: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = plot(dataset, tmp_path / "plots" / "latency.png")
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
