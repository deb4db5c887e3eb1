"""Widened intervals, unknown kernels, overheads of programs."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.models.core.base import KernelPrediction
from opcast.models.gpu.estimator import unknown
from opcast.models.gpu.operator_library import widened
from opcast.models.program.program_model import ProgramModel
from opcast.models.program.schedule_cost import Overhead, ScheduleCost


def cost(total: float, concentration: float) -> ScheduleCost:
    return ScheduleCost(
        total, total, total, executions=10, gaps=10e-6, floors=0.0, dispatch=20e-6, loop_share=0.0,
        iterations=1.0, shares=(1.0,) + (0.0,) * 9, concentration=concentration,
    )  # fmt: skip


def test_independent_errors_add_in_squares() -> None:
    one = np.ones(1)
    found = KernelPrediction.around(one, (-0.3, 0.3), "roofline", one > 0)
    found = widened(found, 2 * one, 0.4, "learned:x")
    assert found.source[0] == "learned:x" and found.in_domain[0]
    assert found.lo[0] == pytest.approx(2 * np.exp(-0.5))
    assert found.hi[0] == pytest.approx(2 * np.exp(0.5))


def test_unknown_kernels_may_take_far_longer() -> None:
    found = unknown(np.array([1e-6]))
    assert found.hi[0] / found.latency[0] == pytest.approx(16)
    assert found.latency[0] / found.lo[0] == pytest.approx(4)
    assert found.source[0] == "roofline" and not found.in_domain[0]


def test_a_program_waits_for_half_of_the_gaps() -> None:
    overhead = Overhead(correlation=0.5)
    assert overhead.wall(cost(1e-3, 1.0)) == pytest.approx(1e-3 + 5e-6 + 20e-6)


def test_errors_of_many_kernels_partly_cancel() -> None:
    # Ten equal kernels: sqrt(0.5 + 0.5 · 0.1) = 0.742 of the errors, and half of the gaps.
    own, low, high = cost(1e-3, 0.1), cost(0.8e-3, 0.1), cost(1.4e-3, 0.1)
    lo, hi = Overhead(correlation=0.5).ends(own, low, high)
    wall = 1e-3 + 5e-6 + 20e-6
    assert lo == pytest.approx(wall - 0.5500**0.5 * 0.2e-3 - 5e-6)
    assert hi == pytest.approx(wall + 0.5500**0.5 * 0.4e-3 + 5e-6)


def test_overheads_are_kept() -> None:
    model = ProgramModel()
    model.overheads["gpu"] = Overhead(gap=0.25, correlation=0.3)
    again = ProgramModel.from_dict(model.to_dict())
    assert again.overheads == model.overheads and not again.corrections
