import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import ProgramError

SMALL = "layers=4,d_model=1024,heads=8,kv_heads=8,d_ff=4096,vocab=32000,seq=1024,batch=16"


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_simulate_prints_json_and_writes_its_files(tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    step = ("--workload", "llama", "--set", SMALL, "--cluster", "h100-sxm-x4", "--json")
    result = run(
        *step, "--plan", "tp=2,pp=2", "--timeline", str(trace), "--html", str(page), "--speed",
        "1=0.9", "--jitter", "0.05",
    )  # fmt: skip
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    for key in (
        "step_us", "latency_us", "lo_us", "hi_us", "compute_us", "exposed_communication_us",
        "bubble_us", "memory_bytes_per_device", "fits", "tflops_per_device", "mfu",
    ):  # fmt: skip
        assert key in data
    assert data["samples"]["p50_us"] > data["step_us"]
    ends = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if "ts" in e]
    assert abs(max(ends) - data["step_us"]) < 1e-3 * data["step_us"]
    assert page.read_text().startswith("<!doctype html>")
    even = json.loads(run(*step, "--plan", "tp=2,pp=2").stdout)
    assert data["step_us"] > even["step_us"] and "samples" not in even


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
    assert data["latency_us"] == data["step_us"] >= data["compute_us"]
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert "ar.start" in names
    assert "critical path" in CliRunner().invoke(app, arguments).stdout


def test_predict_tells_programs_of_one_device_and_of_several_apart(tmp_path):
    text = """module attributes {mhlo.num_partitions = N : i32} {
      func.func public @main(%x: tensor<64xf32>) -> tensor<64xf32> {
        %y = stablehlo.tanh %x : tensor<64xf32>
        return %y : tensor<64xf32>
      }
    }"""
    common = ["--model", "roofline", "--lowering", "op"]
    for count, where, what in (
        ("4", ["--device", "h100-sxm"], "--cluster h100-sxm-x4"),
        ("1", ["--cluster", "h100-sxm-x4"], "--device h100-sxm"),
    ):
        path = tmp_path / f"of{count}.mlir"
        path.write_text(text.replace("N", count))
        result = CliRunner().invoke(app, ["predict", str(path), *where, *common])
        assert result.exit_code == 1
        assert isinstance(result.exception, ProgramError)
        assert what in str(result.exception)


