"""Traces by hand, of the documented formats of Kineto and Nsight Systems."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


class Kineto:
    """Writes what ``export_chrome_trace`` writes: operators, calls, kernels, steps."""

    def __init__(self, device: str = "NVIDIA H100 80GB HBM3") -> None:
        self.events: list[dict[str, Any]] = []
        self.device = device
        self.clock = 1000.0
        self.gpu = 1000.0
        self._ids = 0

    def operator(
        self,
        name: str,
        dims: Sequence[Any],
        kernels: Sequence[tuple[str, float]],
        *,
        dtype: str = "c10::BFloat16",
        values: Sequence[str] = (),
        gap: float = 1.0,
        device: int = 0,
        inside: str = "",
        args: dict[str, Any] | None = None,
    ) -> None:
        """Add a call that launches kernels of given microseconds, ``gap`` µs apart."""
        self._ids += 1
        external, start = self._ids, self.clock
        for kernel, length in kernels:
            self._ids += 1
            self.clock += 2.0
            self._add("cuda_runtime", "cudaLaunchKernel", self.clock, 1.0, 1, correlation=self._ids)
            begin = max(self.gpu + gap, self.clock + 3.0)
            self.gpu = begin + length
            self._add(
                "kernel", kernel, begin, length, 7, device=device, stream=7,
                correlation=self._ids, **{"External id": external}, **(args or {}),
            )  # fmt: skip
        self.clock += 2.0
        end = self.clock
        own = {
            "External id": external,
            "Input Dims": list(dims),
            "Input type": [dtype if d else "Scalar" for d in dims],
            "Concrete Inputs": list(values),
        }
        self._add("cpu_op", name, start, end - start, 1, **own)
        if inside:
            self._add("cpu_op", inside, start - 0.5, end - start + 1.0, 1, **own)
        self.clock += 1.0

    def step(self, number: int, start: float) -> None:
        """Mark everything since ``start`` as a step."""
        name = f"ProfilerStep#{number}"
        self._add("user_annotation", name, start - 1.0, self.clock - start + 1.5, 1)
        self.clock += 2.0

    def _add(
        self, category: str, name: str, start: float, length: float, thread: int, **args: Any
    ) -> None:
        # Kernels are on the process of their device, as Kineto writes them.
        process = args.get("device", 0) if category == "kernel" else 4242
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start,
             "dur": length, "args": args}
        )  # fmt: skip

    def save(self, path: Path) -> Path:
        """Write the file; ``.gz`` is packed."""
        data = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device}],
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *self.events],
            "traceName": "trace.json",
        }
        text = json.dumps(data, indent=1).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def two_steps(path: Path, device: int = 0) -> Path:
    """Two steps of a product, a norm, an addition, an unknown operator and an all-reduce."""
    trace = Kineto()
    for number in range(2):
        start = trace.clock
        trace.operator(
            "aten::addmm", [[1024], [512, 256], [256, 1024], [], []],
            [("sm90_xmma_gemm_bf16", 10.0 + number), ("splitKreduce", 2.0)],
            inside="aten::linear", device=device,
        )  # fmt: skip
        trace.operator(
            "aten::native_layer_norm", [[512, 1024], [], [1024], [1024], []],
            [("vectorized_layer_norm_kernel", 4.0)], device=device,
        )  # fmt: skip
        trace.operator(
            "aten::add", [[512, 1024], [512, 1024], []], [("elementwise", 3.0)], device=device
        )
        trace.operator("aten::cumsum", [[512, 1024]], [("scan", 5.0)], device=device)
        trace.operator(
            "nccl:all_reduce", [[524288]], [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20.0)],
            device=device,
            args={"Collective name": "allreduce", "In msg nelems": 524288, "Group size": 8,
                  "Out msg nelems": 524288, "dtype": "BFloat16"},
        )  # fmt: skip
        trace.step(number, start)
    return trace.save(path)


_TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER, blockX INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER, text TEXT,
  globalTid INTEGER, textId INTEGER);
"""
_PROCESS, _THREAD = 5 << 24, (5 << 24) + 77


def nsys_sqlite(
    path: Path,
    runs: Sequence[Sequence[tuple[str, str, int]]],
    *,
    device_name: str = "NVIDIA H100 80GB HBM3",
    module: str = "jit_step",
    text: str = "TSL:Thunk:#hlo_op={},unique_hlo_op_id=3#",
) -> Path:
    """Write an export: runs of (text of the NVTX range, kernel's name, nanoseconds)."""
    strings: dict[str, int] = {}

    def number(value: str) -> int:
        return strings.setdefault(value, len(strings) + 1)

    with closing(sqlite3.connect(path)) as base:
        base.executescript(_TABLES)
        base.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?, 132)", (device_name,))
        host, gpu, correlation = 1000, 5000, 0
        for run in runs:
            first = host
            for op, name, length in run:
                correlation += 1
                ranges = (host, host + 900, 59, None, _THREAD, number(text.format(op)))
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", ranges)
                call = (host + 100, host + 500, _THREAD, correlation, number("cudaLaunchKernel"), 0)
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?)", call)
                own = number(name)
                kernel = (gpu, gpu + length, 0, 7, correlation, _PROCESS, own, own, 1, 128)
                base.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?)", kernel
                )
                gpu += length + 500
                host += 1000
            if module:
                name = f"TSL:XlaModule:#hlo_module={module},program_id=7#"
                event = (first - 10, host, 59, name, _THREAD, None)
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", event)
            host, gpu = host + 1000, gpu + 10_000
        rows = [(i, value) for value, i in strings.items()]
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        base.commit()
    return path


#: A module as XLA's GPU compiler would write it: a fusion, a product, a collective.
HLO = """HloModule jit_step, is_scheduled=true

%fused_tanh (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  ROOT %t = f32[512,512]{1,0} tanh(%p)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[512,512]) -> f32[512,512] {
  %x = f32[512,512]{1,0} parameter(0)
  %loop_tanh_fusion.1 = f32[512,512]{1,0} fusion(%x), kind=kLoop, calls=%fused_tanh
  %dot.2 = f32[512,512]{1,0} dot(%loop_tanh_fusion.1, %x), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  ROOT %all-reduce.3 = f32[512,512]{1,0} all-reduce(%dot.2), replica_groups={{0,1}}, to_apply=%sum
}
"""
