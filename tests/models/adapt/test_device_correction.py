"""Kernel models adapted to a device."""

from pathlib import Path

import numpy as np
import pytest

from opcast.features.dataset import Dataset
from opcast.features.kernels.extract import kernels_from_irs
from opcast.models.adapt.device_correction import DeviceCorrection, kernel_sites
from opcast.models.core.kernel_table import kernel_table
from opcast.models.cost_model import CostModel
from opcast.models.explain import explain_kernels
from opcast.predict.locate import find_model

COMMITTED = Path(__file__).resolve().parents[3] / "datagen" / "datasets" / "cpu"
COUNT = 240


@pytest.fixture(scope="module")
def measured():
    """Kernels of the committed dataset, their device and the shipped model."""
    frame = Dataset.load(COMMITTED).frame
    frame = frame[frame["level"] != "program"].drop_duplicates("kernel_hash")
    kernels = kernels_from_irs(frame["kernel_ir"].sample(COUNT, random_state=0).tolist())
    model = CostModel.load(find_model("default"))
    return kernels, next(iter(model.devices.values())), model


@pytest.fixture(scope="module")
def slower(measured):
    """A correction from half of the kernels, on a device with slower memory and launches."""
    kernels, device, model = measured
    plain = model.estimator.predict(kernels, device)
    table = kernel_table(kernels, device)
    law = kernel_sites(table, device).share @ np.array([0.1, 0.5, 0.4])
    noise = np.random.default_rng(0).normal(0, 0.05, COUNT)
    truth = plain.latency * np.exp(law + noise)
    half = np.arange(COUNT // 2)
    found = model.estimator.predict([kernels[i] for i in half], device)
    return DeviceCorrection.fit(table.take(half), device, found, truth[half]), truth


def test_shares_of_time_add_up(measured):
    kernels, device, _ = measured
    sites = kernel_sites(kernel_table(kernels, device), device)
    assert sites.share.sum(axis=1) == pytest.approx(np.ones(COUNT))
    assert (sites.share >= 0).all()
    assert len(set(sites.fine)) > len(set(sites.coarse)) > 1


def test_the_device_is_learned_from_half_of_the_kernels(measured, slower):
    kernels, device, model = measured
    correction, truth = slower
    rest = slice(COUNT // 2, None)
    plain = model.estimator.predict(kernels[rest], device)
    found = correction.correct(plain, kernels[rest], device)
    before = np.abs(plain.latency / truth[rest] - 1).mean()
    after = np.abs(found.latency / truth[rest] - 1).mean()
    assert after < 0.3 * before
    inside = (truth[rest] >= found.lo) & (truth[rest] <= found.hi)
    assert inside.mean() > 0.8
    assert (found.hi / found.lo).mean() < (plain.hi / plain.lo).mean()


def test_a_calibrated_model_is_saved_explained_and_read_again(measured, slower, tmp_path):
    kernels, device, model = measured
    correction, _ = slower
    plain = model.estimator.predict(kernels[:3], device)
    model.corrections[device.name] = correction
    try:
        model.save(tmp_path / "m")
        found = model.predict_kernels(kernels[:3], device)
        (explained, *_) = explain_kernels(model, kernels[:1], device)
    finally:
        model.corrections.clear()
    again = CostModel.load(tmp_path / "m")
    assert again.corrections[device.name].count == COUNT // 2
    assert again.predict_kernels(kernels[:3], device).latency == pytest.approx(
        found.latency, rel=1e-4
    )
    assert np.abs(np.log(found.latency / plain.latency)).min() > 1e-3
    parts = {c.group: c.log_ratio for c in explained.contributions}
    assert parts["calibration"] == pytest.approx(np.log(found.latency[0] / plain.latency[0]))
    total = explained.baseline + sum(parts.values())
    assert total == pytest.approx(explained.log_ratio, abs=1e-4)


def test_a_factor_is_learned_from_the_kernels_of_one_program(measured):
    """None is left to predict them from if all of the program's are left out at once."""
    kernels, device, model = measured
    few, rest = kernels[:20], kernels[20:60]
    plain = model.estimator.predict(few, device)
    truth = plain.latency * 1.5
    one = np.array(["step"] * len(few))
    table = kernel_table(few, device)
    own = DeviceCorrection.fit(table, device, plain, truth, one)
    found = own.correct(model.estimator.predict(rest, device), rest, device)
    ratio = found.latency / model.estimator.predict(rest, device).latency
    # Most of the way: the process expects errors to be smaller.
    assert 0.6 * np.log(1.5) < np.median(np.log(ratio)) <= np.log(1.5)


def test_few_samples_that_err_more_than_the_interval_widen_it(measured):
    kernels, device, model = measured
    few = kernels[:20]
    plain = model.estimator.predict(few, device)
    half = 0.5 * np.log(plain.hi / plain.lo)
    # Three times as far as the interval reaches, up and down in turn: nothing can be learned.
    truth = plain.latency * np.exp(3 * half * np.where(np.arange(20) % 2, 1, -1))
    own = DeviceCorrection.fit(kernel_table(few, device), device, plain, truth)
    found = own.correct(plain, few, device)
    assert ((truth >= found.lo) & (truth <= found.hi)).mean() >= 0.9


def test_few_samples_keep_the_models_own_intervals(measured):
    kernels, device, model = measured
    few = kernels[:12]
    plain = model.estimator.predict(few, device)
    own = DeviceCorrection.fit(kernel_table(few, device), device, plain, plain.latency)
    found = own.correct(plain, few, device)
    assert found.latency == pytest.approx(plain.latency)
    assert found.hi / found.lo == pytest.approx(plain.hi / plain.lo, rel=1e-3)
    assert own.correct(plain, [], device) is plain
