"""Interval ends of operator models."""

import json

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.models.operators.devices import chip_of, twins
from opcast.models.operators.prediction import (
    BINS,
    FOREIGN,
    NEW_GROUP,
    UNSEEN,
    DeviceIntervals,
)
from opcast.models.trust.calibrator import LEAST_SETS, MIN_SCORES, UNCALIBRATED, ends


def scored(n, seed=0, spread=0.1):
    """Scores that are three times as wide for long kernels."""
    rng = np.random.default_rng(seed)
    predicted = np.exp(rng.uniform(np.log(1e-6), np.log(1e-3), n))
    wide = np.where(predicted > 3e-5, 3.0, 1.0)
    return rng.normal(size=n) * spread * wide, predicted


def test_bins_by_size_cover_what_they_say():
    found = DeviceIntervals()
    found.fit_device("a", *scored(20_000))
    assert len(found.edges["a"]) == BINS - 1 and len(found.ends.ends) == BINS
    scores, predicted = scored(20_000, 1)
    lo, hi = found.of("a", predicted)
    measured = predicted * np.exp(scores)
    inside = (measured >= lo) & (measured <= hi)
    for part in (predicted < 3e-6, predicted > 3e-4):
        assert inside[part].mean() == pytest.approx(0.9, abs=0.02)
    short, long = found.of("a", np.array([2e-6])), found.of("a", np.array([5e-4]))
    assert np.log(long[1] / 5e-4) > 2 * np.log(short[1] / 2e-6)


def test_few_scores_make_one_bin():
    found = DeviceIntervals()
    scores, predicted = scored(MIN_SCORES - 1)
    found.fit_device("a", scores, predicted)
    assert found.edges["a"] == []
    lo, hi = ends(scores)
    low, high = found.of("a", predicted[:3])
    assert low == pytest.approx(predicted[:3] * np.exp(min(lo, 0)))
    assert high == pytest.approx(predicted[:3] * np.exp(max(hi, 0)))


def test_intervals_hold_the_prediction_even_if_all_scores_are_above():
    found = DeviceIntervals()
    scores, predicted = scored(500)
    found.fit_device("a", np.abs(scores) + 0.2, predicted)
    lo, hi = found.of("a", predicted)
    assert (lo <= predicted).all() and (hi > predicted).all()


def test_formats_of_a_device_have_their_own_ends():
    scores, predicted = scored(900)
    dtype = np.repeat(np.array(["bf16", "fp8", "nvfp4"], object), [500, 390, 10])
    scores = scores * np.repeat([1.0, 3.0, 9.0], [500, 390, 10])
    device = np.full(900, "a", object)
    found = DeviceIntervals()
    found.fit_devices(device, dtype, scores, predicted, 10)
    at = np.full(4, 5e-4)
    kinds = np.array(["bf16", "fp8", "nvfp4", "int8"], object)
    known = np.full(4, "known", object)
    lo, hi = found.around(at, device[:4], kinds, known, ())
    width = np.log(hi / lo)
    assert width[1] == pytest.approx(3 * width[0], rel=0.3)
    # Ten scores are too few, as are none: halfway from all formats' ends to an unseen device's.
    every = np.log(np.concatenate(found.of("a", at[:1])) / 5e-4)
    unseen = np.log(np.concatenate(found.of(UNSEEN, at[:1])) / 5e-4)
    assert np.log(np.array([lo[2], hi[2]]) / 5e-4) == pytest.approx((every + unseen) / 2)
    assert (lo[2], hi[2]) == (lo[3], hi[3])
    # A device whose formats were never told apart keeps its ends.
    plain = DeviceIntervals()
    plain.fit_device("a", scores, predicted)
    assert np.array_equal(plain.around(at, device[:4], kinds, known, ()), plain.of("a", at))


