"""The demonstration: its order, what it prints and what it leaves behind."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from opcast.features.devices.device import local_device_name
from opcast.models.cost_model import CostModel
from opcast.models.tracking.tracked_runs import runs
from opcast.predict.devices import measured_path, shown_devices
from opcast.predict.locate import find_model
from opcast.workflows import demo
from opcast.workflows.profile import local_now


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))
    # No compilers of absent chips: opcast's own rules answer within seconds.
    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path / "none"))
    return tmp_path


@pytest.fixture
def probe(home, monkeypatch):
    """Stands in for the probe: the trained device, with anchors; counts its runs."""
    trained = next(iter(CostModel.load(find_model("default")).devices.values()))
    made = []

    def probe_device(budget_s):
        made.append(budget_s)
        anchors = {"gemm": 1000.0, "vector": 400.0, "memory": 1000.0, "single": 50.0}
        return replace(trained, name=local_device_name(), extra={"anchors_us": anchors})

    monkeypatch.setattr("opcast.datagen.profile.device_probe.probe_device", probe_device)
    return made


# `.ci/run` runs the demo itself beside `make test`.
@pytest.mark.exhaustive
def test_the_demo_in_its_order(home, probe, monkeypatch):
    monkeypatch.setattr(
        demo, "STEP",
        ("llama", {"layers": 1, "dim": 64, "heads": 2, "kv_heads": 2, "hidden": 128,
                   "vocab": 256, "seq": 32, "batch": 2, "mode": "train"}),
    )  # fmt: skip
    programs = (
        ("mlp", {"batch": 32, "width": 64, "layers": 2}),
        ("lstm", {"batch": 2, "dim": 32, "seq": 4, "layers": 1, "vocab": 64}),
    )
    monkeypatch.setattr(demo, "PROGRAMS", programs)
    console = Console(record=True, width=100)
    out = home / "demo"
    results = demo.run_demo(console, out, 25.0)
    text = console.export_text()
    places = [text.index(f"{n}. ") for n in (1, 2, 3, 4, 5)]
    assert places == sorted(places)
    first = text[: places[1]]
    for chip in shown_devices("demo"):
        assert f"llama train step on {chip}: " in first
    # A line below says where they were not lowered by their compilers, and why if it is known.
    fused = first.count(", fused\n")
    said = first.count("\n  lowering fused instead of") + first.count("\n  lowered by fused")
    assert said == fused
    assert (out / "step.html").stat().st_size > 10_000
    assert probe == [pytest.approx(12.0)]
    assert [r.name for r in results] == ["mlp", "lstm"]
    assert all(math.isfinite(r.error) and r.measured_us > 0 for r in results)
    assert f"{sum(r.inside for r in results)} of 2 inside their interval" in text
    # The run and its model are in MLflow.
    assert runs()["tags.mlflow.runName"].str.startswith("programs-unseen").any()
    assert f"model {demo.REGISTERED}" in text
    assert f"--model {out / 'model'}" in text.replace("\n", "")
    # A second call keeps the model.
    console = Console(record=True, width=100)
    kept = (out / "model" / "manifest.json").read_bytes()
    assert demo.calibrated(console, out / "model", 8.0) == out / "model"
    assert (out / "model" / "manifest.json").read_bytes() == kept
    assert "delete it to calibrate" in console.export_text()


def test_this_machine_is_probed_once_and_told(home, probe, monkeypatch):
    model = CostModel.load(find_model("default"))
    told = []
    first = local_now(model.devices, told.append)
    assert told == ["measuring this machine's peak rates, once (15 s)"]
    assert first.extra["anchors_us"]["gemm"] == 1000.0 and "present_speed" not in first.extra
    # Later its anchors are read, at half of the speed.
    import os

    path = measured_path(local_device_name())
    os.utime(path, (86400, 86400))
    slow = {"gemm": 2000.0, "vector": 800.0, "memory": 2000.0, "single": 100.0}
    monkeypatch.setattr("opcast.datagen.profile.anchors.present_anchors", lambda readings: slow)
    later = local_now(model.devices, told.append)
    assert len(told) == len(probe) == 1
    assert later.extra["present_speed"] == pytest.approx(
        {"arithmetic": 0.5, "bandwidth": 0.5, "single-thread": 0.5}
    )
