from __future__ import annotations

import numpy as np
import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.roofline import TRANSCENDENTAL_FLOPS, memory_seconds, roofline

from ..kernel_texts import reducing

DEVICE = DeviceSpec(
    "d", "cpu", {"f32": 100e9, "bf16": 400e9}, {"f32": 50e9},
    (MemoryLevel(1e6, 100e9), MemoryLevel(1e12, 10e9)), floor=1e-6, core_count=2,
)  # fmt: skip
DOT = """HloModule m
ENTRY %main (a: {t}[64,32], b: {t}[32,16]) -> {t}[64,16] {{
  %a = {t}[64,32]{{1,0}} parameter(0)
  %b = {t}[32,16]{{1,0}} parameter(1)
  ROOT %d = {t}[64,16]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""
TANH = """HloModule m
ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %t = f32[1000]{0} tanh(%a)
}"""
REDUCE = """HloModule m
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
}"""


def kernel(text: str, kind: str, **amounts: float) -> Kernel:
    return Kernel("k", kind, parse_hlo(text), "", "", **amounts)


def dot(dtype: str = "f32", **amounts: float) -> Kernel:
    return kernel(DOT.format(t=dtype), "gemm", **amounts)


def test_matmul_flops_at_matrix_peak() -> None:
    flops = 2.0 * 64 * 16 * 32
    line = roofline([dot(flops=flops), dot("bf16", flops=flops)], DEVICE)
    np.testing.assert_allclose(line.compute_s, [flops / 100e9, flops / 400e9])


def test_flops_beside_the_matmul_run_at_vector_peak() -> None:
    flops = 2.0 * 64 * 16 * 32
    line = roofline([dot(flops=flops + 1000)], DEVICE)
    np.testing.assert_allclose(line.compute_s, flops / 100e9 + 1000 / 50e9)


def test_transcendentals_are_weighted() -> None:
    line = roofline([kernel(TANH, "fusion", flops=0.0, transcendentals=1000.0)], DEVICE)
    np.testing.assert_allclose(line.compute_s, TRANSCENDENTAL_FLOPS * 1000 / 50e9)


def test_small_sets_run_from_cache_and_large_from_memory() -> None:
    # Half of the first level's 1 MB fits; twice of it does not; its capacity is half way.
    seconds = memory_seconds(np.array([0.5e6, 1e6, 2e6]), DEVICE)
    half_way = (1 / 100e9 + 1 / 10e9) / 2
    np.testing.assert_allclose(seconds, [0.5e6 / 100e9, 1e6 * half_way, 2e6 / 10e9])


def test_one_level_is_plain_bandwidth() -> None:
    device = DeviceSpec("d", "gpu", {"f32": 1.0}, {}, (MemoryLevel(1e9, 4e9),), floor=0.0)
    np.testing.assert_allclose(memory_seconds(np.array([0.0, 8e9]), device), [0.0, 2.0])


def test_bound() -> None:
    kernels = [
        dot(flops=1e9, bytes_in=1.0),
        dot(flops=1.0, bytes_in=1e9),
        dot(flops=1.0, bytes_in=1.0),
        kernel(REDUCE, "collective", flops=64.0, bytes_in=256.0, bytes_out=256.0),
    ]
    line = roofline(kernels, DEVICE)
    assert line.bound.tolist() == ["compute", "memory", "latency", "communication"]
    np.testing.assert_allclose(line.latency_s, np.maximum(line.compute_s, line.memory_s))


@pytest.mark.parametrize("amount", ["flops", "transcendentals", "bytes_in", "bytes_out"])
def test_latency_never_falls_when_an_amount_grows(amount: str) -> None:
    sizes = np.geomspace(1.0, 1e12, 400)
    kernels = [dot(**{amount: size}) for size in sizes]
    latency = roofline(kernels, DEVICE).latency_s
    assert (np.diff(latency) >= 0).all()
    assert latency[-1] > latency[0]


def test_slower_inner_level_never_makes_larger_sets_faster() -> None:
    odd = DeviceSpec(
        "d", "cpu", {"f32": 1.0}, {}, (MemoryLevel(1e3, 1e9), MemoryLevel(1e9, 5e9)), floor=0.0
    )
    seconds = memory_seconds(np.geomspace(1, 1e9, 500), odd)
    assert (np.diff(seconds) > 0).all()


def test_no_kernels() -> None:
    assert roofline([], DEVICE).latency_s.shape == (0,)


def test_device_without_peaks() -> None:
    bare = DeviceSpec("d", "cpu", {}, {}, (MemoryLevel(1.0, 1.0),), floor=0.0)
    with pytest.raises(DeviceError, match="no peak"):
        roofline([dot(flops=1.0)], bare)


def test_on_a_tpu_a_wide_window_is_a_few_passes() -> None:
    text = reducing(
        "p0 = f32[64,256] parameter(0)",
        "p1 = f32[] parameter(1)",
        "ROOT r = f32[64,256] reduce-window(p0, p1), to_apply=c0, window={WINDOW}",
    )
    tpu, gpu = find_device("tpu-v3"), find_device("v100-sxm")
    wide = kernel_from_ir(text.replace("WINDOW", "size=1x511 pad=0_0x255_255"))
    small = kernel_from_ir(text.replace("WINDOW", "size=1x5 pad=0_0x2_2"))
    elements = 64 * 256
    found = roofline([wide, small], tpu).compute_s * tpu.vector_peak("f32")
    assert found == pytest.approx([510 * elements * 16 / 511, 4 * elements])
    assert roofline([wide], gpu).compute_s * gpu.vector_peak("f32") == pytest.approx(510 * elements)
