"""``opcast predict`` of a ResNet-50 train step for an A100 that is not here: cold, then warm."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from common import show
from opcast.common.errors import CompilerError
from opcast.datagen.zoo import export
from opcast.features.lowering.target_compiler.install import find_compiler

DEVICE = "a100-sxm-80gb"
PROGRAM = {"depth": 50, "batch": 32, "image": 224, "mode": "train"}
#: Seconds in which the command should answer once the program is compiled.
WARM_S = 3.0


class Run(NamedTuple):
    """A command: what it printed, and what it took from start to end."""

    output: str
    seconds: float
    cpu_seconds: float


def main() -> None:
    try:
        find_compiler("gpu")
    except CompilerError as error:
        print(f"skipped: {error.what}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "resnet50.mlir"
        export("resnet", PROGRAM, program)
        cold = _opcast(scratch, "predict", str(program))
        warm = min((_opcast(scratch, "predict", str(program)) for _ in range(3)), key=_seconds)
        lowered = json.loads(_opcast(scratch, "lower", str(program)).output)
    predicted_ms = json.loads(warm.output)["latency_us"] / 1e3
    note = f"{lowered['kernels']} kernels, {predicted_ms:.1f} ms on {DEVICE}"
    show("compiler, ResNet-50 train step, batch 32", lowered["compile_seconds"], 120.0, note)
    for name, run, target in (("cold", cold, 150.0), ("warm", warm, WARM_S)):
        show(f"whole command, {name}", run.seconds, target, f"{run.cpu_seconds:.2f} s of CPU time")


def _seconds(run: Run) -> float:
    return run.seconds


def _opcast(cache: str, command: str, program: str) -> Run:
    before, start = _child_cpu(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "opcast", command, program, "--device", DEVICE, "--json"],
        env=_environment(cache), check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Run(done.stdout, time.perf_counter() - start, _child_cpu() - before)


def _environment(cache: str) -> dict[str, str]:
    """That of a user: the package's bytecode is kept from one run to the next."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OPCAST_CACHE": cache}


def _child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
