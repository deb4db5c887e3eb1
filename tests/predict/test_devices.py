import json
from dataclasses import replace

import pytest

from opcast.features.device import local_device_name
from opcast.features.errors import DeviceError
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
