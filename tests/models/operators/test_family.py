"""A family's model on data drawn from the physics, with a factor of each device."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, ModelError
from opcast.features.operators import op_features
from opcast.features.operators.columns import OpRows
from opcast.models.adapt.covariance import time_shares
from opcast.models.core.store import OPERATORS
from opcast.models.operators import OpModel
from opcast.models.operators.family import FamilyModel
from opcast.models.operators.family_tables import FamilySettings
from opcast.models.operators.model import default_settings
from opcast.models.operators.prediction import least_s
from opcast.models.trust.calibrator import Calibrator

from ...support.cases import later

FAMILY = "kernel/linear"
FEW = {"rounds": 60, "max_depth": 4, "learning_rate": 0.15, "stop_rounds": 0, "compact": True}
SETTINGS = FamilySettings("xgboost", FEW, {**FEW, "rounds": 40})
#: Log-factors of compute, memory and launch.
EFFECT = {
    "a": (0.3, 0.1, 0.0), "b": (0.1, 0.2, 0.1), "c": (0.2, 0.0, -0.1),
    "a-twin": (0.3, 0.1, 0.0), "new": (0.2, 0.1, 0.0), "slow": (0.46, 0.36, 0.26),
}  # fmt: skip


@pytest.fixture(scope="module")
def chips(round_gpu):
    a = round_gpu("a")
    faster = (a.levels[0], dataclasses.replace(a.levels[1], bandwidth=1.4e12))
    twin = dataclasses.replace(a, name="a-twin", levels=faster)
    others = {"b": 60, "c": 140, "new": 80, "slow": 80}
    return {"a": a, "a-twin": twin} | {n: round_gpu(n, core_count=k) for n, k in others.items()}


@pytest.fixture(scope="module")
def measured(op_rows, chips):
    """Rows of a device with labels: the physics, its effects, a bend and 3 % of noise."""

    def rows(device, n, seed=0, family=FAMILY):
        found = op_rows(family, n, seed).assign(device=device)
        features = op_features(found, family, chips)
        bend = 0.1 * np.sin(np.log(found["m"].to_numpy()))
        noise = 0.03 * np.random.default_rng(seed + 1000).normal(size=n)
        ratio = time_shares(features) @ np.array(EFFECT[device]) + bend + noise
        return found.assign(latency_us=features.base_s * np.exp(ratio) * 1e6)

    return rows


@pytest.fixture(scope="module")
def training(measured):
    return pd.concat([measured(d, 900, i) for i, d in enumerate("abc")], ignore_index=True)


def settings(family):
    return SETTINGS


@pytest.fixture(scope="module")
def fitted(training, chips):
    few = training.iloc[:50].assign(key="kernel/norm")
    told = {}
    found = OpModel().fit(
        pd.concat([training, few]), chips, settings, lambda key, s: told.update({key: s})
    )
    assert list(told) == [FAMILY]
    return found


@pytest.fixture
def bundle(fitted):
    """The fitted bundle without corrections."""
    fitted.families[FAMILY].corrections.clear()
    fitted.devices = {name: fitted.devices[name] for name in "abc"}
    return fitted


@pytest.fixture
def model(bundle):
    return bundle.families[FAMILY]


def error(prediction, rows):
    return np.abs(prediction.latency * 1e6 / rows["latency_us"].to_numpy() - 1)


def coverage(prediction, rows):
    measured_s = rows["latency_us"].to_numpy() * 1e-6
    return ((prediction.lo <= measured_s) & (measured_s <= prediction.hi)).mean()


@pytest.mark.parametrize("device", ["a", "b", "c"])
def test_known_devices(model, measured, chips, device):
    rows = measured(device, 400, 50)
    found = model.predict(rows, chips)
    assert set(found.scope) == {"known"}
    assert np.median(error(found, rows)) < 0.05
    assert coverage(found, rows) > 0.8
    assert found.in_domain.mean() > 0.8
    assert (found.lo <= found.latency).all() and (found.latency <= found.hi).all()


def test_an_unseen_device_uses_the_general_model(model, measured, chips):
    rows = measured("new", 400, 51)
    found = model.predict(rows, chips)
    assert set(found.scope) == {"unseen"}
    assert np.median(error(found, rows)) < 0.12
    assert coverage(found, rows) > 0.85
    known = model.predict(rows.assign(device="a"), chips)
    wide = np.log(found.hi / found.lo).mean()
    assert wide > np.log(known.hi / known.lo).mean()


def test_where_no_library_is_named_another_vendors_ratio_does_not_count(model, op_rows, chips):
    rows = op_rows(FAMILY, 60, 7).drop(columns=["backend", "kernel"], errors="ignore")
    devices = {"new": chips["new"]}
    devices["other"] = dataclasses.replace(chips["new"], name="other", vendor="Other")
    base = {n: op_features(rows.assign(device=n), FAMILY, devices).base_s for n in devices}
    found = {name: model.predict(rows.assign(device=name), devices) for name in devices}
    assert model.named == ()
    assert found["other"].latency == pytest.approx(base["other"])
    assert (found["new"].latency > 1.05 * base["new"]).mean() > 0.5
    assert (found["other"].scope == "unseen").all()
    # Its calibration starts from the same estimate.
    slow = rows.assign(device="other", latency_us=2e6 * base["other"])
    assert model.site_errors(slow, devices)[1] == pytest.approx(np.log(2.0))


def test_a_sibling_is_predicted_as_its_twin(model, measured, chips):
    rows = measured("a-twin", 400, 52)
    found = model.predict(rows, chips)
    assert set(found.scope) == {"sibling"}
    assert np.median(error(found, rows)) < 0.06
    same = {**chips, "a-twin": dataclasses.replace(chips["a"], name="a-twin")}
    twin, known = model.predict(rows, same), model.predict(rows.assign(device="a"), chips)
    assert (twin.latency == known.latency).all()
    assert (twin.lo <= known.lo).all() and (twin.hi >= known.hi).all()


def test_a_siblings_interval_is_never_inside_its_twins(model, measured, chips, monkeypatch):
    """At sizes where the known device errs more than unseen devices do on average."""
    rows = measured("a-twin", 40, 52)
    own = model.intervals
    known = {key: (-2.0, 2.0) for key in own.ends.ends if key[0].split("|")[0] == "a"}
    ends = {**own.ends.ends, **known}
    wide = dataclasses.replace(own, ends=Calibrator(ends))
    monkeypatch.setattr(model, "intervals", wide)
    assert own.ends.ends["", 0][0] > -2.0 and own.ends.ends["", 0][1] < 2.0
    found = model.predict(rows, chips)
    # Arithmetic and bytes hold lower ends.
    least = least_s(FAMILY, OpRows.of(rows), model.features(OpRows.of(rows), chips), chips)
    wanted = found.latency * np.exp(-2.0)
    assert (wanted > least).any() and (wanted < least).any()
    assert found.lo == pytest.approx(np.maximum(wanted, least))
    assert found.hi == pytest.approx(found.latency * np.exp(2.0))


def test_devices_may_be_mixed(model, measured, chips):
    parts = [measured(d, 30, 53) for d in ("new", "a", "a-twin", "b")]
    mixed = pd.concat(parts, ignore_index=True).sample(frac=1, random_state=0)
    found = model.predict(mixed, chips)
    for part in parts:
        device = part["device"][0]
        alone = model.predict(part, chips)
        at = np.flatnonzero(mixed["device"] == device)
        order = mixed.index[at] % 30
        assert found.latency[at] == pytest.approx(alone.latency[order], rel=1e-9)
        assert (found.scope[at] == alone.scope[order]).all()


def test_far_outside_is_not_in_the_domain(model, measured, chips):
    rows = measured("a", 20, 54)
    far = model.predict(rows.assign(m=2_000_000, n=2_000_000, k=1), chips)
    assert not far.in_domain.any()
    assert np.isfinite(far.latency).all() and (far.latency > 0).all()


def test_intervals_widen_outside_the_domain(model, measured, chips):
    rows = measured("a", 50, 12)
    far = model.predict(rows.assign(m=2_000_000, n=2_000_000, k=1), chips)
    near = model.predict(rows, chips)
    lo, hi = model.intervals.of("a", far.latency)
    wide_lo, wide_hi = model.intervals.of("", far.latency)
    assert far.lo == pytest.approx(np.minimum(lo, np.sqrt(lo * wide_lo)))
    assert far.hi == pytest.approx(np.maximum(hi, np.sqrt(hi * wide_hi)))
    assert np.median(far.hi / far.lo) > np.median(near.hi / near.lo)


def test_large_products_extrapolate_by_their_slopes(model, measured, chips):
    """Compute alone takes the time of these; its factor on ``b`` is exp(0.1)."""
    rows = measured("b", 5, 55).assign(m=30_000, n=30_000, k=30_000)
    base = op_features(rows, FAMILY, chips).base_s
    found = model.predict(rows, chips)
    assert found.latency / base == pytest.approx(np.exp(0.1) * np.ones(5), rel=0.15)


@pytest.mark.parametrize(("samples", "left"), [(10, 0.5), (100, 0.35)])
def test_calibration_removes_a_bias(model, measured, chips, samples, left):
    """``slow`` is 30 % slower than ``new``, about which the general model was nearly right."""
    rows = measured("slow", 400, 56)
    before = error(model.predict(rows, chips), rows)
    model.calibrate("slow", measured("slow", samples, 57), chips)
    after = model.predict(rows, chips)
    assert set(after.scope) == {"calibrated"}
    assert before.mean() > 0.15
    assert error(after, rows).mean() < left * before.mean()
    assert coverage(after, rows) > 0.85
    other = measured("new", 20, 58)
    assert set(model.predict(other, chips).scope) == {"unseen"}
    plain = model.predict(rows, chips, corrected=False)
    assert error(plain, rows) == pytest.approx(before)


def test_few_samples_leave_no_wider_an_interval_than_they_need(model, measured, chips):
    """An odd sample sets the posterior's scale; the ends of an unseen device hold it sooner."""
    rows, samples = measured("slow", 400, 56), measured("slow", 10, 64)
    samples.loc[0, "latency_us"] *= 1.8
    before = model.predict(rows, chips, corrected=False)
    correction = model.calibrate("slow", samples, chips)
    after = model.predict(rows, chips)
    low, high = np.log(before.lo / before.latency), np.log(before.hi / before.latency)
    wide = correction.widening(low, high)
    assert wide.min() > 1
    above, below = np.log(after.hi / after.latency), np.log(after.lo / after.latency)
    assert (above <= high * wide + 1e-9).all() and (below >= low * wide - 1e-9).all()
    # The posterior alone is symmetric.
    assert (above < -below - 1e-6).any() or (above > -below + 1e-6).any()
    assert coverage(after, rows) > 0.85


