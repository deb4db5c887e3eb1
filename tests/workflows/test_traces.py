"""Traces through the command line: imported, learned from, calibrated on, compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.datagen.traces.trace import RunTime
from opcast.workflows.traces.waterfall import (
    ClassTime,
    KernelPair,
    by_class,
    common_factor,
    waterfall,
)

from ..support.traces import HLO, Kineto, nsys_sqlite, two_steps


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output if status == 0 else f"{result.output}{result.exception}"


def pair(predicted: float, traced: float, kind: str = "gemm", runs: float = 1.0) -> KernelPair:
    return KernelPair("k", kind, runs, predicted, predicted, predicted, traced)


def test_a_factor_is_common_only_if_kernels_agree() -> None:
    # All kernels by 1.2, 1.3, 1.4, 1.5, of equal weight: the first quarter ends at 1.2.
    agreed = [pair(10.0, 10.0 * f) for f in (1.5, 1.2, 1.4, 1.3)]
    assert common_factor(agreed) == pytest.approx(1.2)
    assert common_factor([pair(10.0, 10.0 / f) for f in (1.5, 1.2, 1.4, 1.3)]) == pytest.approx(
        1 / 1.3
    )
    assert common_factor([pair(10.0, 10.0 * f) for f in (0.8, 0.9, 1.1, 1.2)]) == 1.0
    # Too few to tell a factor from an error of theirs.
    assert common_factor([pair(10.0, 20.0)] * 3) == 1.0


def test_the_parts_of_the_waterfall_add_up() -> None:
    pairs = [pair(10, 12, runs=2), pair(6, 6, "fusion"), pair(5, 9, "collective")]
    classes = by_class(pairs)
    assert classes[0] == ClassTime("gemm", 20, 24, 1)
    step = RunTime(0.0, 60e-6, 45e-6, 38e-6, 9e-6, 5e-6)
    parts = waterfall(40.0, classes, 1.1, step, 4.0, "collective")
    found = {p.what: p.us for p in parts}
    # (1.1 - 1) (20 + 6); 24 - 1.1 x 20; 6 - 1.1 x 6; 9 - 5; 60 - 45 idle, 40 - 31 predicted;
    # 45 busy of 38 + 9 that ran; these less 24 + 6 + 9 + 4.
    assert found == {
        "clock: common factor of all kernels": pytest.approx(2.6),
        "kernels: gemm": pytest.approx(2.0),
        "kernels: fusion": pytest.approx(-0.6),
        "kernels that are not predicted": pytest.approx(4.0),
        "communication": pytest.approx(4.0),
        "gaps and launches": pytest.approx(15.0 - 9.0),
        "overlap of kernels": pytest.approx(45.0 - 47.0),
        "executions beyond their median": pytest.approx(47.0 - 43.0),
    }
    assert 40.0 + sum(found.values()) == pytest.approx(60.0)


def test_overlap_that_is_predicted_is_taken_from_what_overlap_saves() -> None:
    classes = by_class([pair(10, 12, runs=2), pair(5, 9, "collective")])
    # 20 + 5 predicted as 22, 3 of them hidden; 24 + 9 of 30 + 9 ran in 34 busy, 5 hidden.
    step = RunTime(0.0, 36e-6, 34e-6, 30e-6, 9e-6, 4e-6)
    found = {p.what: p.us for p in waterfall(22.0, classes, 1.0, step, 0.0, "collective")}
    assert found["gaps and launches"] == pytest.approx(2.0)
    assert found["overlap of kernels"] == pytest.approx(3.0 - 5.0)
    assert found["executions beyond their median"] == pytest.approx(39.0 - 33.0)
    assert 22.0 + sum(found.values()) == pytest.approx(36.0)


def test_a_trace_of_pytorch_beside_the_prediction(tmp_path: Path) -> None:
    trace = two_steps(tmp_path / "t.json.gz")
    data = json.loads(run("check", "--trace", trace, "--json"))
    assert data["device"] == "h100-sxm" and data["runs"] == 2
    traced = {c["kind"]: c["traced_us"] for c in data["classes"]}
    assert traced == pytest.approx(
        {"products": 12.5, "norms": 4.0, "passes": 3.0, "communication": 20.0}
    )
    assert dict(data["unmatched"]) == pytest.approx({"aten::cumsum": 5.0})
    assert data["matched"] == pytest.approx(39.5 / 44.5)
    total = data["predicted_us"] + sum(p["us"] for p in data["waterfall"])
    assert total == pytest.approx(data["traced_us"])
    text = run("check", "--trace", trace, "--top", 2)
    assert "what explains the difference" in text and "communication" in text
    assert "not predicted: 5 µs aten::cumsum" in text


def test_an_export_of_nsys_beside_a_program(tmp_path: Path) -> None:
    kernels = [
        ("loop_tanh_fusion.1", "loop_tanh_fusion_1", 4000),
        ("dot.2", "gemm", 9000),
        ("all-reduce.3", "ncclDevKernel_AllReduce", 7000),
        ("copy.9", "copy_9", 1000),
    ]
    trace = nsys_sqlite(tmp_path / "t.sqlite", [kernels] * 4)
    program = tmp_path / "step.hlo"
    program.write_text(HLO)
    data = json.loads(run("check", program, "--trace", trace, "--device", "h100-sxm", "--json"))
    assert {c["kind"]: c["traced_us"] for c in data["classes"]} == pytest.approx(
        {"fusion": 4.0, "gemm": 9.0, "collective": 7.0}
    )
    assert data["unmatched"] == [["copy.9", pytest.approx(1.0)]]
    assert all(k["lo_us"] <= k["predicted_us"] <= k["hi_us"] for k in data["kernels"])
    total = data["predicted_us"] + sum(p["us"] for p in data["waterfall"])
    assert total == pytest.approx(data["traced_us"]) == 22.5
    assert "--program" in run("check", "--trace", trace, status=1)


def test_a_program_beside_a_trace_may_be_a_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\ndef step(x):\n    return jnp.tanh(x @ x)\n\n"
        "example_args = (jax.ShapeDtypeStruct((256, 256), 'float32'),)\n"
    )
    kernels = [("dot.2", "gemm", 9000)]
    trace = nsys_sqlite(tmp_path / "t.sqlite", [kernels] * 4)
    # Its kernels have other names; it is read, not taken for a file.
    text = run("check", f"{tmp_path / 'own.py'}:step", "--trace", trace, status=1)
    assert "no kernel of the trace has the name" in text


def test_operators_of_a_trace_train_and_calibrate(tmp_path: Path) -> None:
    trace = Kineto()
    for m in (64, 256, 1024, 4096, 16384):
        for n in (512, 1024, 2048, 3072, 4096, 8192, 11008, 14336):
            for k in (256, 512, 1024, 2048, 4096, 8192, 11008):
                # 500 TFLOP/s and 3 µs of launch.
                us = 2 * m * n * k / 500e6 + 3.0
                trace.operator("aten::mm", [[m, k], [k, n]], [("gemm_bf16", us)])
    path = trace.save(tmp_path / "t.json.gz")
    data, params = tmp_path / "data", tmp_path / "params.json"
    assert "280 samples of h100-sxm, 100.0%" in run("data", "import", "trace", path, "--out", data)
    assert "already imported" in run("data", "import", "trace", path, "--out", data)
    params.write_text('{"rounds": 20}')
    out = tmp_path / "model"
    run("train", "--data", data, "--out", out, "--no-track", "--params", params)
    op = "kernel/linear m=1024 n=4096 k=2048 dtype=bf16"
    answer = json.loads(
        run("predict", "--op", op, "--device", "h100-sxm", "--model", out, "--json")
    )
    assert answer["latency_us"] == pytest.approx(2 * 1024 * 4096 * 2048 / 500e6 + 3.0, rel=0.2)
    text = run("explain", "--op", op, "--device", "h100-sxm", "--model", out)
    assert "kernel/linear" in text
    text = run("calibrate", "--data", data, "--device", "h100-sxm", "--samples", 10)
    assert "kernel/linear" in text


def test_a_profile_of_jax_beside_the_prediction(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.ones((256, 256))
    program = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0)).lower(x).compile()
    jax.block_until_ready(program(x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(5):
            jax.block_until_ready(program(x))
    # Of the machine at hand, which would be measured first, without a device.
    arguments = ("check", "--trace", tmp_path, "--device", "cpu-amd-epyc-2c")
    data = json.loads(run(*arguments, "--json"))
    assert data["format"] == "xplane" and data["runs"] == 5 and data["matched"] == 1.0
    assert {"gemm", "sort"} <= {c["kind"] for c in data["classes"]}
    total = data["predicted_us"] + sum(p["us"] for p in data["waterfall"])
    assert total == pytest.approx(data["traced_us"])
    # The module itself, as a file, is the same program.
    hlo = tmp_path / "compiled.txt"
    hlo.write_text(program.as_text())
    again = json.loads(run(arguments[0], hlo, *arguments[1:], "--json"))
    assert again["predicted_us"] == pytest.approx(data["predicted_us"])
    other = tmp_path / "other.txt"
    other.write_text(HLO)
    assert "leave PROGRAM out" in run(arguments[0], other, *arguments[1:], status=1)
    text = run(*arguments[:3], "--device", "h100-sxm", status=1)
    assert "kernels of the trace ran on a CPU, which h100-sxm is not" in text


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    trace = two_steps(tmp_path / "t.json")
    assert "--device" in run("check", "x.mlir", "--device", "b200", status=2)
    assert "PROGRAM" in run("check", status=2)
    text = run("data", "import", "published", tmp_path, "--out", tmp_path, "--keep-names", status=2)
    assert "--keep-names" in text
    assert "choose: published, trace" in run("data", "import", "x", trace, "--out", "y", status=2)
    assert "ran on an accelerator" in run(
        "check", "--trace", trace, "--device", "cpu-amd-epyc-2c", status=1
    )
    assert "leave the program out" in run("check", "x.mlir", "--trace", trace, status=1)
    unnamed = Kineto(device="")
    unnamed.operator("aten::mm", [[8, 8], [8, 8]], [("k", 1.0)])
    path = unnamed.save(tmp_path / "u.json")
    text = run("data", "import", "trace", path, "--out", tmp_path / "out", status=1)
    assert "give --device" in text