def test_sweep_prints_the_front_and_its_reasons(tmp_path):
    arguments = [
        "sweep", "--workload", "llama", "--set", SMALL, "--cluster", "tpu-v5e-x4", "--model",
        "roofline", "--grid", "tp=1/2,pp=1,recompute=none,split=1", "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "6 plans" in result.stdout
    assert "because of tensor parallelism" in result.stdout
    assert (tmp_path / "sweep.parquet").is_file()


@pytest.mark.parametrize(
    ("asked", "said"),
    [(("--scaling", "s.png"), "two sizes"), (("--price", "b200=3"), "b200, which no cluster has")],
)
def test_a_sweep_refuses_first_what_its_clusters_cannot_answer(tmp_path, asked, said):
    arguments = ["sweep", "--workload", "llama", "--set", SMALL, "--cluster", "tpu-v5e-x4",
                 "--out", str(tmp_path / "out"), *asked]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and said in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_sweep_where_nothing_fits_says_by_how_much(tmp_path):
    large = "layers=64,d_model=8192,heads=64,kv_heads=8,d_ff=32768,vocab=32000,batch=8"
    result = CliRunner().invoke(
        app,
        ["sweep", "--workload", "llama", "--set", large, "--cluster", "h100-sxm-x4", "--model",
         "roofline", "--grid", "tp=2/4,pp=1,split=1", "--compiled",
         "--power-cap", "500W", "--out", str(tmp_path)],
        env={"COLUMNS": "300"},
    )  # fmt: skip
    assert result.exit_code == 1
    assert "0 fit the memory" in result.stdout and "MFU" not in result.stdout
    # With all that was asked, to be copied.
    near = re.search(r"nothing fits: the plan that needs least, (.*), needs ", result.stdout)[1]
    assert f"--workload llama --cluster h100-sxm-x4 --set {large} --model" in near
    assert "roofline --compiled --power-cap 500W --plan" in near
    again = CliRunner().invoke(app, ["simulate", *shlex.split(near)], catch_exceptions=False)
    assert "does NOT fit" in again.stdout
    # 61.4e9 parameters at 16 bytes are 983 GB, of 86 each.
    devices = int(re.search(r"alone need at least (\d+) devices", result.stdout)[1])
    assert devices in (11, 12)


def test_the_fastest_plan_of_a_sweep_can_be_copied(tmp_path, monkeypatch):
    """With all that was asked; a plan with its settings is longer than a column of the table."""
    monkeypatch.setenv("COLUMNS", "80")
    small = SMALL.replace("seq=1024", "seq=512")
    common = ["--workload", "llama", "--set", small, "--model", "roofline"]
    common += ["--framework", "nemo", "--compiled", "--power-cap", "500W"]
    grid = "tp=2,pp=2,recompute=selective,schedule=zero-bubble,split=2,data=zero1"
    swept = (
        CliRunner()
        .invoke(
            app,
            ["sweep", *common, "--cluster", "dgx-h100-x16", "--grid", grid, "--out", str(tmp_path)],
            catch_exceptions=False,
        )
        .stdout
    )
    (fastest,) = (line for line in swept.splitlines() if line.startswith("fastest: "))
    options = fastest.removeprefix("fastest: ").split()
    assert "schedule=zero-bubble" in options[-1] and "…" not in fastest
    again = CliRunner().invoke(app, ["simulate", *options, "--json"], catch_exceptions=False)
    best = pd.read_parquet(tmp_path / "sweep.parquet").query("fits")["step_us"].min()
    found = json.loads(again.stdout)
    assert found["step_us"] == pytest.approx(best)
    # What the step alone would note stands below the sweep, too, such as that operators are priced
    # by rooflines.
    shown = " ".join(swept.split())
    assert found["notes"] and all(note in shown for note in found["notes"])


SERVING = (
    "simulate-serving", "--workload", "llama", "--set", SMALL, "--cluster", "h100-sxm-x2",
    "--model", "roofline",
)  # fmt: skip


def served(*options):
    arguments = [*SERVING, *options, "--json"]
    return json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)


def test_serving_prints_latencies(tmp_path):
    data = served("--count", "20", "--prompt", "64", "--output", "geometric:8", "--rate", "50")
    assert 0 < data["median_ttft_ms"] <= data["p99_ttft_ms"]
    assert data["mean_ttft_ms_lo"] < data["mean_ttft_ms"] < data["mean_ttft_ms_hi"]
    assert data["cache_tokens"] > 10_000 and data["completed"] == 20
    assert data["lo_us"] < data["latency_us"] < data["hi_us"]
    assert data["num_prompts"] == 20 and data["burstiness"] == 1.0 and data["std_ttft_ms"] > 0
    assert 0 < data["energy_lo_j"] < data["energy_j"] < data["energy_hi_j"]
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    text = CliRunner().invoke(
        app,
        [*SERVING, "--concurrency", "4", "--price", "2", "--slo", "ttft=1s", "--html", str(page),
         "--timeline", str(trace)],
        catch_exceptions=False,
    ).stdout  # fmt: skip
    assert "time to first token" in text and "goodput" in text and "$ a million" in text
    assert "J an output token" in text and "$ a request" in text
    assert "traceEvents" in json.loads(trace.read_text()) and page.stat().st_size > 10_000


def test_serving_without_a_load_takes_one_that_it_can_keep_up_with():
    """Someone who knows the model and the chip alone: neither an idle nor a drowned service."""
    short = ("--count", "200", "--prompt", "256", "--output", "geometric:32", "--json")
    done = CliRunner().invoke(app, [*SERVING, *short], catch_exceptions=False)
    at_once = served(*short[:-1], "--offline")["request_throughput"]
    rate = json.loads(done.stdout)["request_rate"]
    assert rate == pytest.approx(0.7 * at_once, rel=0.06)
    assert f"note: no load given: assuming --rate {rate:g}, 70% of" in done.stderr
    # The queue stays short: half of the requests are served at most at twice the time of one.
    alone = served("--rate", str(rate / 50), *short[:-1])
    assert json.loads(done.stdout)["median_e2el_ms"] < 4 * alone["median_e2el_ms"]