def test_calibration_without_signal_changes_little(model, measured, chips):
    rows = measured("a", 300, 59)
    before = model.predict(rows, chips)
    samples = measured("a", 60, 60)
    exact = model.predict(samples, chips).latency * 1e6
    model.calibrate("a", samples.assign(latency_us=exact), chips)
    assert model.predict(rows, chips).latency == pytest.approx(before.latency, rel=1e-6)


def test_left_out_devices_are_reported(model):
    assert set(model.left_out) == {"a", "b", "c"}
    assert all(0 < found["median"] < 0.3 for found in model.left_out.values())


def test_an_unfitted_model_says_so(measured, chips):
    with pytest.raises(ModelError, match="kernel/linear has not been fitted"):
        FamilyModel(FAMILY).predict(measured("a", 3), chips)


@pytest.mark.parametrize("name", [later("gnn-flax"), "gnn-pyg"])
def test_graph_networks_read_the_kernels(name, training, measured, chips):
    # Small in all: what takes long is compiling Flax's for each size of a batch.
    brief = {"epochs": 1, "hidden": 8, "rounds": 1, "head": 16, "layers": 1, "batch": 32}
    settings = FamilySettings(name, brief, brief, max_rows=150)
    model = FamilyModel(FAMILY, settings).fit(training.iloc[::9], chips)
    rows = measured("a", 20)
    found = model.predict(rows, chips)
    assert np.isfinite(found.latency).all() and (found.latency > 0).all()
    again = model.predict(rows.iloc[::-1], chips)
    assert again.latency[::-1] == pytest.approx(found.latency, rel=1e-4)


