"""Kernels of the lowering ``fused`` beside those that XLA's GPU compiler made (H100)."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.process import CompileSettings
from opcast.features.table.roofline import roofline

from ...fused_programs import DATA, PROGRAMS, text_of

H100 = find_device("h100-sxm")
#: As the modules were compiled: products are the libraries'.
SETTINGS = CompileSettings(flags={"xla_gpu_enable_triton_gemm": False})


def totals(lowered):
    kernels = [k for k in lowered.kernels if k.takes_time]
    times = np.array([k.multiplicity for k in kernels])
    seconds = roofline(kernels, H100).latency_s + H100.floor
    columns = (
        np.ones(len(kernels)),
        np.array([k.bytes for k in kernels]),
        np.array([k.flops for k in kernels]),
        seconds,
    )
    return np.array([times @ column for column in columns])


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_bytes_flops_and_time_are_the_compilers(name):
    real = totals(lower((DATA / f"{name}.hlo").read_text(), "xla"))
    ours = totals(lower(text_of(name), "fused", device=H100, settings=SETTINGS))
    kernels, moved, flops, seconds = ours / real
    assert kernels == pytest.approx(1.0, abs=0.15)
    assert moved == pytest.approx(1.0, abs=0.10)
    assert flops == pytest.approx(1.0, abs=0.03)
    assert seconds == pytest.approx(1.0, abs=0.12)  # of 18 launches in mlp_step 16 are found


@pytest.mark.parametrize("name", ["mlp_forward", "attention", "residual_block"])
def test_the_same_kinds_of_kernels_run_in_the_same_numbers(name):
    real = lower((DATA / f"{name}.hlo").read_text(), "xla")
    ours = lower(text_of(name), "fused", device=H100, settings=SETTINGS)
    for kind in ("gemm", "conv", "reduce"):
        assert sum(k.kind == kind for k in ours.kernels) == sum(
            k.kind == kind for k in real.kernels
        )
