import json
import os
from dataclasses import replace

import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.device import MemoryLevel, local_device_name
from opcast.features.devices.identity import FORMER, Comparison, compare_anchors, with_speed
from opcast.predict.devices import is_known, measured_path, resolve_device


def test_description_passes_through(device):
    assert resolve_device(device, {}) is device


def test_file_is_read(device, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(device.to_json())
    assert resolve_device(path, {}) == device


def test_own_measurement_of_the_local_device_wins(device, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    name = local_device_name()
    data = json.loads(device.to_json()) | {"name": name, "floor": 0.125}
    path = measured_path(name)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    assert resolve_device("local", {name: device}).floor == 0.125


def test_known_devices_are_the_models_and_those_measured_here(device, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    assert is_known(device.name, {device.name: device})
    assert not is_known("abacus", {device.name: device})
    assert not is_known("local", {})
    path = measured_path(local_device_name())
    path.parent.mkdir(parents=True)
    path.write_text(device.to_json())
    assert is_known("local", {})


def test_a_trained_name_does_not_spare_a_measurement_at_hand(device, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    assert not is_known("local", {local_device_name(): device})


@pytest.fixture
def saved(device, predictor, tmp_path, monkeypatch):
    """Saves this machine's measurement: the trained device at a part of its speed."""
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    monkeypatch.setattr("opcast.predict.devices.local_device_name", lambda: device.name)

    def save(factor):
        spec = replace(
            device,
            peak_flops={d: factor * rate for d, rate in device.peak_flops.items()},
            vector_flops={d: factor * rate for d, rate in device.vector_flops.items()},
            levels=tuple(MemoryLevel(x.capacity, factor * x.bandwidth) for x in device.levels),
            extra={"measured_at": "2026-01-02 03:04 UTC"},
        )
        path = measured_path(device.name)
        path.parent.mkdir(parents=True)
        path.write_text(spec.to_json())
        return spec

    return save


def test_this_machine_is_not_the_trained_one_of_its_name(device, predictor, step_file, saved):
    slow = saved(0.5)
    known = predictor.devices
    local = resolve_device("local", known)
    assert local.name == f"{device.name}~104gf-24.1gbs"
    assert local.peak_flops == slow.peak_flops
    # The trained device's name still means that one; the machine's own name finds it, too.
    assert resolve_device(device.name, known) is device
    assert resolve_device(local.name, known) == local

    found = predictor.predict(step_file, device="local")
    assert found.in_domain_share == 0.0
    assert "measures 0.50 x (arithmetic 0.50 x, bandwidth 0.50 x)" in found.notes[-2]
    assert f"{local.name} was measured on 2026-01-02 03:04 UTC" == found.notes[-1]
    narrow = predictor.predict(step_file, device=replace(local, name="elsewhere"))
    assert found.latency_us == narrow.latency_us
    # The lower end of half as fast stops at what no run falls below.
    assert narrow.lo_us / 2 <= found.lo_us < narrow.lo_us
    assert found.hi_us == pytest.approx(narrow.hi_us * 2)
    assert found.kernels[0].hi_us == pytest.approx(narrow.kernels[0].hi_us * 2)
    # A description that goes by the trained name is told apart as well.
    assert predictor.predict(step_file, device=slow).hi_us == found.hi_us


def test_this_machine_is_the_trained_one_if_it_measures_alike(device, predictor, step_file, saved):
    saved(1.1)
    found = predictor.predict(step_file, device="local")
    assert found.device == device.name
    assert found.notes == (f"{device.name} was measured on 2026-01-02 03:04 UTC",)
    assert found.in_domain_share > 0


def test_a_machine_taken_by_its_name_is_told(device, predictor, step_file, monkeypatch, tmp_path):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    monkeypatch.setattr("opcast.predict.devices.local_device_name", lambda: device.name)
    local, named = (predictor.predict(step_file, device=d) for d in ("local", device.name))
    assert (local.latency_us, local.lo_us, local.hi_us) == (
        named.latency_us, named.lo_us, named.hi_us,
    )  # fmt: skip
    assert "by its name only" in local.notes[-1]
    assert named.notes == ()


def test_a_measurement_without_a_date_has_that_of_its_file(device, saved):
    saved(1.0)
    path = measured_path(device.name)
    path.write_text(device.to_json())
    os.utime(path, (86400, 86400))
    assert resolve_device("local", {}).extra["measured_at"] == "1970-01-02 00:00 UTC"


def test_anchors_tell_the_present_speed():
    then = {"gemm": 600.0, "vector": 300.0, "memory": 1000.0, "single": 40.0}
    # Within the spread of readings nothing is said.
    assert not compare_anchors({**then, "gemm": 700.0, "memory": 1200.0}, then).ratios
    now = compare_anchors({"gemm": 1200.0, "vector": 600.0, "memory": 1250.0, "single": 40.0}, then)
    # Of the other classes neither changed by more than readings do.
    assert now.ratios == pytest.approx({"arithmetic": 0.5})
    # An anchor of one time alone does not count; nor does a description without anchors.
    assert set(compare_anchors({"gemm": 1200.0}, then).ratios) == {"arithmetic"}
    assert not compare_anchors({}, then).ratios and not compare_anchors(then, {}).ratios


def test_intervals_hold_the_ceilings_of_earlier_measurements(device, predictor, step_file):
    plain = predictor.predict(step_file, device=device)
    every = ("arithmetic", "single-thread", "bandwidth")
    former = [dict.fromkeys(every, 0.75), dict.fromkeys(every, 1.2)]
    found = predictor.predict(
        step_file, device=replace(device, extra={**device.extra, FORMER: former})
    )
    # The estimate is that of the present ceilings; the ends are at least those of the others'.
    assert found.latency_us == plain.latency_us
    assert found.hi_us > 1.2 * plain.hi_us and found.lo_us < 0.9 * plain.lo_us
    for own, before in zip(found.kernels, plain.kernels, strict=True):
        assert own.latency_us == before.latency_us
        assert own.hi_us == pytest.approx(before.hi_us / 0.75)
        assert own.lo_us == pytest.approx(before.lo_us / 1.2)
    (note,) = set(found.notes) - set(plain.notes)
    assert "0.83 to 1.33 times the time: intervals include them" in note


def test_predictions_follow_the_present_speed(device, predictor, step_file):
    then = predictor.predict(step_file, device=device)
    slow = with_speed(
        device, Comparison(dict.fromkeys(("arithmetic", "bandwidth", "single-thread"), 0.5))
    )
    now = predictor.predict(step_file, device=slow)
    # Every class at half speed: every kernel takes twice the time.
    for kernel, before in zip(now.kernels, then.kernels, strict=True):
        assert kernel.latency_us == pytest.approx(2 * before.latency_us)
        assert kernel.lo_us == pytest.approx(before.lo_us)
        assert kernel.hi_us == pytest.approx(2 * before.hi_us)
    assert now.latency_us > then.latency_us
    assert now.lo_us == pytest.approx(then.lo_us) and now.hi_us > then.hi_us
    assert "this machine runs at 0.50 x (arithmetic 0.50 x" in now.notes[-1]
    # A faster machine keeps the estimate, which is by ceilings that were the best of the time, and
    # the interval reaches down to both speeds; no speed changes nothing.
    fast = predictor.predict(
        step_file,
        device=with_speed(
            device, Comparison(dict.fromkeys(("arithmetic", "bandwidth", "single-thread"), 2.0))
        ),
    )
    assert (fast.latency_us, fast.hi_us) == pytest.approx((then.latency_us, then.hi_us))
    assert fast.lo_us < then.lo_us
    for kernel, before in zip(fast.kernels, then.kernels, strict=True):
        assert kernel.latency_us == before.latency_us
        assert kernel.lo_us == pytest.approx(before.lo_us / 2)
    assert predictor.predict(step_file, device=with_speed(slow, Comparison())).notes == then.notes


def test_speeds_of_a_device_file_that_are_no_numbers_are_ignored(device, predictor, step_file):
    odd = replace(device, extra={"present_speed": {"arithmetic": "fast", "bandwidth": -1}})
    then = predictor.predict(step_file, device=device)
    assert predictor.predict(step_file, device=odd).latency_us == then.latency_us


def test_catalogue_comes_last(device, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    assert resolve_device("NVIDIA H200", {}).name == "h200-sxm"
    trained = replace(device, name="nvidia-h200")
    # What was trained or measured under JAX's name is found under the catalogue's.
    assert resolve_device("h200-sxm", {"nvidia-h200": trained}) is trained
    path = measured_path("nvidia-h200")
    path.parent.mkdir(parents=True)
    path.write_text(replace(trained, floor=0.125).to_json())
    assert resolve_device("h200-sxm", {"nvidia-h200": trained}).floor == 0.125


def test_short_names_find_what_was_measured(device, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path))
    assert resolve_device("v5e", {}).name == "tpu-v5e"
    trained = replace(device, name="rtx-4090")
    assert resolve_device("rtx4090", {"rtx-4090": trained}) is trained
    with pytest.raises(DeviceError, match="h100-nvl, h100-pcie, h100-sxm"):
        resolve_device("h100", {})


def test_yaml_file_is_read(tmp_path):
    path = tmp_path / "chip.yaml"
    path.write_text("name: chip\nbase: h200-sxm\nhbm_bandwidth_gbps: 9600\n")
    assert resolve_device(path, {}).bandwidth == 9600e9


def test_a_catalogue_entry_does_not_spare_a_measurement_at_hand():
    assert not is_known("h100-sxm", {})


@pytest.mark.parametrize(
    ("content", "what"),
    [("{", "not JSON"), ('{"name": "x"}', "incomplete"), ('{"colour": 1}', "incomplete")],
)
def test_bad_files_are_named(content, what, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(DeviceError, match=what) as error:
        resolve_device(path, {})
    assert "bad.json" in str(error.value)


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(DeviceError, match="no such device file"):
        resolve_device(tmp_path / "none.json", {})
    with pytest.raises(DeviceError, match="opcast device --save"):
        resolve_device("abacus", {})
    with pytest.raises(DeviceError, match="h100-sxm"):
        resolve_device("h100-sxn", {})
