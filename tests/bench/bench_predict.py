"""Predictions with a loaded model: batches, repeated single queries, and the command, warm."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import opcast
from common import best, resnet50, show
from opcast.features.dataset import Dataset
from opcast.features.kernels.extract import kernels_from_irs
from opcast.workflows.reports.accuracy import COMMITTED

BATCH = 200_000


def main() -> None:
    predictor = opcast.load()
    device = next(iter(predictor.model.devices.values()))
    frame = Dataset.load(COMMITTED).at_level("op", "kernel").frame
    distinct = kernels_from_irs(frame["kernel_ir"].drop_duplicates().tolist())
    batch = (distinct * (BATCH // len(distinct) + 1))[:BATCH]
    predictor.latencies_us(batch, device)
    seconds = best(lambda: predictor.latencies_us(batch, device))
    one_by_one = best(lambda: [predictor.latencies_us([k], device) for k in distinct[:20]]) / 20
    ratio = one_by_one / (seconds / BATCH)
    show(
        f"batch of {BATCH} kernels ({len(distinct)} distinct)", seconds, BATCH / 200_000,
        f"{BATCH / seconds:,.0f} kernels/s, {ratio:,.0f} times faster than one by one",
    )  # fmt: skip
    unique = best(lambda: predictor.latencies_us(distinct, device))
    show(
        f"{len(distinct)} distinct kernels", unique, len(distinct) / 200_000,
        f"{len(distinct) / unique:,.0f} kernels/s",
    )  # fmt: skip
    kernel = distinct[0]
    predictor.latency_us(kernel, device)
    repeats = 20_000
    single = best(lambda: [predictor.latency_us(kernel, device) for _ in range(repeats)]) / repeats
    note = f"{one_by_one / single:,.0f} times faster than the first"
    show("repeated query of one kernel", single, 20e-6, note)
    warm_command(device.name)


def warm_command(device: str) -> None:
    """``opcast predict`` on the ResNet-50 train step, cold and then from the cache."""
    with tempfile.TemporaryDirectory() as scratch:
        path = resnet50(Path(scratch), data_parallel=1)
        env = os.environ | {"OPCAST_CACHE": scratch}
        command = [sys.executable, "-m", "opcast", "predict", str(path), "--device", device]
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([*command, "--json"], env=env, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        warm = min(times[1:])
        show("opcast predict, ResNet-50 train step, warm", warm, 5.0, f"cold {times[0]:.1f} s")


if __name__ == "__main__":
    main()
