"""Profiles as files of GPUs, TPUs and this CPU: the reader here and JAX's own see the same.

What a GPU's events hold is that of XLA's collectors of CUPTI and ROCm
(``xla/backends/profiler/gpu/cupti_collector.cc``): the statistics of the annotations around a
launch, ``hlo_op`` of its thunk and ``hlo_module`` and ``program_id`` of its module, and no run.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from opcast.datagen.profile.trace import Executed, executed, trace
from opcast.datagen.profile.xplane import FileProfile, read_planes
from opcast.datagen.traces.xla import read_xplane

from ...support.xplane import Plane, xspace


def both(data: bytes) -> list[Executed]:
    """What a profile's devices ran, by JAX's reader; ours has to agree."""

    def seen(found: list[Executed]) -> list[tuple[str, list[tuple[object, ...]]]]:
        return [
            (d.platform, [(e.module, e.op, e.run, e.name, e.start, e.end) for e in d.events])
            for d in found
        ]

    theirs = executed(ProfileData.from_serialized_xspace(data))
    assert seen(executed(FileProfile(read_planes(data)))) == seen(theirs)
    return theirs


def gpu(index: int = 0, runs: int = 3) -> Plane:
    """A product of two kernels and a fusion in each run, 1 µs apart, and a copy beside them."""
    plane = Plane(f"/device:GPU:{index}")
    plane.stat("device_type_string", "Nvidia GPU")
    clock = 2_000_000.0
    for run in range(runs):
        for op, kernel, length in (
            ("cublas-gemm.1", "sm90_xmma_gemm_bf16bf16", 10_000.0),
            ("cublas-gemm.1", "splitKreduce_kernel", 2_000.0),
            ("loop_fusion", "loop_fusion", 4_000.0),
        ):
            plane.event(
                "Stream #13(Compute)", kernel, clock, length,
                correlation_id=run, kernel_details="regs:32 grid:1,1,1", tf_op="Thunk",
                hlo_op=op, hlo_module="jit_case0", program_id=7,
            )  # fmt: skip
            # Lines that the profiler derives from the streams repeat what they hold.
            plane.event("XLA Ops", op, clock, length, hlo_op=op, hlo_module="jit_case0")
            clock += length + 1_000.0
    plane.event("XLA Modules", "jit_case0(7)", 2_000_000.0, clock - 2_000_000.0)
    plane.event("Stream #14(MemcpyH2D)", "MemcpyH2D", clock, 500.0, correlation_id=99, bytes=4096)
    return plane


def test_a_gpus_streams_hold_the_kernels() -> None:
    (found,) = both(xspace(Plane("/host:CPU"), gpu()))
    assert found.platform == "gpu"
    assert len(found.events) == 9  # neither copies nor derived lines
    assert {e.run for e in found.events} == {None}
    # By the greatest common divisor of how often each kernel ran: three executions.
    us = {op: [s * 1e6 for s in own] for (_, op), own in found.durations().items()}
    assert us["cublas-gemm.1"] == pytest.approx([12.0] * 3)
    assert us["loop_fusion"] == pytest.approx([4.0] * 3)


def test_modules_are_told_apart_by_their_program(tmp_path: Path) -> None:
    path = tmp_path / "t.xplane.pb"
    path.write_bytes(xspace(gpu()))
    read = read_xplane(path)
    assert {e.module for e in read.devices[0].executed.events} == {"jit_case0(7)"}
    assert read.device_name == "Nvidia GPU"


def test_each_gpu_is_a_device() -> None:
    found = both(xspace(gpu(0, runs=1), gpu(1, runs=3)))
    assert [len(d.events) for d in found] == [3, 9]


def test_a_tpus_line_of_ops() -> None:
    plane = Plane("/device:TPU:0")
    for run in range(2):
        start = 3_000_000.0 + run * 50_000
        plane.event("XLA Modules", "jit_step(42)", start, 20_000.0, run_id=run)
        text = "%fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%c"
        plane.event("XLA Ops", text, start, 15_000.0, hlo_category="loop fusion")
        plane.event("XLA Ops", "%copy.2 = f32[8]{0} copy(%p)", start + 15_000, 5_000.0)
        plane.event("Steps", "1", start, 20_000.0)
    (found,) = both(xspace(plane, Plane("/device:CUSTOM:Counters")))
    assert found.platform == "tpu"
    us = {key: [s * 1e6 for s in own] for key, own in found.durations().items()}
    assert us["jit_step", "fusion.1"] == pytest.approx([15.0, 15.0])
    assert us["jit_step", "copy.2"] == pytest.approx([5.0, 5.0])


def test_statistics_of_every_type() -> None:
    plane = Plane("/host:CPU")
    stats = {"text": "a", "whole": -3, "double": 0.5, "bytes": b"\x01"}
    plane.event("line", "event", 1_000_000.0, 1.5, **stats)
    (read,) = read_planes(xspace(plane))
    (event,) = next(read.lines).events
    assert dict(event.stats) == stats
    assert (event.name, event.start_ns, event.duration_ns) == ("event", 1_000_000.0, 1.5)
    with pytest.raises(ValueError, match=r"cut off|no whole number"):
        read_planes(xspace(plane)[:-3])


def test_a_release_of_jax_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((128, 128))
    compiled = jax.jit(lambda a: a @ a).lower(x).compile()
    monkeypatch.setattr(jax.profiler, "ProfileData", None)
    (seconds,) = trace(lambda: [jax.block_until_ready(compiled(x)) for _ in range(4)]).values()
    assert len(seconds) == 4
    assert min(seconds) > 0
