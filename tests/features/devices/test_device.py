from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.device import DeviceSpec, MemoryLevel, device_slug, local_device_name

SPEC = DeviceSpec(
    "d", "cpu", {"f32": 100.0, "bf16": 400.0}, {"f32": 50.0},
    (MemoryLevel(1e6, 10.0), MemoryLevel(1e9, 2.0)), floor=1e-6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", "intel-xeon-processor-2.50ghz"),
        ("Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz", "intel-core-i7-9700k-3.60ghz"),
        ("NVIDIA H200", "nvidia-h200"),
        ("TPU v5 lite", "tpu-v5-lite"),
        ("", "unknown"),
    ],
)
def test_slug(text: str, slug: str) -> None:
    assert device_slug(text) == slug


def test_local_name_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    monkeypatch.setattr(jax, "devices", lambda: [cpu])
    name = local_device_name()
    assert re.fullmatch(r"cpu-[a-z0-9.-]+-[0-9]+c", name)
    assert name == local_device_name()


def test_local_name_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert local_device_name() == "nvidia-h100-80gb-hbm3"


def test_json_round_trip() -> None:
    import json

    assert DeviceSpec.from_dict(json.loads(SPEC.to_json())) == SPEC


def test_missing_dtype_takes_the_nearest_wider() -> None:
    assert SPEC.matrix_peak("f16") == 400.0
    assert SPEC.matrix_peak("f64") == 100.0
    assert SPEC.vector_peak("bf16") == 50.0


def test_unknown_key_is_an_error() -> None:
    with pytest.raises(DeviceError, match="unknown keys"):
        DeviceSpec.from_dict({"levels": [], "nonsense": 1})


def test_descriptions_without_the_newer_fields_still_load() -> None:
    import json

    names = ("vendor", "architecture", "aliases", "provenance", "defaulted", "link_bandwidth")
    old = {k: v for k, v in json.loads(SPEC.to_json()).items() if k not in names}
    assert DeviceSpec.from_dict(old) == SPEC


def test_a_rate_of_reduced_precision_stands_in_for_no_type() -> None:
    device = DeviceSpec("d", "gpu", {"tf32": 8.0, "f32": 1.0}, {}, SPEC.levels, floor=1e-6)
    assert device.matrix_peak("s32") == device.matrix_peak("bf16") == 1.0
    assert device.matrix_peak("tf32") == 8.0
