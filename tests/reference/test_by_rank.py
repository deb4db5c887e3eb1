"""The composition against every rank and message, for the same operators and links."""

import pytest

from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import parse_plan, resolved

from .by_rank import LayerSeconds, Wire, step_by_rank
from .rank_check import PLANS, compare_ranks


def slow_and_fast_links():
    """Every plan at one of two bandwidths, in turn; at the other one among all tests only."""
    for place, text in enumerate(PLANS):
        for turn, bandwidth in enumerate((20e9, 200e9)):
            marks = [pytest.mark.exhaustive] if (place + turn) % 2 else []
            yield pytest.param(text, bandwidth, marks=marks)


@pytest.mark.parametrize(("text", "bandwidth"), [*slow_and_fast_links()])
def test_composition_is_within_three_per_cent_of_every_message(text, bandwidth):
    assert abs(compare_ranks(text, Wire(2e-6, bandwidth)).error) < 0.03


def test_rings_by_hand():
    wire = Wire(1.0, 8.0)
    # Three ranks, 24 bytes: messages of 8 bytes take 2 s, two rounds of two.
    layer = LayerSeconds(1.0, 2.0, reduce=24.0)
    plan = resolved(make_workload("llama", {"batch": 3}), parse_plan("dp=3"), 3)
    assert step_by_rank(plan, [[layer]], wire, 0.0, 5.0) == 1 + 2 + 2 * 2 * (1 + 1) + 5
