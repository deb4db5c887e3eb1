"""What the benchmarks share: timing, printing, and the reference program."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESNET50 = {"depth": 50, "batch": 8, "image": 224, "mode": "train"}


def best(function: Callable[[], Any], repeats: int = 3) -> float:
    """Shortest wall time of a call, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def show(name: str, seconds: float, target: float, note: str = "") -> None:
    """Print one figure beside its target."""
    mark = "ok  " if seconds <= target else "MISS"
    print(f"{mark} {name:<58} {seconds:10.4g} s   target {target:g} s   {note}", flush=True)


def resnet50(folder: Path, data_parallel: int = 4) -> Path:
    """Export the reference program once: ResNet-50 train step, data parallel."""
    from opcast.datagen.zoo import export

    path = folder / f"resnet50-dp{data_parallel}.mlir"
    if not path.is_file():
        export("resnet", {**RESNET50, "data_parallel": data_parallel}, path)
    return path
