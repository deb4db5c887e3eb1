"""Linear effects of compute, memory and launch."""

import json

import numpy as np
import pytest

from opcast.models.operators.devices import RIDGE, DeviceEffects

GENERAL = np.array([0.3, -0.2, 0.1])
DEVICE = {"a": np.array([0.4, 0.0, -0.3]), "b": np.array([-0.4, 0.0, 0.3])}
LIBRARY = {("a", "y"): np.array([0.0, 0.5, 0.0])}


def drawn(n=40_000, seed=0):
    rng = np.random.default_rng(seed)
    share = rng.dirichlet([0.7, 0.7, 0.7], n)
    device, library = rng.choice(["a", "b"], n), rng.choice(["x", "y"], n)
    own = np.array(
        [DEVICE[d] + LIBRARY.get((d, v), 0) for d, v in zip(device, library, strict=True)]
    )
    ratio = ((GENERAL + own) * share).sum(axis=1)
    return share, ratio + 0.05 * rng.normal(size=n), device, library, ratio


def test_recovers_known_effects():
    share, noisy, device, library, ratio = drawn()
    effects = DeviceEffects().fit(share, noisy, device, library)
    assert effects.predict(share, device, library) == pytest.approx(ratio, abs=0.02)
    total = effects.table[""] + effects.table["a"] + effects.table["a\ty"]
    assert total == pytest.approx(GENERAL + DEVICE["a"] + LIBRARY["a", "y"], abs=0.02)


def test_extrapolates_to_pure_limits():
    """Where one limit takes all the time, its effect holds however large the kernel."""
    share, noisy, device, library, _ = drawn()
    mixed = share.max(axis=1) < 0.8
    effects = DeviceEffects().fit(share[mixed], noisy[mixed], device[mixed], library[mixed])
    found = effects.predict(np.eye(3), np.array(["b"] * 3), np.array(["x"] * 3))
    assert found == pytest.approx(GENERAL + DEVICE["b"], abs=0.03)


def test_a_ridge_by_hand():
    """Rows of pure compute and ratio 1: ``n / (n + RIDGE)`` of it, and so on with what is left."""
    n = 60
    share = np.tile([1.0, 0.0, 0.0], (n, 1))
    name = np.full(n, "a")
    effects = DeviceEffects().fit(share, np.ones(n), name, name)
    taken = n / (n + RIDGE)
    assert effects.table[""] == pytest.approx([taken, 0, 0])
    assert effects.table["a"] == pytest.approx([taken * (1 - taken), 0, 0])
    found = effects.predict(share[:1], name[:1], name[:1])
    assert found == pytest.approx([1 - (1 - taken) ** 3])


def test_what_was_not_seen_falls_back():
    share, noisy, device, library, _ = drawn(4000)
    effects = DeviceEffects().fit(share, noisy, device, library)
    one, at = share[:5], effects.table
    new = np.full(5, "new")
    assert effects.predict(one, new, new) == pytest.approx(one @ at[""])
    assert effects.predict(one, np.full(5, "a"), new) == pytest.approx(one @ (at[""] + at["a"]))
    assert (DeviceEffects().predict(one, new, new) == 0).all()
    both = np.array(["a", "a", "new"]), np.array(["x", "new", "x"])
    assert effects.knows(*both).tolist() == [True, False, False]


def test_saved_as_plain_data():
    share, noisy, device, library, _ = drawn(2000)
    effects = DeviceEffects().fit(share, noisy, device, library)
    again = DeviceEffects.from_dict(json.loads(json.dumps(effects.to_dict())))
    expected = effects.predict(share, device, library)
    assert again.predict(share, device, library) == pytest.approx(expected, abs=5e-5)
    assert again.to_dict() == effects.to_dict()