def test_unseen_devices_have_the_widest_ends_of_those_left_out():
    found = DeviceIntervals()
    predicted = np.array([1e-5])
    lo, hi = found.of("new", predicted)
    assert np.log(hi / predicted)[0] == pytest.approx(UNCALIBRATED)
    narrow, wide = scored(500)[0], scored(500, 1, 0.3)[0]
    found.fit_unseen({"a": narrow, "b": wide, "c": np.full(MIN_SCORES - 1, 9.0)})
    assert found.ends.ends[UNSEEN, 0] == pytest.approx(ends(wide))
    lo, hi = found.of("new", predicted)
    assert np.log(lo / predicted)[0] == pytest.approx(ends(wide)[0])
    assert np.log(hi / predicted)[0] == pytest.approx(ends(wide)[1])


def test_new_groups_have_the_widest_ends_of_few_that_were_left_out():
    found = DeviceIntervals()
    fast, slow = scored(500)[0] - 0.3, scored(500, 1)[0] + 0.2
    scores = np.concatenate([fast, slow, np.full(MIN_SCORES - 1, 9.0)])
    group = np.repeat(["fast", "slow", "rare"], [500, 500, MIN_SCORES - 1])
    found.fit_groups(scores, group, np.full(len(scores), "a", object))
    lo, hi = ends(fast)[0], ends(slow)[1]
    assert found.ends.ends[NEW_GROUP, 0] == (lo, hi)
    again = DeviceIntervals.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.ends.ends[NEW_GROUP, 0] == (lo, hi)


def test_new_groups_of_a_device_with_many_have_its_own_ends():
    """Groups of device ``b`` differ ten times as much as those of ``a``."""
    rng, found = np.random.default_rng(3), DeviceIntervals()
    offset = np.concatenate([0.02 * rng.normal(size=LEAST_SETS), 0.2 * rng.normal(size=LEAST_SETS)])
    device = np.repeat(["a", "b"], 50 * LEAST_SETS).astype(object)
    found.fit_groups(np.repeat(offset, 50), np.repeat(np.arange(len(offset)), 50), device)
    again = DeviceIntervals.from_dict(json.loads(json.dumps(found.to_dict())))
    lo, hi = again.of_new_groups(np.array(["a", "b", "c"], object), np.ones(3))
    first, second = np.sort(offset[:LEAST_SETS]), np.sort(offset[LEAST_SETS:])
    assert np.log(lo[:2]) == pytest.approx([first[0], second[0]])
    assert np.log(hi[:2]) == pytest.approx([first[-1], second[-1]])
    # Others go by all 38 groups and a new one beyond them, of which 5 % are less than two.
    assert np.log(hi[2]) == pytest.approx(np.sort(offset)[-1])


def test_widened_ends_leave_room_for_one_more_chip():
    scores = {"a": scored(500)[0] + 0.5, "b": scored(500, 1)[0] + 0.5}
    plain, wider = DeviceIntervals(), DeviceIntervals()
    plain.fit_unseen(scores)
    wider.fit_unseen(scores, widened=True)
    first, ends = plain.ends.ends[UNSEEN, 0], wider.ends.ends[UNSEEN, 0]
    # Both chips are slower than predicted; the next one may be faster by a third of that.
    assert ends[1] == pytest.approx(1.15 * first[1])
    assert ends[0] == pytest.approx(min(1.15 * first[0], -ends[1] / 3))
    assert wider.ends.ends[FOREIGN, 0] == ends


def test_round_trip():
    found = DeviceIntervals()
    found.fit_device("a", *scored(800))
    found.fit_unseen({"a": scored(800)[0]})
    again = DeviceIntervals.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    predicted = scored(50, 4)[1]
    for device in ("a", "new"):
        assert np.array_equal(again.of(device, predicted), found.of(device, predicted))


def test_twins_share_a_chip():
    chips = {"h100": ("hopper", 132, 128), "h200": ("hopper", 132, 128)}
    chips |= {"a100": ("ampere", 108, 128), "a30": ("ampere", 56, 128)}
    assert twins(tuple(chips), chips) == [("h100", "h200"), ("a100",), ("a30",)]


def test_revisions_of_a_design_with_more_cores_are_twins():
    names = ("b200", "a100-sxm-80gb", "gb200", "rtx-pro-6000", "b300")
    chips = {name: chip_of(find_device(name)) for name in names}
    assert twins(names, chips) == [
        ("b200", "gb200", "b300"),
        ("a100-sxm-80gb",),
        ("rtx-pro-6000",),
    ]
