"""Installing compilers apart, and keeping them from disturbing this process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from opcast.common import jax_platforms as quiet
from opcast.common.errors import CompilerError
from opcast.features.lowering.target_compiler import install as compilers
from opcast.features.lowering.target_compiler.install import (
    find_compiler,
    install_compiler,
    packages,
)

JAXLIB = metadata.version("jaxlib")


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path / "compilers"))
    return tmp_path / "compilers"


def fake_pip(monkeypatch, fail: str = "") -> list[list[str]]:
    """A pip that writes package records only."""
    calls: list[list[str]] = []

    def run(command, **options):
        calls.append(command)
        if fail:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: x\nERROR: {fail}")
        target = Path(command[command.index("--target") + 1])
        for wanted in command[command.index("--target") + 2 :]:
            name, _, version = wanted.replace(">=", "==").partition("==")
            version = version.split(",")[0].replace("*", "1") or "1"
            folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(compilers.subprocess, "run", run)
    return calls


def test_compilers_of_this_environment_are_found_without_a_variable(monkeypatch, tmp_path) -> None:
    """``make compilers`` puts them there, and users call the environment's ``opcast`` directly."""
    monkeypatch.delenv("OPCAST_COMPILERS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert compilers.compilers_root() == tmp_path / "data/opcast/compilers"
    (tmp_path / "venv/compilers").mkdir(parents=True)
    assert compilers.compilers_root() == tmp_path / "venv/compilers"


def test_versions_fit_the_jaxlib_in_use() -> None:
    assert packages("gpu")[:2] == [f"jax-cuda13-plugin=={JAXLIB}", f"jax-cuda13-pjrt=={JAXLIB}"]
    assert packages("tpu")[0].startswith("libtpu")
    with pytest.raises(CompilerError, match="npu"):
        packages("npu")


def test_install_and_find(monkeypatch, root) -> None:
    calls = fake_pip(monkeypatch)
    found = install_compiler("gpu")
    assert found.folder == root / f"gpu-{JAXLIB}"
    assert f"jax-cuda13-pjrt {JAXLIB}" in found.version and "nvidia-cuda-nvcc-cu12" in found.version
    assert len(calls) == 1 and "--no-deps" in calls[0]
    assert find_compiler("gpu") == found
    assert install_compiler("tpu").version.startswith("libtpu ")
    # Again takes the old one's place; nothing half-made stays.
    install_compiler("gpu")
    assert sorted(p.name for p in root.iterdir()) == [f"gpu-{JAXLIB}", f"tpu-{JAXLIB}"]


def test_a_failing_pip_leaves_nothing(monkeypatch, root) -> None:
    fake_pip(monkeypatch, fail="no matching distribution")
    with pytest.raises(CompilerError, match="ERROR: no matching distribution"):
        install_compiler("gpu")
    assert list(root.iterdir()) == []


def test_assemblers_are_asked_what_they_know(tmp_path) -> None:
    ptxas = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\necho \"'compute_90','sm_75','sm_90', 'sm_90a'\"\n")
    ptxas.chmod(0o755)
    found = compilers.Compiler("gpu", tmp_path, "fake").assemblers()
    assert found == [(tmp_path / "nvidia" / "cu13", (75, 90))]


@pytest.mark.parametrize(
    ("plugin", "files", "platforms", "expected"),
    [(True, [], None, "cpu"), (False, [], None, None), (True, ["/dev/nvidia0"], None, None),
     (True, [], "cuda", "cuda")],
)  # fmt: skip
def test_plug_ins_without_a_device_are_left_alone(
    monkeypatch, plugin, files, platforms, expected
) -> None:
    monkeypatch.delenv("JAX_PLATFORM_NAME", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(quiet, "find_spec", lambda name: object() if plugin else None)
    monkeypatch.setattr(quiet, "device_files", lambda: files)
    monkeypatch.setitem(sys.modules, "jax", None)
    sys.modules.pop("jax")
    assert quiet.keep_plugins_quiet() is (expected == "cpu")
    assert os.environ.get("JAX_PLATFORMS") == expected
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
