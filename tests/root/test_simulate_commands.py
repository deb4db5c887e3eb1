import json
from pathlib import Path

from typer.testing import CliRunner

from opcast.cli import app

SMALL = "layers=4,d_model=1024,heads=8,kv_heads=8,d_ff=4096,vocab=32000,seq=1024,batch=16"


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_simulate_prints_json_and_writes_its_files(tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    result = run(
        "--workload", "llama", "--set", SMALL, "--cluster", "h100-sxm-x4", "--plan", "tp=2,pp=2",
        "--json", "--timeline", str(trace), "--html", str(page), "--speed", "1=0.9",
    )  # fmt: skip
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    for key in (
        "step_us", "lo_us", "hi_us", "compute_us", "exposed_communication_us", "bubble_us",
        "memory_bytes_per_device", "fits", "tflops_per_device", "mfu",
    ):  # fmt: skip
        assert key in data
    assert data["samples"]["p50_us"] > data["step_us"]
    ends = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if "ts" in e]
    assert abs(max(ends) - data["step_us"]) < 1e-3 * data["step_us"]
    assert page.read_text().startswith("<!doctype html>")


def test_simulate_takes_yaml_and_prints_a_table(tmp_path):
    work, plan = tmp_path / "work.yaml", tmp_path / "plan.yaml"
    work.write_text("family: moe\nlayers: 2\nexperts: 8\ntop_k: 2\nseq: 1024\nbatch: 8\n")
    plan.write_text("dp: 4\nep: 4\n")
    result = run(
        "--workload", str(work), "--set", "d_model=1024,heads=8,d_ff=2048", "--cluster",
        "tpu-v5e-x4", "--plan", str(plan), "--model", "roofline",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "a step" in result.stdout
    assert "roofline" in result.stdout


def test_bad_speed_is_a_usage_error():
    result = run(
        "--workload", "llama", "--set", SMALL, "--cluster", "h100-sxm-x4", "--model", "roofline",
        "--speed", "fast",
    )  # fmt: skip
    assert result.exit_code == 2


def test_predict_takes_a_cluster_for_a_partitioned_program(tmp_path):
    trace = tmp_path / "trace.json"
    program = str(Path(__file__).parent.parent / "features" / "data" / "gpu_schedule.hlo")
    arguments = ["predict", program, "--cluster", "h100-sxm-x4", "--model", "roofline"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--timeline", str(trace)])
    data = json.loads(result.stdout)
    assert data["collectives"]["all_reduce"]["count"] == 2
    assert data["step_us"] >= data["compute_us"]
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert "ar.start" in names
    assert "critical path" in CliRunner().invoke(app, arguments).stdout


def test_sweep_prints_the_front_and_its_reasons(tmp_path):
    arguments = [
        "sweep", "--workload", "llama", "--set", SMALL, "--cluster", "tpu-v5e-x4", "--model",
        "roofline", "--grid", "tp=1/2,pp=1,recompute=none,split=1", "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "6 plans" in result.stdout
    assert "because of tensor parallelism" in result.stdout
    assert (tmp_path / "sweep.parquet").is_file()


def test_serving_prints_latencies():
    arguments = [
        "simulate-serving", "--workload", "llama", "--set", SMALL, "--cluster", "h100-sxm-x2",
        "--model", "roofline", "--count", "20", "--prompt", "64", "--output", "8", "--json",
    ]  # fmt: skip
    data = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert 0 < data["ttft_p50_ms"] < data["ttft_p99_ms"]
    assert data["cache_tokens"] > 10_000
