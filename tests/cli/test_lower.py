"""The commands about target compilers, end to end with a program that is compiled already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opcast.cli import app
from opcast.cli.lower import Compiler, _flag_value
from opcast.features.devices.catalogue import find_device

DATA = Path(__file__).parents[1] / "features" / "data" / "absent"
RUN = CliRunner()


def test_lower_prints_kernels_memory_and_fit(tmp_path) -> None:
    out = tmp_path / "out.hlo"
    words = ["lower", str(DATA / "h100_bmm.hlo"), "--device", "h100-sxm", "--out", str(out)]
    done = RUN.invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert done.stderr == f"wrote {out}: optimised HLO\n"
    assert data["kernels"] == 1 and data["kinds"] == {"gemm": 1}
    assert data["flops"] == 2 * 8 * 512**3 + 2 * 8 * 512 * 512
    assert (
        data["fits"] is True and data["device_memory_bytes"] == find_device("h100-sxm").usable_bytes
    )
    assert out.read_text().startswith("HloModule")
    text = RUN.invoke(app, words).output
    assert "1 kernels" in text and "of 79.16 GiB, fits" in text


def test_lower_prints_the_compilers_own_cycles() -> None:
    words = ["lower", str(DATA / "v5e_bias.hlo"), "--device", "tpu-v5e", "--json"]
    data = json.loads(RUN.invoke(app, words).output)
    assert data["estimated_us"] == pytest.approx(data["estimated_cycles"] / 1500)
    assert data["kernels_without_estimate"] == 1


def test_flags_and_limits() -> None:
    settings = Compiler(5.0, 2.0, ["--xla_a=true", "xla_b=3", "xla_c=x"], True).settings()
    assert dict(settings.flags) == {"xla_a": True, "xla_b": 3, "xla_c": "x"}
    assert (settings.timeout_s, settings.memory_bytes, settings.repeats) == (5.0, 2**31, False)
    assert _flag_value("0.5") == 0.5
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        Compiler(1.0, 0.0, ["xla_a"], False).settings()


def test_missing_compilers_are_listed(monkeypatch, tmp_path) -> None:
    from opcast.features.lowering.target_compiler import install as compilers

    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path))
    monkeypatch.setattr(compilers, "_versions", lambda folder: {})
    done = RUN.invoke(app, ["compilers", "list"])
    assert done.exit_code == 0
    assert "opcast compilers install gpu" in done.output and "tpu: no tpu" in done.output


MODULE = """
import jax, jax.numpy as jnp


def step(key, x, train=False):
    y = x @ x
    return y * jax.random.bernoulli(key, 0.9, y.shape) if train else y


def example_args():
    return (jax.random.key(0), jax.ShapeDtypeStruct((64, 64), jnp.float32)), {"train": True}
"""


def test_functions_of_a_file_on_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    command = [sys.executable, "-m", "opcast", "predict", "mine.py:step", "--json"]
    rest = ["--device", "h100-sxm", "--lowering", "op", "--model", "roofline"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, *rest], **options)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)["kernels"]
    # Lowered for the GPU: Threefry is no loop there.
    assert not any(k["kind"] == "control" for k in kernels)
    (product,) = [k for k in kernels if k["kind"] == "gemm"]
    assert product["source_line"].endswith("mine.py:6")
    whole = subprocess.run([*command[:4], "mine.py", *rest], **options)
    assert whole.returncode == 1 and "opcast predict FILE.py:FUNCTION" in whole.stderr
