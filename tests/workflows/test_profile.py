"""What ``opcast profile`` says at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datagen.profile.plan import ProfileResult
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.devices.identity import former_speeds
from opcast.predict.devices import measured_path
from opcast.workflows.profile import measure_device, run_profile
from opcast.workflows.settings import ProfileSettings


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((25.3, 9.8), "90 s (set-up and probe 25 s, final check 10 s), budget"),
        # Hosts of a fleet are set up beside one another.
        ((), "90 s, budget"),
    ],
)
def test_what_a_budget_did_not_go_to_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: tuple[float, ...],
    told: str,
) -> None:
    def measured(folder: Path, *_: object, **__: object) -> ProfileResult:
        return ProfileResult(folder, 412, 31, 0, 90.2, "budget", "r", *parts)

    monkeypatch.setattr("opcast.datagen.profile.profile.profile", measured)
    run_profile(ProfileSettings(tmp_path, "local", 50.0, 0, "standard", "ops=1", quiet=True))
    said = capsys.readouterr().err
    assert f"wrote {tmp_path}: 412 samples of 31 programs, 0 failed, {told}" in said


def test_ceilings_that_moved_are_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program moved by a quarter without a word after its machine was measured again."""
    first = DeviceSpec(
        "cpu-x", "cpu", {"f32": 200e9}, {"f32": 50e9}, (MemoryLevel(1e9, 40e9),), 1e-6,
        source="measured",
    )  # fmt: skip
    second = replace(
        first, peak_flops={"f32": 150e9}, vector_flops={"f32": 50.1e9},
        levels=(MemoryLevel(1e9, 50e9),),
    )  # fmt: skip
    monkeypatch.setattr("opcast.predict.devices.home", lambda: tmp_path)
    probes = [first, second, second]
    monkeypatch.setattr(
        "opcast.datagen.profile.device_probe.probe_device", lambda budget: probes.pop(0)
    )
    said: list[str] = []
    assert measure_device(save=True, tell=said.append).peak_flops == first.peak_flops
    assert not said
    spec = measure_device(save=True, tell=said.append)
    (told,) = said
    assert "matrix f32 200 GFLOP/s -> 150 GFLOP/s (-25%)" in told
    assert "memory 40 GB/s -> 50 GB/s (+25%)" in told and "vector" not in told
    assert "intervals of predictions cover both" in told
    # In both directions: arithmetic was faster (the mean of products and vectors), memory slower.
    slow, fast = former_speeds(spec) or pytest.fail("not kept")
    assert slow.ratios["bandwidth"] == pytest.approx(0.8)
    assert fast.ratios["arithmetic"] == pytest.approx((200 / 150 * 50 / 50.1) ** 0.5)
    # What it is now is told once, and kept.
    measure_device(save=True, tell=said.append)
    assert len(said) == 1
    measured_path("cpu-x").write_text("{")
    probes.append(first)
    assert measure_device(save=True, tell=said.append).peak_flops == first.peak_flops
