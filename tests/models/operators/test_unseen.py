"""How the model of unseen devices is chosen, on invented rows with a stand-in for the fits."""

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.models.operators.devices import DeviceEffects, KnownDevices
from opcast.models.operators.family_tables import FamilySettings, constants
from opcast.models.operators.regressors import JUDGE_ROWS, Strategy, UnseenFit, mean_ape

ROWS = 40


class Fits:
    """Stands for ``GeneralFit``: a model fitted to any rows says the same ratio of all others."""

    def __init__(self, device, target, ratio):
        self.device, self.target, self.ratio = device, target, ratio
        self.settings = FamilySettings()
        self.fitted, self.family = [], "linear"

    def fit(self, rows, within):
        self.fitted.append((rows, within))
        return "regressor", DeviceEffects()

    def left_out(self, learn, own, within):
        assert not set(self.device[learn]) & set(self.device[own])
        return np.full(len(own), self.ratio)


def made(names, target, ratio, transferable=None, library=None):
    device = np.repeat(np.array(names, object), ROWS)
    job = Fits(device, np.full(len(device), target), ratio)
    devices = KnownDevices.of({name: find_device(name) for name in names})
    library = np.full(len(device), "lib", object) if library is None else library
    good = np.ones(len(device), bool) if transferable is None else transferable
    fit = UnseenFit(job, devices, library, good, np.random.default_rng(0))
    model, folds = fit.make(np.arange(len(device)))
    return model, folds, job


def test_mean_error_by_hand():
    assert mean_ape(np.log([1.25, 0.5])) == pytest.approx((0.2 + 1.0) / 2)


def test_one_chip_has_nothing_to_leave_out():
    unseen, folds, job = made(["h100-sxm", "h200-sxm"], 0.0, 0.5)
    assert unseen.strategy == Strategy(False, 0.0, True)
    assert folds == {}
    assert unseen.seen == {"lib": 1}
    assert len(job.fitted) == 1


def test_ratios_that_carry_over_are_not_shrunk():
    unseen, folds, _ = made(["h100-sxm", "a100-sxm-80gb", "l4"], 0.5, 0.5)
    assert unseen.strategy.shrunk == 0.0
    assert unseen.seen == {"lib": 3}
    rows, ratio = folds[("l4",)]
    assert len(rows) == min(ROWS, JUDGE_ROWS)
    assert (ratio == 0.5).all()


def test_ratios_that_do_not_carry_over_are_shrunk_as_far_as_is_tried():
    unseen, folds, _ = made(["h100-sxm", "a100-sxm-80gb", "l4"], 0.0, 0.5)
    assert unseen.strategy.shrunk == 12.0
    # Two chips are left when one is left out.
    assert folds[("l4",)][1] == pytest.approx(
        np.full(ROWS, 0.5 * constants()["shrinkage"][2] ** 12)
    )


def test_left_out_chips_say_nothing_of_libraries_that_one_chip_alone_ran():
    """Nine libraries of ten on one chip each: left-out chips would have all ratios shrunk away."""
    library = np.array([f"lib {at % 10} {at // ROWS}" for at in range(3 * ROWS)], object)
    library[np.arange(3 * ROWS) % 10 == 0] = "shared"
    unseen, _, _ = made(["h100-sxm", "a100-sxm-80gb", "l4"], 0.0, 0.5, library=library)
    assert unseen.strategy.shrunk == 1.0


def test_rows_that_mislead_about_other_devices_are_not_learned_from():
    good = np.arange(3 * ROWS) % 4 > 0
    unseen, folds, job = made(["h100-sxm", "a100-sxm-80gb", "l4"], 0.5, 0.5, good)
    assert unseen.seen == {"lib": 3}
    assert sorted(job.fitted[-1][0]) == np.flatnonzero(good).tolist()
    assert all(good[rows].all() for rows, _ in folds.values())
