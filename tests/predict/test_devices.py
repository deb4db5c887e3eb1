import json

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