def test_a_row_without_the_kernels_name_is_outside(training, measured, chips):
    """All training rows say which kernel runs them, so a row that does not may be any of them."""
    some = training.iloc[::3]
    named = [rows.assign(kernel="cutlass") for rows in (some, measured("a", 30, 63))]
    model = FamilyModel(FAMILY, SETTINGS).fit(named[0], chips)
    assert "kernel" in model.named
    known = model.predict(named[1], chips)
    half = named[1].assign(kernel=np.where(np.arange(30) < 15, "cutlass", ""))
    found = model.predict(half, chips)
    assert found.in_domain[:15].tolist() == known.in_domain[:15].tolist()
    assert not found.in_domain[15:].any()
    assert found.lo[:15] == pytest.approx(known.lo[:15])
    assert (found.hi / found.lo)[15:].min() > (known.hi / known.lo)[15:].max()
    assert not model.predict(named[1].drop(columns="kernel"), chips).in_domain.any()


def test_layers_that_a_device_has_not_seen_have_the_ends_of_layers_left_out(op_rows, chips):
    """Four layers, one of which takes 1.6 times as long: a fifth may do so, too."""
    slower = np.array([1.0, 1.0, 1.0, 1.6])

    def layers(device, n, seed, of):
        which = np.arange(n) % len(of)
        rows = op_rows(FAMILY, n, seed).assign(device=device, b=1, k=1024, n=np.array(of)[which])
        noise = np.exp(0.02 * np.random.default_rng(seed).normal(size=n))
        seconds = op_features(rows, FAMILY, chips).base_s * slower[which % 4] * noise
        return rows.assign(latency_us=1e6 * seconds)

    sizes = [512, 1024, 2048, 4096]
    table = pd.concat([layers("a", 800, 1, sizes), layers("b", 800, 2, sizes[1:])])
    model = FamilyModel(FAMILY, SETTINGS).fit(table, chips)
    assert len(model.groups) == 7
    rows = pd.concat([layers("a", 40, 3, sizes[:1]), layers("b", 40, 3, sizes[:1])])
    found = model.predict(rows, chips)
    above = np.log(found.hi / found.latency)
    assert above[:40].max() < 0.2 < 0.4 < above[40:].min()


