"""Passes over memory: hand-computed times, order, and what is recovered from rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.device import DeviceSpec
from opcast.models.gpu.memory_passes import MemoryParams, Traffic, launch_seconds, pass_seconds
from opcast.models.gpu.memory_passes_fit import (
    fit_memory,
    shared_variance,
    suitable,
    traffic_of_rows,
)

MakeGpu = Callable[..., DeviceSpec]
PLAIN = MemoryParams(hbm=0.8, cache=0.5, edge=1.0, launch_cycles=2000.0, vector=1.0)


def stream(*moved: float, work: float = 0.0, penalty: float = 1.0) -> Traffic:
    size = np.array(moved, np.float64)
    one = np.ones(len(size))
    return Traffic(size, 0 * size, work * one, 0 * size, penalty * one, 0 * size)


def test_a_long_stream_takes_its_share_of_the_bandwidth(round_gpu: MakeGpu) -> None:
    # 8e9 bytes at 0.8 of 1 TB/s, and 2000 cycles at 1 GHz.
    times = pass_seconds(stream(8e9), round_gpu(), PLAIN)
    assert times.memory[0] == pytest.approx(10e-3)
    assert times.launch[0] == pytest.approx(2e-6)
    assert times.total[0] == pytest.approx(10e-3 + 2e-6)


def test_a_small_set_stays_in_the_cache(round_gpu: MakeGpu) -> None:
    # A quarter of the 1 MB of cache, at half of its 10 TB/s.
    times = pass_seconds(stream(250e3), round_gpu(), PLAIN)
    assert times.memory[0] == pytest.approx(250e3 / 5e12)


def test_arithmetic_and_penalties_count(round_gpu: MakeGpu) -> None:
    # 1e12 operations at 10 TFLOP/s.
    assert pass_seconds(stream(1.0, work=1e12), round_gpu(), PLAIN).vector[0] == pytest.approx(0.1)
    slow, fast = (pass_seconds(stream(8e9, penalty=p), round_gpu(), PLAIN) for p in (1.25, 1.0))
    assert slow.memory[0] == pytest.approx(1.25 * fast.memory[0])


def test_integers_run_at_their_own_rate(round_gpu: MakeGpu) -> None:
    one, work = np.ones(1), np.array([1e12])
    passes = Traffic(one, 0 * one, work, work, one, 0 * one)
    # 1e12 operations at half an instruction each: as long as floats where integers have half their
    # rate, and half of that where both have one rate.
    for rate, seconds in ((5e12, 0.1), (1e13, 0.05)):
        device = round_gpu(vector_flops={"f32": 1e13, "s32": rate})
        assert pass_seconds(passes, device, PLAIN).vector[0] == pytest.approx(seconds)


def test_updates_of_one_address_queue(round_gpu: MakeGpu) -> None:
    # 1e6 updates of each address, one per cycle at 1 GHz; the bytes alone take 10 µs.
    passes = replace(stream(8e6, 8e6), queued=np.array([1e6, 1.0]))
    queued, spread = pass_seconds(passes, round_gpu(), PLAIN).memory
    assert queued == pytest.approx(1e-3) and spread == pytest.approx(1e-5)


def test_more_bytes_never_take_less_time(round_gpu: MakeGpu) -> None:
    sizes = np.exp(np.linspace(np.log(1.0), np.log(1e11), 500))
    one = np.ones(500)
    passes = Traffic(sizes, sizes, sizes, 0 * sizes, one, 0 * sizes)
    total = pass_seconds(passes, round_gpu(), MemoryParams()).total
    assert (np.diff(total) >= -1e-12 * total[1:]).all()


def test_rows_that_are_read_again_miss_the_cache(round_gpu: MakeGpu) -> None:
    rows = pd.DataFrame({
        "key": ["eager/softmax"] * 2, "op": ["softmax"] * 2, "dtype": ["fp32"] * 2,
        "rows": [100, 100], "cols": [1024, 2048], "n_in": [1, 1],
    })  # fmt: skip
    found = traffic_of_rows(rows)
    np.testing.assert_allclose(found.moved, [100 * 1024 * 8, 100 * 2048 * 8])
    np.testing.assert_allclose(found.again, [0, 2 * 100 * 2048 * 4])


def test_a_slow_vendor_pays_more_for_a_launch(round_gpu: MakeGpu) -> None:
    amd = round_gpu(vendor="AMD", floor=4e-6)
    assert launch_seconds(amd, PLAIN) == pytest.approx(2 * launch_seconds(round_gpu(), PLAIN))


def test_constants_are_found_again(round_gpu: MakeGpu) -> None:
    rng = np.random.default_rng(0)
    truth = MemoryParams(hbm=0.7, cache=0.9, edge=0.7, launch_cycles=3000.0, vector=1.0)
    devices = {
        name: round_gpu(name, core_count=cores, architecture=name)
        for name, cores in (("a", 80), ("b", 100), ("c", 120))
    }
    parts = []
    for name, spec in devices.items():
        rows = pd.DataFrame({
            "key": "graph/quantize", "op": "quantize_fp8", "dtype": "bf16", "backend": "trtllm",
            "device": name, "n_in": 1, "cols": 1024,
            "rows": np.exp(rng.uniform(0, np.log(3e5), 300)).astype(int) + 1,
        })  # fmt: skip
        seconds = pass_seconds(traffic_of_rows(rows), spec, truth).total
        noise = np.exp(rng.normal(0, 0.02, len(rows)))
        parts.append(rows.assign(latency_us=seconds * noise * 1e6))
    fit = fit_memory(pd.concat(parts, ignore_index=True), devices)
    assert fit.params.hbm == pytest.approx(0.7, rel=0.05)
    assert fit.params.launch_cycles == pytest.approx(3000, rel=0.05)
    assert all(errors["median"] < 0.05 for errors in fit.errors.values())
    assert fit.left_out[0] < 0 < fit.left_out[1]


def test_kernels_of_one_framework_version_teach_nothing() -> None:
    rows = pd.DataFrame({
        "key": ["kernel/elementwise", "kernel/elementwise", "kernel/elementwise", "kernel/norm"],
        "op": ["add", "embedding", "add", "rmsnorm"], "latency_us": [20.0, 20.0, 2.0, 20.0],
    })  # fmt: skip
    assert suitable(rows).tolist() == [True, False, False, False]


def test_shared_variance_of_errors() -> None:
    assert shared_variance([np.array([1.0, 1.0]), np.array([-1.0, -1.0])]) == pytest.approx(1.0)
    assert shared_variance([np.array([1.0, -1.0]), np.array([-1.0, 1.0])]) == pytest.approx(0.0)
    # Between devices 1 (means ±1), within 1 (deviations ±1): half.
    assert shared_variance([np.array([2.0, 0.0]), np.array([-2.0, 0.0])]) == pytest.approx(0.5)
