"""What a comparison with a run says beside its figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from opcast.features.kernels.kernel import LoweredProgram
from opcast.predict.program.predictor import load
from opcast.workflows.check import CheckedKernel, CheckResult, print_check


@pytest.mark.parametrize(("total_us", "said"), [(250.0, False), (600.0, True)])
def test_a_run_far_beyond_its_kernels_is_told(total_us: float, said: bool) -> None:
    """Two calls of 100 µs each: what another job took is no error of a kernel's prediction."""
    empty = LoweredProgram([], "op", "cpu")
    predictor = load()
    prediction = predictor.predict_lowered(empty, predictor.devices["cpu-amd-epyc-2c"])
    kernel = CheckedKernel("dot.1", "gemm", 2.0, 90.0, 80.0, 120.0, 100.0, "dot at a.py:1")
    found = CheckResult("p", prediction, total_us, 0.9 * total_us, 1.1 * total_us, (kernel,))
    screen = io.StringIO()
    print_check(Console(file=screen, width=200), found)
    assert ("3.0 times as long as the sum of its kernels" in screen.getvalue()) is said