# The bundle


def test_round_trip(bundle, measured, chips, tmp_path):
    bundle.info = {"dataset": "made up"}
    assert bundle.calibrate(measured("slow", 60, 61).assign(device="t4")) == {f"{FAMILY} @ t4": 60}
    bundle.save(tmp_path / "m")
    loaded = OpModel.load(tmp_path / "m")
    assert loaded.info == bundle.info
    assert loaded.devices == bundle.devices
    rows = pd.concat([measured(d, 40, 62) for d in "abc"], ignore_index=True)
    for part in (rows, rows.assign(device="t4"), rows.assign(device="h100-sxm")):
        left, right = loaded.predict(part), bundle.predict(part)
        for name in ("latency", "lo", "hi", "roofline"):
            assert getattr(left, name) == pytest.approx(getattr(right, name), rel=1e-3)
        for name in ("bound", "scope", "in_domain"):
            assert (getattr(left, name) == getattr(right, name)).all()
    assert set(loaded.predict(rows.assign(device="t4")).scope) == {"calibrated"}
    assert not OpModel.load(tmp_path / "m", only=["graph/moe"]).families
    loaded.save(tmp_path / "again")
    again = OpModel.load(tmp_path / "again")
    assert (again.predict(rows).latency == loaded.predict(rows).latency).all()


