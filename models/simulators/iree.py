"""IREE as an estimator: kernels compiled by IREE and run on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from ...common.errors import DeviceError, ModelError
from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec, local_device_name
from ...features.devices.identity import base_name
from ...features.ir.hlo_printer import print_hlo
from ...features.ir.hlo_reader import parse_hlo
from ...features.ir.jax_compat import hlo_to_stablehlo
from ...features.ir.mlir.bindings import parse_module
from ...features.ir.program import Computation, Op, Program, TensorType
from ...features.kernels.kernel import Kernel
from .base import Job, Reply, SimulatorEstimator

#: With a single working thread, processor time equals the wall time of an idle machine, and is
#: disturbed least by other jobs.
TIMER = "cpu_time"
#: IREE's optimization levels (``--iree-opt-level``).
LEVELS = ("O0", "O1", "O2", "O3")
#: IREE's names of HLO types; its inputs have a width but no sign.
_TYPES = {
    "pred": "i8",
    "s8": "i8",
    "u8": "i8",
    "s16": "i16",
    "u16": "i16",
    "s32": "i32",
    "u32": "i32",
    "s64": "i64",
    "u64": "i64",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "f64": "f64",
}
#: Options of ``iree-compile``: code for all instructions of the host CPU, like XLA's.
_COMPILE = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


class IreeEstimator(SimulatorEstimator):
    """Measured processor time of kernels under IREE, on one thread of this machine's CPU.

    Each kernel's HLO is converted to StableHLO without layouts, compiled by IREE for the host and
    run on inputs of ones. Kernels without that form (library calls, collectives, some copies) take
    the roofline.

    Args:
        opt: IREE's optimization level.
        repeats: Number of timings, whose median is used.
        time_s: Least seconds of each timing.
        limit_s: Time limit for compiling and running a kernel in seconds.
        progress: Whether to show progress.
    """

    name = "iree"
    extra = "iree"
    packages: ClassVar[tuple[str, ...]] = ("iree-base-compiler", "iree-base-runtime")
    source = "measured:iree"

    def __init__(
        self,
        opt: str = "O2",
        repeats: int = 5,
        time_s: float = 0.05,
        limit_s: float = 60.0,
        progress: bool = True,
    ) -> None:
        if opt not in LEVELS:
            raise ModelError(f"unknown level {opt!r}", hint=f"one of: {', '.join(LEVELS)}")
        super().__init__(limit_s, progress, opt=opt, repeats=repeats, time_s=time_s)

    def check(self, device: DeviceSpec) -> None:
        """Reject any device but this machine's CPU.

        Raises:
            DeviceError: It is another device.
        """
        if device.platform != "cpu" or base_name(device.name) != local_device_name():
            raise DeviceError(
                "iree runs kernels, and this is not the CPU of this machine",
                where=device.name,
                hint="--device local on a machine whose JAX uses the CPU; or another estimator",
            )

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """The text of the kernel."""
        if kernel.kind in ("collective", "control", "custom_call") or kernel.async_role:
            return f"cannot be run by itself ({kernel.kind})"
        return {"ir": kernel.ir, "timer": TIMER, **self.params}

    def seconds(self, reply: Reply, job: Job) -> float:
        """The measured seconds."""
        return float(reply["seconds"])

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """The answers themselves: a measurement covers the whole kernel."""
        return answered


def run(job: JsonObject) -> dict[str, float | str]:
    """Compile a kernel and time it.

    Args:
        job: ``ir`` of the kernel, ``opt`` (IREE's optimization level), ``repeats``, ``time_s`` of
            each repeat, and ``timer``: ``cpu_time`` or ``real_time``.

    Returns:
        ``seconds`` of one run, the median of the repeats; or an ``error``.
    """
    program = unfused(parse_hlo(job["ir"]))
    # The converter drops copies, so that there would be nothing to time.
    if any(op.opcode == "copy" for op in program.entry_computation.ops):
        return {"error": "StableHLO has no copy"}
    inputs = [_input(op.type) for op in program.entry_computation.parameters]
    text = str(parse_module(hlo_to_stablehlo(print_hlo(program))))
    # The converter leaves ops that StableHLO lacks in the MHLO dialect, which IREE cannot read.
    foreign = re.search(r"(?:= |\")mhlo\.(\w+)", text)
    if foreign:
        return {"error": f"StableHLO has no {foreign[1]}"}
    with tempfile.TemporaryDirectory(prefix="opcast-iree-") as scratch:
        module = Path(scratch) / "kernel.vmfb"
        (Path(scratch) / "kernel.mlir").write_text(text)
        _tool(
            compiler(),
            str(Path(scratch) / "kernel.mlir"),
            "-o",
            str(module),
            *_COMPILE,
            f"--iree-opt-level={job['opt']}",
        )
        told = _tool(
            benchmark(),
            f"--module={module}",
            "--function=main",
            # One thread, in the caller: compares the work of kernels, not its scheduling.
            "--device=local-sync",
            "--benchmark_format=json",
            f"--benchmark_min_time={job['time_s']}s",
            f"--benchmark_repetitions={job['repeats']}",
            *(f"--input={own}" for own in inputs),
        )
    return {"seconds": median_seconds(told, job["timer"])}


def unfused(program: Program) -> Program:
    """Make the computation that a kernel's fusion calls the entry of the module.

    Bitcasts between layouts become reshapes, since a program for another compiler has no layouts.
    """
    op = program.entry_computation.root_op
    computations = {
        name: replace(own, ops=[_portable(inner) for inner in own.ops])
        for name, own in program.computations.items()
    }
    if op.opcode == "fusion" and op.called:
        own = computations.pop(op.called[0])
        del computations[program.entry]
        computations["main"] = Computation("main", own.ops, own.root)
        return replace(program, computations=computations, entry="main")
    return replace(program, computations=computations)


def _portable(op: Op) -> Op:
    return replace(op, opcode="reshape") if op.opcode == "bitcast" else op


def _input(kind: TensorType) -> str:
    name = _TYPES.get(kind.dtype)
    if name is None:
        raise ValueError(f"IREE's tools take no input of type {kind.dtype}")
    return "x".join([*map(str, kind.shape), f"{name}=1"])


def compiler() -> str:
    """Path of ``iree-compile``."""
    from iree.compiler.tools.binaries import find_tool

    return str(find_tool("iree-compile"))


def benchmark() -> str:
    """Path of ``iree-benchmark-module``."""
    import iree.runtime

    return str(iree.runtime.benchmark_exe())


def median_seconds(told: str, timer: str) -> float:
    """Median of the repeats in the JSON that ``iree-benchmark-module`` prints."""
    unit = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    # Google Benchmark prints aggregates (mean, median, …) as additional rows.
    rows = [row for row in json.loads(told)["benchmarks"] if row["run_type"] == "iteration"]
    times = sorted(row[timer] * unit[row["time_unit"]] for row in rows)
    return float(times[len(times) // 2])


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        # The first line that names an error; the rest is usually a dump of the module.
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        said = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise RuntimeError(said)
    return done.stdout
