"""Traces of GPUs as libkineto's present version writes them, with all that surrounds kernels.

The fields are those of files in kineto's own repository (``docs/traces`` of H100s) and of its
writer (``output_json.cpp``); what ROCm's adds and leaves out is marked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast.datagen.traces.aten import traced_operators
from opcast.datagen.traces.kineto import read_kineto
from opcast.datagen.traces.trace import Trace

HOST, BASE = 514683, 88511388202.755


def x(category: str, name: str, start: float, length: float, pid: object, tid: object, **args):
    own = {key.replace("_", " ") if key != "cuda_sync_kind" else key: v for key, v in args.items()}
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": BASE + start,
        "dur": length, "args": own,
    }  # fmt: skip


def operator(name: str, start: float, length: float, external: int, dims: list, types: list):
    args = {
        "External id": external, "Record function id": 0, "Ev Idx": external,
        "Input Dims": dims, "Input type": types, "Concrete Inputs": [""] * len(dims),
        "Input Strides": [[1]] * len(dims), "Sequence number": 3, "Fwd thread id": 0,
    }  # fmt: skip
    return x("cpu_op", name, start, length, HOST, HOST) | {"args": args}


def kernel(name: str, start: float, length: float, correlation: int, **more):
    args = {
        "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation,
        "registers per thread": 168, "shared memory": 213056, "blocks per SM": 1.0,
        "warps per SM": 12.0, "grid": [132, 1, 1], "block": [384, 1, 1],
        "est. achieved occupancy %": 19, "graph id": 0, "graph node id": 0,
    }  # fmt: skip
    return x("kernel", name, start, length, 0, 7) | {"args": args | more}


def launch(name: str, start: float, correlation: int, category: str = "cuda_runtime"):
    return x(category, name, start, 0.5, HOST, HOST, cbid=211, correlation=correlation)


def read(path: Path, events: list, name: str = "NVIDIA H100") -> Trace:
    properties = [
        {"id": i, "name": name, "totalGlobalMem": 102085492736, "computeMajor": 9, "numSms": 132}
        for i in range(8)
    ]
    around = [
        {"name": "process_name", "ph": "M", "ts": BASE, "pid": 0, "tid": 0,
         "args": {"name": "python"}},
        {"name": "process_labels", "ph": "M", "ts": BASE, "pid": 0, "tid": 0,
         "args": {"labels": "GPU 0"}},
        {"ph": "s", "id": 1, "pid": HOST, "tid": HOST, "ts": BASE, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 1, "pid": 0, "tid": 7, "ts": BASE, "cat": "ac2g", "name": "ac2g",
         "bp": "e"},
        {"ph": "X", "cat": "Trace", "ts": BASE, "dur": 900.0, "pid": "Spans",
         "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 4}},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces",
         "tid": "Trace PyTorch Profiler", "ts": BASE},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": BASE + 900},
    ]  # fmt: skip
    data = {
        "schemaVersion": 1, "deviceProperties": properties, "cuda_driver_version": 13000,
        "cuda_runtime_version": 12090, "cupti_version": 28, "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1775078550000000000, "traceEvents": around + events,
        "traceName": "/tmp/trace.json",
    }  # fmt: skip
    path.write_text(json.dumps(data))
    return read_kineto(path)


MM = operator("aten::mm", 10.0, 9.0, 5, [[512, 256], [256, 1024]], ["c10::BFloat16"] * 2)


def test_only_kernels_count_among_what_surrounds_them(tmp_path: Path) -> None:
    events = [
        MM,
        launch("cudaLaunchKernelExC", 15.0, 31),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 30.0, 12.0, 31),
        # Waits of streams and events, and ranges of the user, lie on the device's rows, too.
        x("cuda_sync", "Stream Wait Event", 28.0, 40.0, 0, 7, stream=7, correlation=31, device=0,
          cuda_sync_kind="Stream Wait Event"),
        x("cuda_sync", "Event Sync", 28.0, 40.0, 0, -1, stream=-1, correlation=32, device=0),
        x("gpu_user_annotation", "ProfilerStep#3", 29.0, 60.0, 0, 7),
        x("overhead", "Activity Buffer Request", 20.0, 5.0, -1, 0),
        x("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 50.0, 3.0, 0, 7, device=0, stream=7,
          correlation=33, bytes=4096),
    ]  # fmt: skip
    trace = read(tmp_path / "t.json", events)
    assert trace.device_name == "NVIDIA H100"  # all eight have one name
    (device,) = trace.devices
    assert [(e.name[:5], round(e.end - e.start)) for e in device.executed.events] == [
        ("nvjet", 12_000), ("Memcp", 3_000)
    ]  # fmt: skip
    product, copy = traced_operators(device.executed.events)
    assert product.row == {
        "family": "linear", "op": "linear", "dtype": "bf16", "b": 1, "m": 512, "n": 1024, "k": 256
    }  # fmt: skip
    assert product.seconds == pytest.approx([12e-6])
    assert copy.kind == "copies"


def test_kernels_of_a_graph_are_all_that_its_launch_started(tmp_path: Path) -> None:
    # All have the number of the launch; no operator of a size is around it.
    events = [
        launch("cudaGraphLaunch", 15.0, 40),
        *(kernel(f"k{i}", 30.0 + 5 * i, 4.0, 40, **{"graph id": 9, "graph node id": i})
          for i in range(3)),
    ]  # fmt: skip
    (device,) = read(tmp_path / "t.json", events).devices
    assert len(device.executed.events) == 3
    found = traced_operators(device.executed.events)
    assert [o.row for o in found] == [{}] * 3
    assert sum(o.total for o in found) == pytest.approx(12e-6)


def test_a_kernel_launched_by_the_driver_belongs_to_the_operator_around(tmp_path: Path) -> None:
    # Triton and cuBLASLt launch through the driver's interface.
    events = [MM, launch("cuLaunchKernelEx", 15.0, 50, "cuda_driver"), kernel("k", 30.0, 8.0, 50)]
    (device,) = read(tmp_path / "t.json", events).devices
    (product,) = traced_operators(device.executed.events)
    assert (product.name, product.seconds) == ("aten::mm", pytest.approx([8e-6]))


def test_rocm_numbers_its_devices_from_the_hosts_on(tmp_path: Path) -> None:
    # Its kernels have an external id and a kind, and no figures of occupancy.
    args = {
        "External id": 5, "device": 2, "stream": 0, "correlation": 60,
        "kind": "Dispatch Kernel", "grid": [1024, 1, 1], "block": [256, 1, 1],
    }  # fmt: skip
    name = "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64"
    own = x("kernel", name, 30.0, 20.0, 2, 0) | {"args": args}
    events = [MM, launch("hipExtModuleLaunchKernel", 15.0, 60), own]
    trace = read(tmp_path / "t.json", events, name="AMD Instinct MI300X")
    assert [d.index for d in trace.devices] == [2]
    (product,) = traced_operators(trace.devices[0].executed.events)
    assert product.row["family"] == "linear"
    # Without the launch, the external id leads to the operator.
    (alone,) = traced_operators(read(tmp_path / "u.json", [MM, own]).devices[0].executed.events)
    assert alone.row == product.row


def test_times_as_texts_keep_their_nanoseconds(tmp_path: Path) -> None:
    own = kernel("k", 0.0, 1.0, 70)
    own |= {"ts": "88511388202.785", "dur": "0.020"}
    (device,) = read(tmp_path / "t.json", [own]).devices
    (event,) = device.executed.events
    assert event.end - event.start == pytest.approx(20.0, abs=0.1)
