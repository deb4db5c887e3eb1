from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.models.program.context import CONTEXT, context_features

MakeKernel = Callable[..., Kernel]
MB = 1e6  # the cache of the fixture device


def columns(lowered: LoweredProgram, device: DeviceSpec, times: list[float]) -> dict:
    base = 2 * np.array(times)
    found = context_features(np.array(times), base, lowered, device)
    assert found.shape == (len(times), len(CONTEXT)) and np.isfinite(found).all()
    return dict(zip(CONTEXT, found.T.astype(float), strict=True))


def chain(make_kernel: MakeKernel) -> LoweredProgram:
    """a writes 0.25 MB; b reads nothing of it and touches 1.5 MB; c reads a and b."""
    kernels = [
        make_kernel("a", bytes_in=0.25 * MB, bytes_out=0.25 * MB),
        make_kernel("b", bytes_in=1.0 * MB, bytes_out=0.5 * MB),
        make_kernel("c", kind="gemm", bytes_in=1.0 * MB, bytes_out=0.25 * MB, operands=(0, 1)),
    ]
    return LoweredProgram(kernels, "xla", "cpu", peak_memory_bytes=4 * MB)


def test_reuse_distance_counts_what_is_touched_in_between(
    make_kernel: MakeKernel, cpu: DeviceSpec
) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    # a's result: 0.25 MB of its own + 1.5 MB that b touches = 1.75 MB; b's result: 0.5 MB.
    far, near = np.log2(1.75), np.log2(0.5)
    assert found["log_reuse"][2] == pytest.approx(0.25 * far + 0.5 * near + 0.25 * 12, rel=1e-5)
    assert found["log_nearest_reuse"][2] == pytest.approx(near)
    assert found["cached_0.25"][2] == 0.0
    assert found["cached_1"][2] == pytest.approx(0.5)  # of the 1 MB it reads, b's 0.5 MB
    assert found["cached_4"][2] == pytest.approx(0.75)
    assert found["from_previous"][2] == pytest.approx(0.5)
    assert found["from_kernels"][2] == pytest.approx(0.75)
    assert found["log_reuse"][0] == 12 and found["from_kernels"][0] == 0  # arguments of the program


def test_next_use_working_sets_and_memory(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    assert found["log_next_use"][0] == pytest.approx(np.log2(1.5))  # b lies in between
    assert found["log_next_use"][1] == -12  # at once
    assert found["log_next_use"][2] == 12  # never
    assert found["log_program_bytes"][0] == pytest.approx(np.log2(0.5 + 1.5 + 1.25))
    assert found["log_peak_memory"][0] == pytest.approx(2.0)


def test_position_and_share(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    np.testing.assert_allclose(found["time_before"], [0.0, 0.25, 0.75], atol=1e-6)
    np.testing.assert_allclose(np.exp(found["log_share"]), [0.25, 0.5, 0.25], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found["log_previous"]), [1.0, 0.5, 2.0], rtol=1e-5)
    np.testing.assert_allclose(found["is_gemm"], [0, 0, 1])
    np.testing.assert_allclose(found["log_ratio"], np.log(1 / 2), rtol=1e-5)


def test_kernels_beside_each_other(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    # On two workers a and b start together: a is never alone, b for half of its time, c always.
    found = columns(chain(make_kernel), cpu, [1e-5, 2e-5, 1e-5])
    np.testing.assert_allclose(found["beside"], [1.0, 0.5, 0.0], atol=1e-5)
    assert found["overlap"][0] == pytest.approx(1 - 3 / 4)
    gpu = replace(cpu, platform="gpu")
    alone = columns(chain(make_kernel), gpu, [1e-5, 2e-5, 1e-5])["beside"]
    np.testing.assert_allclose(alone, 0.0, atol=1e-6)


def test_loops_have_a_working_set_and_trips(make_kernel: MakeKernel, cpu: DeviceSpec) -> None:
    inside = {"scope": ("while",), "multiplicity": 16.0, "bytes_in": MB / 4}
    kernels = [
        make_kernel("loop", kind="control"),
        make_kernel("x", **inside),
        make_kernel("y", operands=(0, 1), **inside),
        make_kernel("after", bytes_in=7.5 * MB),
    ]
    found = columns(LoweredProgram(kernels, "xla", "cpu"), cpu, [0.0, 1e-6, 1e-6, 1e-6])
    np.testing.assert_allclose(found["log_loop_bytes"], [3, -1, -1, 3])  # 8 MB, 0.5 MB
    np.testing.assert_allclose(found["log_multiplicity"], [0, 4, 4, 0])
    np.testing.assert_allclose(found["loop_depth"], [0, 1, 1, 0])


def test_empty_program(cpu: DeviceSpec) -> None:
    found = context_features(np.zeros(0), np.zeros(0), LoweredProgram([], "xla", "cpu"), cpu)
    assert found.shape == (0, len(CONTEXT))
