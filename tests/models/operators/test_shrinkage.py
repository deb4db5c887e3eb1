"""Shrinkage of learned ratios by number of chips, and which known device stands for another."""

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.models.operators.devices import KnownDevices
from opcast.models.operators.family_tables import constants
from opcast.models.operators.regressors import chips_by_library, shrinkage


def test_chips_are_counted_by_library():
    library = np.array(["a", "a", "a", "b"], object)
    chip = np.array(["x", "y", "x", "x"], object)
    assert chips_by_library(library, chip) == {"a": 2, "b": 1}


def test_shrinkage_eases_with_chips_and_unknown_libraries_keep_the_least():
    seen = {"one": 1, "two": 2, "many": 9}
    found = shrinkage(np.array(["none", "one", "two", "many"], object), seen)
    assert found.tolist() == constants()["shrinkage"]
    assert (np.diff(found) >= 0).all()


def test_shrinkage_of_no_rows_is_empty():
    assert len(shrinkage(np.array([], object), {})) == 0


@pytest.fixture(scope="module")
def known_devices():
    names = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "arc-b60")
    return KnownDevices.of({name: find_device(name) for name in names})


def test_foreign_devices_are_those_of_rarer_vendors(known_devices):
    assert known_devices.foreign == ["arc-b60"]


def test_rows_of_rarer_vendors_teach_nothing_where_two_chips_remain(known_devices):
    device = np.array(["h100-sxm", "arc-b60"], object)
    assert known_devices.native(device).tolist() == [True, False]
    few = KnownDevices.of({name: find_device(name) for name in ("h100-sxm", "h200-sxm", "arc-b60")})
    assert few.native(device).tolist() == [True, True]


def test_twins_share_the_name_of_their_chip(known_devices):
    a100, h100, h200 = known_devices.chip_names(
        np.array(["a100-sxm-80gb", "h100-sxm", "h200-sxm"], object)
    )
    assert h100 == h200 != a100


@pytest.mark.parametrize(
    ("device", "stands_for", "scope"),
    [
        ("h200-sxm", "h200-sxm", "known"),
        ("a100-pcie-40gb", "a100-sxm-80gb", "sibling"),
        ("b200", "b200", "unseen"),
    ],
)
def test_stand_ins(known_devices, device, stands_for, scope):
    names, scopes = known_devices.proxies(np.array([device], object), {device: find_device(device)})
    assert (names[0], scopes[0]) == (stands_for, scope)


def test_unseen_device_of_a_rarer_vendor_is_like_its_known_one():
    known_devices = KnownDevices.of(
        {name: find_device(name) for name in ("v100-pcie", "p100", "mi100")}
    )
    names, scopes = known_devices.proxies(
        np.array(["mi210"], object), {"mi210": find_device("mi210")}
    )
    assert (names[0], scopes[0]) == ("mi100", "unseen")