def test_serving_prints_no_times_of_tokens_that_are_not_generated():
    asked = [*SERVING, "--count", "20", "--prompt", "64", "--rate", "1", "--output", "1"]
    text = CliRunner().invoke(app, asked, catch_exceptions=False).stdout
    assert "input tokens/s" in text and "whole request" in text
    assert "further token" not in text and "between tokens" not in text
    # At a request a second of what takes a millisecond nothing is uncertain of the throughput.
    assert "tokens a second those of the load" in text


def test_an_slo_that_no_request_keeps_ends_with_1():
    asked = [*SERVING, "--count", "20", "--prompt", "64", "--output", "8", "--rate", "5"]
    missed = CliRunner().invoke(app, [*asked, "--slo", "ttft=0.001ms"])
    assert missed.exit_code == 1 and "no request meets the SLO" in missed.stderr
    assert "goodput" in missed.stdout
    assert CliRunner().invoke(app, [*asked, "--slo", "ttft=10s"]).exit_code == 0


def test_serving_takes_its_limits(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt,output\n" + "0,100,4\n" * 6)

    def limited(*options):
        return served("--requests", str(trace), *options)

    assert limited("--max-batch", "2")["largest_batch"] == 2
    assert limited("--token-budget", "100")["iterations"] > limited()["iterations"]
    assert limited("--plan", "tp=1,dp=2")["replicas"] == 2
    assert limited("--plan", "tp=1", "--replicas", "1")["gpus"] == 1
    apart = limited("--plan", "tp=1", "--prefill", "tp=1")
    assert apart["gpus"] == 2 and "prefill" in apart["plan"]
    drafted = limited("--drafts", "2", "--accepted", "2", "--draft", "mtp")
    assert "draft model" in drafted["memory_bytes_per_device"]


MINE = """
name: mine
base: h100-sxm
hbm_bandwidth_gbps: 6000
sources: {}
"""
CLUSTER = """
name: pair
device: DEVICE
dimensions:
  - {name: link, kind: switch, size: 2, bandwidth_gbps: 100, latency_us: 1}
"""


def test_serving_and_its_plans_take_a_device_by_its_file(tmp_path):
    device, pair = tmp_path / "mine.yaml", tmp_path / "pair.yaml"
    device.write_text(MINE)
    pair.write_text(CLUSTER.replace("DEVICE", str(device)))
    large = "layers=32,d_model=4096,heads=32,kv_heads=8,d_ff=14336,vocab=32000"

    def ran(*words):
        command = [*words, "--workload", "llama", "--set", large, "--json"]
        return json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)

    load = ("--model", "roofline", "--concurrency", "4", "--count", "8", "--output", "64")
    own, listed, both = (
        ran("simulate-serving", *where, "--plan", "tp=1", *load)
        for where in (
            ("--device", str(device)), ("--device", "h100-sxm"), ("--cluster", str(pair))
        )
    )  # fmt: skip
    # Decoding reads weights and caches: a memory of 6,000 instead of 3,350 GB/s shows.
    assert own["mean_tpot_ms"] < 0.9 * listed["mean_tpot_ms"]
    assert own["device"] == both["device"] == "mine"
    assert both["replicas"] == 2 and both["mean_tpot_ms"] == pytest.approx(own["mean_tpot_ms"], 0.1)
    # The links are those of the cluster's file.
    slow = tmp_path / "slow.yaml"
    slow.write_text(pair.read_text().replace("bandwidth_gbps: 100", "bandwidth_gbps: 1"))
    fast, late = (
        ran("simulate-serving", "--cluster", str(file), "--plan", "tp=2", *load)
        for file in (pair, slow)
    )
    assert late["mean_ttft_ms"] > 1.5 * fast["mean_ttft_ms"]
    plan = ran(
        "plan-serving", "--device", str(device), "--gpus", "2", "--slo", "ttft=1s", "--load",
        "concurrency=4,prompt=64,output=16,count=8", "--operators", "roofline",
    )  # fmt: skip
    assert plan["best"]["device"] == "mine" and plan["best"]["keeps_slo"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plan", "zero=2"], "'zero=2' is not an option"),
        (["--plan", "ep=2"], "is for models with experts"),
        (["--plan", "tp=4"], "need 4 devices"),
        (["--plan", "tp=1", "--prefill", "tp=2"], "need 3 devices (2 of them run prompts)"),
        (["--framework", "vlmm"], "framework 'vlmm' is not known (vllm"),
        (["--kv-cache", "banana"], "a cache in 'banana' is not known"),
        (["--prompt", "9000000", "--memory", "0.1"], "a request needs"),
        (["--set", "experts=10000,top_k=2"], "do not fit"),
        (["--set", "layers=10000"], "layers is given twice"),
        (["--set", "causal=false"], "generates nothing"),
        (["--rate", "0"], "give a finite rate above 0"),
        (["--rate", "inf"], "give a finite rate above 0, or --offline"),
        (["--concurrency", "4", "--rate", "2"], "--rate does not apply"),
        (["--device", "h100-sxm"], "either --cluster or --device"),
        (["--cluster", "", "--device", "cpu-amd-epyc-2c"], "for GPUs and TPUs, not for cpu-amd-"),
        (["--cluster", "", "--device", "cpu-i7-12700h"], "for GPUs and TPUs, not for cpu-i7-"),
        (["--preemption", "drop"], "recompute or swap"),
        (["--accepted", "2"], "--accepted does not apply"),
        (["--weights", "ternary"], "ternary"),
        (["--router", "random"], "'random' is not known"),
        (["--experts", "fp8"], "the model has none"),
        (["--prefix-hits", "0.5", "--no-prefix-cache"], "without a prefix cache"),
        (["--whole-prompts", "--token-budget", "512"], "a prompt has 1024 tokens, a pass at most"),
    ],
)
def test_serving_refuses_what_it_cannot_do(options, said):
    result = CliRunner().invoke(app, [*SERVING, *options], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert said in str(result.exception) + " ".join(result.output.replace("│", " ").split())


def test_serving_takes_models_that_no_step_has():
    load = ["--concurrency", "2", "--count", "4", "--output", "8", "--model", "roofline", "--json"]
    named = ["--workload", "llama-4-scout", "--weights", "fp8", "--device", "h200-sxm"]
    result = CliRunner().invoke(app, ["simulate-serving", *named, *load], catch_exceptions=False)
    # 107 billion parameters in 8 bits, the two tables of 202,048 x 5,120 in 16.
    held = json.loads(result.stdout)["memory_bytes_per_device"]
    weights = sum(held[k] for k in ("embedding and head", "attention", "feed-forward", "experts"))
    assert weights == pytest.approx(107.8e9 + 2 * 202048 * 5120, rel=0.02)
    step = ["--workload", "llama-4-scout", "--cluster", "dgx-h100-x8"]
    assert "take turns" in str(CliRunner().invoke(app, ["simulate", *step]).exception)


def test_serving_says_which_requests_are_beyond_the_checkpoint(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
             "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 1000}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **sizes, "max_position_embeddings": 100}))
    load = ["--concurrency", "1", "--count", "4", "--output", "8", "--model", "roofline", "--json"]
    for prompt, told in (("92", 0), ("93", 1)):
        asked = ["--hf", str(file), "--device", "h100-sxm", "--prompt", prompt, *load]
        said = CliRunner().invoke(app, ["simulate-serving", *asked], catch_exceptions=False).stdout
        notes = [note for note in json.loads(said)["notes"] if "100 tokens" in note]
        assert len(notes) == told


def test_planning_prints_the_best_and_its_commands():
    arguments = [
        "plan-serving", "--workload", "llama", "--set", SMALL, "--device", "h100-sxm", "--gpus",
        "2", "--slo", "ttft=1s", "--load", "concurrency=8,prompt=64,output=16,count=24",
        "--operators", "roofline",
    ]  # fmt: skip
    narrow = {"COLUMNS": "80"}
    text = CliRunner().invoke(app, arguments, catch_exceptions=False, env=narrow).stdout
    assert "vllm serve" in text and "trtllm-serve" in text and "because engines" in text
    # How sure it is stands beside it, with intervals of what is compared, in 80 columns.
    assert "on 1 of 2 x h100-sxm" in text and "keeps the SLO" in text and "sure" in text
    table = text[text.index("TTFT p90") :]
    assert "\u2013" in table and max(map(len, table.splitlines())) <= 80
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert data["best"]["keeps_slo"] and data["best"]["gpus"] == 1
    assert 0.5 <= data["best"]["keeps_slo_probability"] <= 1.0
    assert data["best"]["p90_ttft_ms_lo"] < data["best"]["p90_ttft_ms_hi"]
    whole = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--all-gpus"]).stdout)
    assert whole["best"]["gpus"] == 2


def test_planning_says_what_does_not_fit():
    large = "layers=64,d_model=8192,heads=64,kv_heads=8,d_ff=32768,vocab=32000"
    arguments = [
        "plan-serving", "--workload", "llama", "--set", large, "--device", "h100-sxm", "--load",
        "concurrency=8,prompt=64,output=16,count=24", "--operators", "roofline", "--together",
    ]  # fmt: skip

    def planned(gpus, *options):
        words = [*arguments, "--gpus", gpus, *options]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    # 61.4e9 parameters in 16 bits on 80 GiB.
    none = planned("1")
    assert none.exit_code == 1 and "nothing fits: it takes at least 2 devices" in none.output
    assert "GiB are missing" in none.output and "tokens/s a device" not in none.output
    some = planned("2")
    assert (
        some.exit_code == 0 and "1 x (tp=1) does not fit (nor do 1 more): weights of" in some.output
    )
    # The note that simulate-serving has on loads in lock-step.
    full = planned("2", "--load", "concurrency=16,prompt=256,output=128,count=64")
    assert "as in benchmarks with fixed lengths, and wait" in full.output


def test_planning_takes_what_serving_takes():
    arguments = [
        "plan-serving", "--workload", "llama", "--set", SMALL, "--device", "h100-sxm", "--gpus",
        "2", "--load", "concurrency=8,prompt=64,output=16,count=24", "--operators", "roofline",
        "--together", "--json",
    ]  # fmt: skip

    def planned(*options):
        return CliRunner().invoke(app, [*arguments, *options])

    def best(*options):
        found = planned(*options)
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    plain = best()
    told = best("--memory", "0.5", "--block", "64", "--eager", "--max-batch", "4")
    assert told["best"]["cache_tokens"] < plain["best"]["cache_tokens"]
    assert told["best"]["largest_batch"] == 4
    flags = {row["flag"]: row["value"] for row in told["launch"]["vLLM"]}
    assert flags["--gpu-memory-utilization"] == "0.5" and flags["--block-size"] == "64"
    assert flags["--max-num-seqs"] == "4" and "--enforce-eager" in flags
    drafted = best("--drafts", "2", "--accepted", "2", "--draft", "mtp", "--token-budget", "512")
    assert "draft model" in drafted["best"]["memory_bytes_per_device"]
    assert drafted["best"]["iterations"] < plain["best"]["iterations"]
    hopeless = planned("--slo", "ttft=0.001ms")
    assert hopeless.exit_code == 1 and "best" in json.loads(hopeless.stdout)
    routed = planned("--router", "prefix-aware")
    assert routed.exit_code != 0 and "with block hashes" in str(routed.exception)


CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": 1024, "intermediate_size": 4096,
    "moe_intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 32000, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_a_model_by_name_or_by_its_config_for_steps_and_sweeps(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    common = ["--set", "batch=16,seq=1024", "--cluster", "h100-sxm-x4", "--model", "roofline"]
    result = run("--hf", str(config), *common, "--json")
    assert json.loads(result.stdout)["devices"] == 4
    assert "multi-token prediction" in result.stderr
    assert any("multi-token prediction" in note for note in json.loads(result.stdout)["notes"])
    named = run("--workload", "qwen-2.5-0.5b", *common, "--json")
    assert 0.49e9 < json.loads(named.stdout)["parameters"] < 0.5e9
    grid = ["--grid", "tp=1,pp=1,recompute=none,split=1", "--out", str(tmp_path / "sweep")]
    swept = CliRunner().invoke(app, ["sweep", "--hf", str(config), *common, *grid])
    assert "plans" in swept.stdout, swept.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either --workload NAME or --hf"),
        (["--workload", "llama", "--hf", "config.json"], "either"),
        (["--hf", "model.safetensors"], "takes a model's config.json"),
    ],
)
def test_a_workload_is_given_in_one_way(words, said):
    result = run(*words, "--cluster", "h100-sxm-x4")
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("option", ["--count", "--prompt", "--output", "--max-batch"])
def test_serving_beyond_any_engine_is_refused(option):
    arguments = ["simulate-serving", "--workload", "llama", "--cluster", "dgx-h100-x8"]
    result = CliRunner().invoke(app, [*arguments, option, "1000000000000"])
    assert result.exit_code == 2 and option in result.output
