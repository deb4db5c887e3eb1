from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.profile import device_probe, host
from opcast.datagen.profile.device_probe import levels_from_curve, probe_device
from opcast.features.devices.device import DeviceSpec

MB = 1e6


def test_levels_with_known_caches() -> None:
    sizes = [0.25 * MB, 0.5 * MB, 2 * MB, 8 * MB, 16 * MB, 64 * MB, 128 * MB]
    rates = [90e9, 100e9, 50e9, 48e9, 40e9, 11e9, 10e9]
    levels = levels_from_curve(sizes, rates, [1 * MB, 20 * MB], 8e9)
    # L2: best up to 0.75 MB; L3: best of 2.5 to 15 MB; memory: median beyond 40 MB.
    assert [level.bandwidth for level in levels] == [100e9, 48e9, 10.5e9]
    assert [level.capacity for level in levels] == [1 * MB, 20 * MB, 8e9]


@pytest.mark.parametrize(("near", "known"), [(131e9, 2), (171e9, 3)])
def test_a_near_level_is_kept_if_it_is_clearly_faster(near: float, known: int) -> None:
    # Bandwidths of two probes of one machine within minutes: its L2 once seemed faster, once not.
    sizes = [0.5 * MB, 1 * MB, 8 * MB, 16 * MB, 128 * MB]
    levels = levels_from_curve(sizes, [near, near, 85e9, 80e9, 48e9], [2 * MB, 32 * MB], 8e9)
    assert len(levels) == known
    assert [level.bandwidth for level in levels[-2:]] == [85e9, 48e9]


def test_levels_without_known_caches_come_from_the_knee() -> None:
    sizes = [1 * MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB, 32 * MB]
    rates = [100e9, 100e9, 100e9, 20e9, 20e9, 20e9]
    near, far = levels_from_curve(sizes, rates, [], 1e9)
    assert near.capacity == pytest.approx(4 * MB / 0.75)
    assert (near.bandwidth, far.bandwidth) == (100e9, 20e9)


def test_flat_curve_has_one_level() -> None:
    (only,) = levels_from_curve([1 * MB, 2 * MB, 4 * MB], [10e9] * 3, [2 * MB], 1e9)
    assert only.capacity == 1e9


def test_local_caches_are_plausible() -> None:
    caches = host.cpu_caches()
    sizes = [size for _, (size, _) in sorted(caches.items())]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("platform", "said", "clock"),
    [
        ("gpu", "1980 MHz", 1.98e9), ("gpu", "[N/A]", 0.0), ("tpu", "", 0.0),
        ("cpu", "1980 MHz", 3e9),
    ],
)  # fmt: skip
def test_the_clock_is_that_of_the_device_in_use(monkeypatch, platform, said, clock) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=platform)])
    monkeypatch.setattr(host, "nvidia_smi", lambda: {"clocks.sm": said} if said else {})
    # Two cores at 2.5 and 3.5 GHz, by their mean.
    cores = "processor : 0\ncpu MHz\t\t: 2500.0\nprocessor : 1\ncpu MHz\t\t: 3500.0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: cores)
    assert host.clock_hz() == clock


@pytest.mark.parametrize("memory", [0.0, 16e9])
def test_a_profiler_without_kernels_is_named(monkeypatch, memory: float) -> None:
    monkeypatch.setattr(device_probe, "_kernel_seconds", lambda *args, **options: 0.0)
    monkeypatch.setattr(device_probe, "_array", lambda shape, dtype: None)
    monkeypatch.setattr(host, "memory_bytes", lambda: memory)
    with pytest.raises(ProfileError, match="the profiler shows no kernel"):
        probe_device(budget_s=1.0)


@pytest.mark.slow
@pytest.mark.exhaustive  # test_main.py measures an unknown machine
def test_probe_of_the_local_device() -> None:
    spec = probe_device(budget_s=8.0)
    assert spec.peak_flops["f32"] > spec.vector_flops["f32"] > 1e8
    assert 1e-7 <= spec.floor < 1e-3
    assert spec.floor < spec.dispatch < 1e-1
    bandwidths = [level.bandwidth for level in spec.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert all(1e8 < b < 1e14 for b in bandwidths)
    assert spec.levels[-1].capacity == spec.memory_bytes > 1e8
    assert DeviceSpec.from_dict(json.loads(spec.to_json())) == spec