def test_families_with_few_rows_are_left_out(bundle, measured):
    assert set(bundle.families) == {FAMILY}
    with pytest.raises(ModelError, match=r"knows no operators 'kernel/norm' .*kernel/linear"):
        bundle.predict(measured("a", 3).assign(key="kernel/norm"))
    with pytest.raises(ModelError, match="no family of operators has 200 rows"):
        OpModel().fit(measured("a", 100), bundle.devices, settings)


def test_faulty_rows_are_left_out(chips, measured):
    p4 = dataclasses.replace(chips["b"], name="p4")
    rows = measured("a", 100).assign(key="eager/linear", device="p4", split="train")
    with pytest.raises(ModelError, match="no family"):
        OpModel().fit(pd.concat([rows] * 3, ignore_index=True), {"p4": p4}, settings)


@pytest.mark.parametrize("value", [0.0, -3.0, np.nan, np.inf])
def test_samples_need_a_latency(bundle, measured, value):
    rows = measured("new", 5, 63).assign(device="l4")
    rows.loc[2, "latency_us"] = value
    with pytest.raises(DatasetError, match=r"row X2: .*latency_us"):
        bundle.calibrate(rows)
    assert "l4" not in bundle.families[FAMILY].corrections


@pytest.fixture
def folder(bundle, tmp_path):
    bundle.save(tmp_path / "m")
    return tmp_path / "m"


def test_damaged_folders(folder, tmp_path):
    with pytest.raises(ModelError, match="nothing"):
        OpModel.load(tmp_path / "nothing")
    trees = next(folder.rglob("joint*"))
    whole = trees.read_bytes()
    trees.write_bytes(whole[:-9])
    with pytest.raises(ModelError):
        OpModel.load(folder)
    trees.unlink()
    with pytest.raises(ModelError):
        OpModel.load(folder)
    trees.write_bytes(whole)
    assert OpModel.load(folder).families
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    for damaged in (
        text.replace(f'"kind": "{OPERATORS}"', '"kind": "kernels"'),
        text.replace('"slopes"', '"slope"'),
        text.replace('"families"', '"family"'),
        text[:-30],
    ):
        assert damaged != text
        manifest.write_text(damaged)
        with pytest.raises(ModelError):
            OpModel.load(folder)


def test_default_settings():
    found = default_settings(seed=3, max_rows=10, rounds=5)("graph/moe")
    assert (found.estimator, found.seed, found.max_rows) == ("xgboost", 3, 10)
    assert found.known["rounds"] == found.general["rounds"] == 5
    assert found.known["max_depth"] > found.general["max_depth"]
    assert found.known["compact"] and found.known["stop_rounds"] == 0


def test_large_batches_on_several_threads_are_as_small_ones(bundle, measured, monkeypatch):
    rows = pd.concat([measured("a", 300, 81), measured("b", 300, 82)], ignore_index=True)
    whole = bundle.predict(rows)
    monkeypatch.setattr("opcast.models.operators.model.TASK_ROWS", 100)
    monkeypatch.setattr("opcast.models.operators.model.usable_cores", lambda: 3)
    for threads in ("", "1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        parts = bundle.predict(rows)
        for name in parts.__slots__:
            assert (getattr(parts, name) == getattr(whole, name)).all(), name
