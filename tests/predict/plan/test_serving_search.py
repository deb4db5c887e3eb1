"""The search of deployments: what is tried, what wins, and how it is launched."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from opcast.common.errors import PlanError
from opcast.models.serving.effects import ServingEffects
from opcast.models.serving.model import ServingModel
from opcast.models.trust.calibrator import NORMAL_90
from opcast.predict.cluster.deployment import Deployment, Workers, draft_model
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import EngineOptions, LoadSpec
from opcast.predict.cluster.serving_launch import launches
from opcast.predict.plan.serving_search import (
    deployments,
    engine_plans,
    search,
)
from opcast.simulate.serving.checkpoints import UNKNOWN, Checkpoint, find_checkpoint, served_by_name
from opcast.simulate.serving.latencies import Slo
from opcast.simulate.serving.served import EnginePlan, Formats, ServedModel
from opcast.simulate.step.memory import RESERVED_BYTES
from opcast.simulate.step.named_workloads import make_workload

DENSE = make_workload(
    "llama", {"layers": 16, "d_model": 2048, "heads": 16, "kv_heads": 8, "d_ff": 8192}
)
BASE = Deployment(ServedModel(DENSE), "h100-sxm")
#: Its host is not hidden behind passes of 0.7 ms, which more devices make shorter.
IN_TURN = replace(BASE, framework="vllm", version="0.13")
EIGHT = Workers(EnginePlan(tp=8, moe_tp=8))
SPEC = LoadSpec(prompt="512", output="64", concurrency=32, count=96)


def predictor() -> ServingPredictor:
    return ServingPredictor(None, ServingModel())


def test_plans_of_an_engine() -> None:
    found = {plan.text() for plan in engine_plans(BASE, 4)}
    assert found == {"tp=1", "tp=2", "pp=2", "tp=4", "tp=2,pp=2", "pp=4"}
    moe = Deployment(ServedModel(replace(DENSE, experts=8, top_k=2)), "h100-sxm")
    assert {"tp=4,ep=4", "dp=4,ep=4", "tp=2,dp=2,ep=4"} <= {p.text() for p in engine_plans(moe, 4)}
    # Tensor parallelism stays within a box of eight.
    assert max(plan.tp for plan in engine_plans(BASE, 16)) == 8


def test_deployments_use_all_devices() -> None:
    tried = list(deployments(BASE, 4))
    assert {one.devices for one in tried} == {4}
    assert any(one.prefill is not None for one in tried)
    assert all(one.prefill is None for one in deployments(BASE, 4, apart=False))
    # Half and three quarters of three devices are two.
    three = [(one.engine, one.prefill) for one in deployments(BASE, 3)]
    assert len(three) == len(set(three)) and any(first for _, first in three)


def test_the_best_keeps_the_slo_and_says_why() -> None:
    found = search(predictor(), BASE, 4, SPEC, Slo(ttft=1.0, tpot=0.02), fewer=False)
    best = found.best
    assert best is not None and best.keeps
    rivals = [one for one in found.judged if one.keeps]
    most = max(one.tokens_per_s_per_device for one in rivals)
    assert best.tokens_per_s_per_device >= 0.99 * most
    reasons = found.reasons()
    begun = ("engines are ", "prompts run ", "the limit is ")
    assert reasons and all(line.startswith(begun) for line in reasons)
    # Where prompts run is said by a preposition, everything else follows one.
    assert all("with on" not in line and "with beside" not in line for line in reasons)
    assert all(": with " in line for line in reasons if not line.startswith("prompts"))
    front = found.front()
    rates = [one.tokens_per_s_per_device for one in front]
    assert rates == sorted(rates, reverse=True)
    # Who gives less has one of the latencies shorter.
    for more, less in pairwise(front):
        assert less.ttft < more.ttft or less.tpot < more.tpot
    assert found.to_dict()["best"] is not None


def test_the_cheapest_of_fewer_devices_keeps_the_slo_and_says_how_sure_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ends are e times the estimate.
    monkeypatch.setattr(ServingEffects, "spread", lambda *_: 1.0 / NORMAL_90)
    # Some 20 requests a second are a fraction of what one device serves.
    spec = replace(SPEC, concurrency=0, rate=5.0, count=200)
    found = search(predictor(), IN_TURN, 4, spec, Slo(ttft=1.0, tpot=0.05), apart=False)
    best = found.best
    assert best is not None and best.deployment.devices == 1
    assert {one.deployment.devices for one in found.judged} == {1, 2, 4}
    whole = search(predictor(), IN_TURN, 4, spec, Slo(ttft=1.0), apart=False, fewer=False)
    assert {one.deployment.devices for one in whole.judged} == {4}
    # Throughput is the load's: what others cost is devices.
    lines = found.reasons()
    assert any("100% more device time" in line for line in lines)
    assert not any("throughput" in line for line in lines)
    # The first of the table is the best, and those that keep the SLO come before others.
    front = found.front()
    assert front[0] is best
    kept = [one.keeps for one in front]
    assert kept == sorted(kept, reverse=True)
    # Just at the estimate it is a toss-up, and the answer says so.
    limit = best.tpot * 1.001
    tight = search(predictor(), IN_TURN, 4, spec, Slo(ttft=1.0, tpot=limit), apart=False)
    assert tight.best is not None and tight.best.sure == pytest.approx(0.5, abs=0.02)
    data = tight.to_dict()
    assert data["by_estimate_only"] and data["best"]["keeps_slo_probability"] < 0.55  # type: ignore[index]
    surer = tight.surest
    assert surer is not None and surer.sure > tight.best.sure + 0.1
    assert surer.deployment.devices > 1
    # Three times the estimate is beyond its end.
    loose = search(predictor(), IN_TURN, 1, spec, Slo(tpot=best.tpot * 3.0), apart=False)
    assert loose.best is not None and loose.best.sure >= 0.95
    assert loose.surest is None and not loose.to_dict()["by_estimate_only"]


def test_deployments_that_cannot_win_are_not_judged() -> None:
    spec = replace(SPEC, concurrency=0, rate=5.0, count=100)
    found = search(predictor(), IN_TURN, 4, spec, Slo(ttft=1.0, tpot=0.02))
    screened = [one for one in found.judged if one.screened]
    assert found.screened == len(screened) == found.to_dict()["screened"] > 0
    best, surest = found.best, found.surest
    assert best is not None and not best.screened
    # Judging them all changes neither.
    for one in screened:
        assert one.keeps == (one.miss <= 1.0 and one.prediction.overload <= 0.5)
    assert found.best is best and found.surest is surest and not found.screened


def test_what_helps_an_slo_that_none_keeps_is_tried_first() -> None:
    alone = replace(SPEC, concurrency=1, count=10)
    sizes = {"layers": 32, "d_model": 8192, "heads": 64, "kv_heads": 8, "d_ff": 20480}
    base = replace(BASE, model=ServedModel(make_workload("llama", sizes)))
    one = search(predictor(), base, 1, alone, Slo(tpot=1.0), apart=False).best
    assert one is not None
    slo = Slo(tpot=0.8 * one.tpot)
    found = search(predictor(), base, 1, alone, slo, apart=False)
    nearest, *helps = found.misses()
    assert "times the limit" in nearest and "p90 of TPOT" in nearest
    assert {"fp8 weights", "engines twice as wide (2 devices)"} <= set(found.helps)
    # Half of the bytes, and two devices that read them at once.
    assert all(found.helps[c].keeps for c in ("fp8 weights", "engines twice as wide (2 devices)"))
    for line, (change, other) in zip(helps, found.helps.items(), strict=True):
        kept = other.tpot <= slo.tpot
        assert line.startswith(f"{change} would " + ("meet it" if kept else "not suffice"))


def test_an_slo_that_none_keeps_and_models_that_do_not_fit() -> None:
    found = search(predictor(), BASE, 2, SPEC, Slo(ttft=1e-6), apart=False)
    assert found.best is None and found.misses()[0].startswith("nearest is")
    assert found.launches() == {}
    # No pass reads the weights in a microsecond.
    pruned = search(predictor(), BASE, 2, SPEC, Slo(tpot=1e-6), apart=False)
    # One and two engines of a device, and two of two; the fastest is simulated to say how slow.
    assert pruned.pruned == 4 and len(pruned.judged) == 1
    large = replace(BASE, model=ServedModel(replace(DENSE, layers=200, d_ff=65536)))
    refused = search(predictor(), large, 2, SPEC, Slo(), apart=False)
    assert refused.best is None and refused.nothing_fits and not pruned.nothing_fits
    why = refused.refused["2 x (tp=1)"]
    assert "missing, from feed-forward on (weights in GiB: " in why
    # Three products of 2048 x 65536 and four of attention in 200 layers, and the vocabulary's.
    weights = 2 * (200 * (3 * 2048 * 65536 + 2 * 2048 * 2048 + 2 * 2048 * 1024) + 2 * 2048 * 32000)
    # With half of what is kept for activations, and two per cent left alone.
    missing = weights + RESERVED_BYTES / 2 - 0.98 * large.spec.usable_bytes
    told = float(re.search(r"([\d.]+) GiB are missing", why)[1])
    assert told == pytest.approx(missing / 2**30, abs=0.2)
    # 152 GiB of weights take more than two devices of 80 that keep some for themselves, four do.
    assert refused.fewest == 4 and refused.to_dict()["fewest_devices"] == 4
    # 686 GiB in fp8 take more than a pipeline of eight, and vLLM cuts no feed-forward of 1025
    # blocks of 128 columns, so that no engine holds them.
    odd = replace(DENSE, layers=900, d_ff=1025 * 128)
    blocks = replace(large, model=ServedModel(odd, weights="fp8", block=128), framework="vllm")
    assert search(predictor(), blocks, 1, SPEC, Slo(), apart=False).fewest == 0
    even = replace(blocks, model=replace(blocks.model, workload=replace(odd, d_ff=1024 * 128)))
    assert search(predictor(), even, 1, SPEC, Slo(), apart=False).fewest == 16


def test_an_interrupt_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def show(done: int, of: int, what: str) -> None:
        asked.append(what)
        if done == 2:
            raise KeyboardInterrupt

    found = search(predictor(), BASE, 4, SPEC, Slo(), show=show)
    assert found.stopped and len(found.judged) == 2 and found.best is not None


def commands_of(own: Deployment, model: str) -> dict[str, str]:
    checkpoint = find_checkpoint(model)
    return {name: launch.command for name, launch in launches(own, checkpoint).items()}


def test_launch_commands() -> None:
    moe = ServedModel(replace(DENSE, experts=8, top_k=2), cache="fp8")
    plan = EnginePlan(tp=2, dp=4, ep=8)
    own = Deployment(
        moe,
        "h100-sxm",
        engine=Workers(plan, 2),
        options=EngineOptions(max_batch=64, memory=0.85, eager=True),
    )
    commands = commands_of(own, "me/model")
    assert commands["vLLM"] == (
        "vllm serve me/model --tensor-parallel-size 2 --data-parallel-size 4 "
        "--enable-expert-parallel --max-num-seqs 64 --max-num-batched-tokens 8192 "
        "--kv-cache-dtype fp8 --gpu-memory-utilization 0.85 --enforce-eager   "
        "# x 2, behind a router: round-robin"
    )
    assert "--tp-size 8" in commands["SGLang"] and "--enable-dp-attention" in commands["SGLang"]
    assert "--max-running-requests 256" in commands["SGLang"]
    assert "--tp_size 8 --ep_size 8 --max_batch_size 64" in commands["TensorRT-LLM"]
    # A shell hands the lines of the file of options over one by one.
    written = commands["TensorRT-LLM"].split("<(")[1].split(")   #")[0]
    lines = subprocess.run(["bash", "-c", written], capture_output=True, text=True, check=True)
    assert lines.stdout.splitlines() == [
        "enable_attention_dp: true", "kv_cache_config: {dtype: fp8}", "cuda_graph_config: null"
    ]  # fmt: skip
    apart = commands_of(replace(BASE, prefill=Workers(EnginePlan())), "m")
    assert "kv_producer" in apart["vLLM prefill"] and "kv_consumer" in apart["vLLM decode"]
    assert "--disaggregation-mode decode" in apart["SGLang decode"]


def test_commands_set_how_prompts_wait_to_be_batched() -> None:
    def command(framework: str, own: Deployment = BASE, **options: object) -> str:
        told = EngineOptions(**options)  # type: ignore[arg-type]
        own = replace(own, framework=framework, options=told)
        return launches(own)[
            {"sglang": "SGLang", "vllm": "vLLM"}.get(framework, "TensorRT-LLM")
        ].command

    assert "--scheduler-recv-interval 30" in command("sglang", recv_interval=30)
    assert "--async-scheduling" in command("vllm", async_scheduling=True)
    assert "--no-async-scheduling" in command("vllm", async_scheduling=False)
    assert "async" not in command("vllm")
    waits = {"batch_wait_iters": 40, "batch_wait_ratio": 0.8}
    told = command("tensorrt-llm", **waits)
    assert "batch_wait_timeout_iters: 40" in told and "batch_wait_max_tokens_ratio: 0.8" in told
    moe = ServedModel(replace(DENSE, experts=8, top_k=2))
    apart = replace(BASE, model=moe, engine=Workers(EnginePlan(dp=2, ep=2)))
    balanced = "attention_dp_config: {enable_balance: true, timeout_iters: 60}"
    assert balanced in command("tensorrt-llm", apart)
    assert "attention_dp_config" not in command("tensorrt-llm")
    with pytest.raises(
        PlanError, match=r"recv_interval: vllm has no such option .only sglang has it"
    ):
        replace(BASE, framework="vllm", options=EngineOptions(recv_interval=30))
    with pytest.raises(PlanError, match="only work together"):
        command("tensorrt-llm", batch_wait_iters=40)
    with pytest.raises(PlanError, match="without dp"):
        command("tensorrt-llm", apart, **waits)


def test_flags_are_explained_in_the_words_of_each_framework() -> None:
    moe = replace(BASE, model=ServedModel(replace(DENSE, experts=8, top_k=2)))

    def whys(plan: EnginePlan) -> dict[str, str]:
        found = launches(replace(moe, engine=Workers(plan)))
        return {flag.name: flag.why for launch in found.values() for flag in launch.flags}

    cut = whys(EnginePlan(tp=4, ep=4))
    shared = "devices that share each layer"
    assert cut["--tensor-parallel-size"] == cut["--tp-size"] == cut["--tp_size"] == shared
    # A switch is no number of ranks.
    assert "instead of split across" in cut["--enable-expert-parallel"]
    apart = whys(EnginePlan(tp=2, dp=4, ep=8))
    assert "attention runs apart" in apart["--tp-size"]
    assert apart["--dp-size"].startswith("data-parallel")
    # TensorRT-LLM has no groups of ranks that attend apart: all of them do.
    said = launches(replace(moe, engine=Workers(EnginePlan(tp=2, dp=4, ep=8))))
    assert "data-parallel on all 8 ranks, here on 4 groups of 2" in said["TensorRT-LLM"].command


def test_flags_are_a_table_that_says_why() -> None:
    options = EngineOptions(memory=0.85, block=64, drafts=3, draft="mtp", chunked=False)
    own = replace(BASE, engine=Workers(EnginePlan(dp=2, ep=2)), options=options)
    own = replace(own, model=ServedModel(replace(DENSE, experts=8, top_k=2)))
    rows = {name: launch.rows() for name, launch in launches(own).items()}
    value = {name: {r["flag"]: r["value"] for r in table} for name, table in rows.items()}
    assert all(r["why"] for table in rows.values() for r in table)
    assert value["vLLM"]["--no-enable-chunked-prefill"] == ""
    assert value["vLLM"]["--block-size"] == value["SGLang"]["--page-size"] == "64"
    drafted = json.loads(value["vLLM"]["--speculative-config"])
    assert drafted == {"method": "mtp", "num_speculative_tokens": 3}
    assert value["SGLang"]["--speculative-num-draft-tokens"] == "4"
    assert value["SGLang"]["--chunked-prefill-size"] == "-1"
    assert "num_nextn_predict_layers: 3" in value["TensorRT-LLM"]["speculative_config"]
    # vLLM counts what passes need in its share of the memory, SGLang does not, and TensorRT-LLM
    # takes a share of what weights leave.
    capacity = own.spec.usable_bytes
    free = capacity - own.model.weight_bytes(own.engine.plan) - RESERVED_BYTES
    cache = free - 0.15 * capacity
    assert value["vLLM"]["--gpu-memory-utilization"] == "0.85"
    static = float(value["SGLang"]["--mem-fraction-static"])
    # Half of what is reserved is taken before SGLang looks what is there.
    held = 0.85 * capacity - RESERVED_BYTES
    assert static == pytest.approx(held / (capacity - RESERVED_BYTES / 2), abs=1e-3)
    share = float(value["TensorRT-LLM"]["--kv_cache_free_gpu_memory_fraction"])
    assert share == pytest.approx(cache / free, abs=1e-3)
    # SGLang shares the budget of an engine out among its ranks.
    may_cut = replace(own, options=replace(options, chunked=None))
    cut = {r["flag"]: r["value"] for r in launches(may_cut)["SGLang"].rows()}
    assert cut["--chunked-prefill-size"] == str(2 * 8192)
    fresh = launches(replace(own, options=replace(options, prefix_cache=False)))
    assert "--no-enable-prefix-caching" in fresh["vLLM"].command
    assert "--disable-radix-cache" in fresh["SGLang"].command
    assert "enable_block_reuse: false" in fresh["TensorRT-LLM"].command
    # It keeps all tokens unless it is told the windows.
    turns = replace(own.model, workload=replace(own.model.workload, window=128, window_share=0.5))
    said = {name: one.remarks for name, one in launches(replace(own, model=turns)).items()}
    assert "max_attention_window" in " ".join(said["TensorRT-LLM"])
    assert "max_attention_window" not in " ".join(said["vLLM"])
    # What no engine has is said.
    own = replace(own, options=replace(options, preemption="swap", watermark=0.1))
    own = replace(own, engine=Workers(EnginePlan(dp=2, ep=2), 3))
    told = {name: " ".join(launch.remarks) for name, launch in launches(own).items()}
    assert "x 3, behind a router: round-robin" in told["vLLM"]
    assert "not swapped" in told["SGLang"] and "host_cache_size" in told["TensorRT-LLM"]
    assert all("kept free" in text for text in told.values())
    small = replace(options, draft="llama-3.2-1b")
    named = launches(replace(own, options=small))["vLLM"]
    assert (
        '"model":"llama-3.2-1b"' in named.command and "checkpoint of llama-3.2-1b" in named.command
    )


def test_launch_commands_say_the_format_of_the_weights() -> None:
    def commands(**formats: str) -> dict[str, str]:
        return commands_of(replace(BASE, model=ServedModel(DENSE, **formats)), "me/m")

    assert not any("quant" in text or "#" in text for text in commands().values())
    fp8 = commands(weights="fp8")
    assert "--quantization fp8" in fp8["vLLM"] and "--quantization fp8" in fp8["SGLang"]
    assert fp8["TensorRT-LLM"].endswith("   # me/m has to be a checkpoint in fp8")
    for text in commands(weights="nvfp4").values():
        assert text.endswith("# me/m has to be a checkpoint in nvfp4") and "--quant" not in text


def test_a_checkpoint_in_its_own_format_needs_no_flag_for_it() -> None:
    def commands(name: str, weights: str = "") -> dict[str, str]:
        model = served_by_name(name, {}, Formats(weights))
        return commands_of(replace(BASE, model=model, engine=EIGHT), name)

    for name in ("openai/gpt-oss-120b", "RedHatAI/Qwen3-32B-FP8-dynamic", "deepseek-v3"):
        for text in commands(name).values():
            assert "quant" not in text and "has to be" not in text and UNKNOWN.name not in text
    assert "serve openai/gpt-oss-120b " in commands("openai/gpt-oss-120b")["vLLM"]
    assert "--quantization fp8" in commands("Qwen/Qwen3-32B", "fp8")["vLLM"]
    other = commands("openai/gpt-oss-120b", "nvfp4")["vLLM"]
    assert other.endswith("# openai/gpt-oss-120b has to be a checkpoint in nvfp4")


def test_commands_start_where_memory_is_short(tmp_path: Path) -> None:
    # 70.6e9 parameters in 16 bits are 141.1e9 bytes: more than 0.9 of an H200 leaves for them.
    own = Deployment(served_by_name("llama-3.3-70b", {}, Formats()), "h200-sxm")
    flags = {
        name: {row["flag"]: row["value"] for row in launch.rows()}
        for name, launch in launches(own, find_checkpoint("llama-3.3-70b"), 1152).items()
    }
    assert flags["vLLM"]["--gpu-memory-utilization"] == "0.98"
    capacity, held = own.spec.usable_bytes, own.model.weight_bytes(EnginePlan())
    cache = 0.98 * capacity - held - RESERVED_BYTES / 2
    static = (held + cache) / (capacity - RESERVED_BYTES / 2)
    assert float(flags["SGLang"]["--mem-fraction-static"]) == pytest.approx(static, abs=2e-3)
    # Keys and values of 80 layers, 8 heads of 128, in 16 bits, nine tenths of the cache.
    limit = int(0.9 * cache / (2 * 80 * 8 * 128 * 2))
    assert int(flags["vLLM"]["--max-model-len"]) == pytest.approx(limit, abs=1)
    assert flags["SGLang"]["--context-length"] == flags["vLLM"]["--max-model-len"]
    assert flags["TensorRT-LLM"]["--max_seq_len"] == flags["vLLM"]["--max-model-len"]
    assert all("leaves no cache" in text for text in commands_of(own, "llama-3.3-70b").values())
    # A longer request than that has to be served all the same.
    asked = launches(own, find_checkpoint("llama-3.3-70b"), limit + 5)["vLLM"].rows()
    assert {r["value"] for r in asked if r["flag"] == "--max-model-len"} == {str(limit + 5)}
    # Of a model whose context is not known, it is a remark; enough memory needs none of it.
    unknown = launches(own)["vLLM"]
    assert "--max-model-len if MODEL takes more than" in unknown.command
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"max_position_embeddings": 512}))
    assert "--max-model-len" not in launches(own, find_checkpoint(str(file)))["vLLM"].command
    wide = launches(replace(own, engine=EIGHT), find_checkpoint("llama-3.3-70b"))["vLLM"].command
    assert "--gpu-memory" not in wide and "--max-model-len" not in wide and "#" not in wide


def test_commands_are_of_engines_that_run_on_the_device() -> None:
    amd = commands_of(replace(BASE, device="mi300x"), "me/m")
    assert set(amd) == {"vLLM", "SGLang"}
    for device in ("mi300x", "tpu-v5e"):
        with pytest.raises(PlanError, match=f"only on NVIDIA GPUs, not on {device}"):
            replace(BASE, device=device, framework="tensorrt-llm")


def test_only_models_with_a_module_for_it_draft_by_themselves() -> None:
    models = {name: served_by_name(name, {}, Formats()) for name in ("gpt-oss-120b", "glm-4.5")}
    with pytest.raises(PlanError, match="no module for multi-token prediction"):
        draft_model("mtp", models["gpt-oss-120b"], files=False)
    assert draft_model("mtp", models["glm-4.5"], files=False) is not None
    # Nobody knows what sizes alone stand for.
    assert draft_model("mtp", ServedModel(DENSE), files=False) is not None


def test_ties_go_to_the_larger_share_and_no_reason_is_a_loss() -> None:
    spec = replace(SPEC, concurrency=0, rate=2.0)
    found = search(predictor(), BASE, 2, spec, Slo(ttft=0.03), fewer=False)
    best = found.best
    assert best is not None
    most = max(one.tokens_per_s_per_device for one in found.judged if one.keeps)
    equal = [
        one for one in found.judged if one.keeps and one.tokens_per_s_per_device >= 0.99 * most
    ]
    sure = [round(one.sure, 2) for one in equal]
    assert len(equal) > 1 and round(best.sure, 2) == max(sure)
    assert not any("is -" in line or "is 0% lower" in line for line in found.reasons())


def test_commands_name_checkpoints_that_exist() -> None:
    assert find_checkpoint("llama-3.1-8b").name == "meta-llama/Llama-3.1-8B-Instruct"
    assert find_checkpoint("models/mine/config.json").name == "models/mine"
    assert find_checkpoint("llama") == UNKNOWN
    # Any spelling of a model's name, but no other model of its sizes.
    assert find_checkpoint("qwen3-235b-a22b").name == "Qwen/Qwen3-235B-A22B"
    assert find_checkpoint("deepseek-r1").name == "deepseek-ai/DeepSeek-R1"
    assert find_checkpoint("me/Qwen3-32B") == Checkpoint("me/Qwen3-32B", drafts=None)
    command = commands_of(BASE, "qwen_3_32b")["vLLM"]
    assert command.startswith("vllm serve Qwen/Qwen3-32B ")
