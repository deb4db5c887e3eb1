"""The stake against a promise: by hand, its rate of false alarms, and what it notices."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.workflows.measured.drift import TOLERATED, alarm_after, evidence

BETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


def test_stakes_of_two_groups_by_hand() -> None:
    # Interval 1 to 2. The first group has one of two rows above it, the second none of one.
    measured, groups = np.array([3.0, 1.5, 1.5]), np.array(["a", "a", "b"])
    found = evidence(measured, np.ones(3), np.full(3, 2.0), groups)
    half = TOLERATED / 2
    # Odds: share outside over what is tolerated, less the stake; too slow, too fast, either.
    first = [0.5 / half - 1, -1.0, 0.5 / TOLERATED - 1]
    one = np.array([[1 + odds * bet for bet in BETS] for odds in first])
    two = one * np.array([[1 - bet for bet in BETS]] * 3)
    assert found == pytest.approx([one.mean(), two.mean()])


def test_rows_of_a_group_count_once() -> None:
    many = evidence(np.full(50, 3.0), np.ones(50), np.full(50, 2.0), np.zeros(50))
    one = evidence(np.full(1, 3.0), np.ones(1), np.full(1, 2.0), np.zeros(1))
    assert many == pytest.approx(one) and len(many) == 1


def test_false_alarms_are_as_rare_as_asked() -> None:
    draw = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        # Rows miss a 90 % interval as often as is tolerated at most, 1000 looks at them.
        measured = np.where(draw.random(1000) < TOLERATED, draw.choice([0.0, 3.0], 1000), 1.5)
        stakes = evidence(measured, np.ones(1000), np.full(1000, 2.0), np.arange(1000))
        alarms += alarm_after(stakes, 0.05) > 0
    # Ville's inequality allows 20 of 400.
    assert alarms <= 20


def test_an_alarm_rises_soon_after_a_drift() -> None:
    slow = evidence(np.full(20, 3.0), np.ones(20), np.full(20, 2.0), np.arange(20))
    assert 1 < alarm_after(slow, 1e-3) <= 6
    good = evidence(np.full(500, 1.5), np.ones(500), np.full(500, 2.0), np.arange(500))
    assert alarm_after(good, 0.01) == 0
    assert good[-1] < 1e-3
    # No overflow, however long it lasts.
    assert np.isfinite(evidence(np.full(9000, 3.0), np.ones(9000), np.ones(9000), np.arange(9000)))[
        -1
    ]
