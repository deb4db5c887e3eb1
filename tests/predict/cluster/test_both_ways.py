"""The same decoder as a plan of a workload and as a partitioned program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opcast.cli import app

from ...support.cases import later

SIZES = {"layers": 2, "heads": 16, "kv_heads": 16, "vocab": 32000, "seq": 2048, "batch": 16}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("both") / "decoder.mlir"
    sizes = {**SIZES, "dim": 2048, "hidden": 5632, "mode": "train", "dtype": "bf16"}
    settings = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    run("zoo", "export", "llama", *settings, "--mesh", "fsdp=8", "--out", path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["h100-sxm-x8", later("a100-sxm-80gb-x8")])
def test_a_plan_and_a_partitioned_program_of_a_decoder_agree(program: Path, cluster: str) -> None:
    placed = run("predict", program, "--cluster", cluster, "--lowering", "fused", "--json")
    # XLA's softmax computes its mask from positions, and reads its scores once as a framework's own
    # does; plans with naive attention let it read long rows again.
    sizes = {**SIZES, "d_model": 2048, "d_ff": 5632, "attention": "eager"}
    settings = ",".join(f"{name}={value}" for name, value in sizes.items())
    planned = run(
        "simulate", "--workload", "llama", "--set", settings, "--cluster", cluster,
        "--plan", "fsdp=8,microbatches=1", "--framework", "jax", "--compiled", "--json",
    )  # fmt: skip
    times = [json.loads(text)["latency_us"] for text in (placed, planned)]
    # Steps have effects on products that were learned from steps, programs those of the library.
    assert times[1] == pytest.approx(times[0], rel=0.08)
