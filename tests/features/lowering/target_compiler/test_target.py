"""What compilers are told of devices, and what is missing if they cannot be told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from opcast.common.errors import CompilerError, DeviceError
from opcast.features.devices.catalogue import device_names, find_device, load_device_file
from opcast.features.devices.device import DeviceSpec
from opcast.features.lowering.target_compiler import target as compile_target
from opcast.features.lowering.target_compiler.install import Compiler
from opcast.features.lowering.target_compiler.target import gpu_figures, target_of, tpu_topology

CUDA_13 = (Path("/cuda13"), (75, 80, 86, 89, 90, 100, 103, 120))
CUDA_12 = (Path("/cuda12"), (50, 60, 61, 70, 75, 80, 86, 89, 90))


class FakeCompiler(Compiler):
    """Installed, with assemblers of two generations."""

    known = (CUDA_13, CUDA_12)

    def assemblers(self):
        return list(self.known)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(
        compile_target, "find_compiler", lambda p: FakeCompiler(p, Path("/c"), "fake 1")
    )


def field(config: str, name: str) -> float:
    return float(re.search(rf"\b{name}: ([\d.]+)", config)[1])


def test_h100() -> None:
    target = target_of(find_device("h100-sxm"))
    assert (target.platform, target.architecture, target.notes) == ("cuda", "sm_90", ())
    expected = {
        "core_count": 132, "fpus_per_core": 128, "clock_rate_ghz": 1.98,
        "memory_bandwidth": 3350e9, "device_memory_size": 80 * 2**30, "l2_cache_size": 50 * 2**20,
        "shared_memory_per_core": 228 * 1024, "shared_memory_per_block_optin": 227 * 1024,
        "shared_memory_per_block": 48 * 1024, "threads_per_core_limit": 2048,
        "threads_per_block_limit": 1024, "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536, "threads_per_warp": 32, "major": 9,
    }  # fmt: skip
    assert {name: field(target.config, name) for name in expected} == expected
    assert target.flags == (("xla_gpu_cuda_data_dir", "/cuda13"),)


@pytest.mark.parametrize(
    ("name", "architecture", "folder"),
    [("v100-pcie", "sm_70", "/cuda12"), ("p100", "sm_60", "/cuda12"), ("p4", "sm_61", "/cuda12"),
     ("t4", "sm_75", "/cuda13"), ("a40", "sm_86", "/cuda13"), ("b200", "sm_100", "/cuda13")],
)  # fmt: skip
def test_each_architecture_is_compiled_for_itself(name, architecture, folder) -> None:
    target = target_of(find_device(name))
    assert target.architecture == architecture and target.notes == ()
    assert dict(target.flags)["xla_gpu_cuda_data_dir"] == folder


def test_a_stand_in_is_said_plainly(monkeypatch) -> None:
    monkeypatch.setattr(FakeCompiler, "known", (CUDA_13,))
    volta = target_of(find_device("v100-sxm"))
    assert volta.architecture == "sm_75" and field(volta.config, "core_count") == 80
    assert "does not know sm_70" in volta.notes[0] and "sm_75" in volta.notes[0]
    amd = target_of(find_device("mi210"))
    assert amd.architecture == "sm_80" and field(amd.config, "core_count") == 104
    assert "gfx90a" in amd.notes[0] and "sm_80" in amd.notes[0]


def test_all_devices_of_the_catalogue_but_three_have_a_compiler() -> None:
    without = []
    # XLA compiles for the CPU that it runs on.
    for name in (n for n in device_names() if find_device(n).platform != "cpu"):
        try:
            target_of(find_device(name))
        except DeviceError:
            without.append(name)
    assert without == ["arc-b60", "gaudi2", "tpu-v7x"]


def test_a_chip_of_ones_own(tmp_path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("name: big\nbase: h100-sxm\ncore_count: 264\nl2_mb: 100\nboost_mhz: 1500\n")
    config = target_of(load_device_file(path)).config
    assert [field(config, n) for n in ("core_count", "l2_cache_size", "clock_rate_ghz")] == [
        264, 100 * 2**20, 1.5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"core_count": 1, "defaulted": ("core_count",)}, "core_count"), ({"clock_hz": 0.0}, "boost"),
     ({"lanes_per_core": 0}, "lanes_per_core"), ({"shared_bytes_per_core": 0.0}, "shared_kb_per"),
     ({"compiler": {"target": "sm_99"}}, "threads_per_core"), ({"memory_bytes": 0.0}, "memory_gb")],
)  # fmt: skip
def test_missing_figures_are_named(changes, key) -> None:
    with pytest.raises(DeviceError, match=key) as caught:
        gpu_figures(replace(find_device("a100-sxm-80gb"), **changes))
    assert "a100-sxm-80gb" in caught.value.where


def test_contradictions_and_unknown_targets() -> None:
    spec = find_device("h100-sxm")
    with pytest.raises(DeviceError, match="optin is more"):
        gpu_figures(replace(spec, shared_bytes_per_core=64 * 1024.0))
    with pytest.raises(DeviceError, match="gfx1100"):
        target_of(replace(spec, compiler={"target": "gfx1100"}))
    with pytest.raises(DeviceError, match="compiler_target"):
        target_of(replace(spec, name="mine", aliases=(), compiler={}))
    with pytest.raises(DeviceError, match="v9"):
        target_of(replace(find_device("tpu-v4"), compiler={"target": "v9"}))


def test_a_measured_device_takes_the_target_of_its_name() -> None:
    measured = replace(find_device("h100-sxm"), name="nvidia-h100-80gb-hbm3", compiler={})
    assert target_of(measured).device == "h100-sxm"
    assert isinstance(measured, DeviceSpec)


def test_no_assembler(monkeypatch) -> None:
    monkeypatch.setattr(FakeCompiler, "known", ())
    with pytest.raises(CompilerError, match="ptxas"):
        target_of(find_device("h100-sxm"))


def test_topologies() -> None:
    h100 = target_of(find_device("h100-sxm"))
    assert [h100.topology(n) for n in (1, 4, 8, 32)] == ["1x1x1", "1x1x4", "1x1x8", "1x4x8"]
    assert [tpu_topology("v5e", n) for n in (1, 4, 8, 16, 32)] == [
        "v5e:2x2", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8",
    ]  # fmt: skip
    # Two devices a chip on v3, one on v4, whose two cores work as one.
    assert [tpu_topology("v3", n) for n in (8, 16)] == ["v3:2x2", "v3:2x4"]
    assert [tpu_topology("v4", n) for n in (4, 8, 16)] == ["v4:2x2x1", "v4:2x2x2", "v4:2x2x4"]
    assert [tpu_topology("v5p", n) for n in (4, 8, 16, 64)] == [
        "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4",
    ]  # fmt: skip


def test_a_tpu_of_ones_own_is_noted() -> None:
    spec = replace(find_device("tpu-v5e"), name="fast-v5e")
    (note,) = target_of(spec).notes
    assert "v5e" in note and "fast-v5e" in note
    assert target_of(find_device("tpu-v5e")).notes == ()
