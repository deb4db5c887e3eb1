"""Rows of a table of serving: what each column means."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, OpcastError, PlanError
from opcast.models.serving.effects import ServingEffects
from opcast.models.serving.model import ServingModel
from opcast.predict.cluster.case_table import read_cases, read_rows
from opcast.predict.cluster.serving import ServingPredictor, Simulated
from opcast.predict.cluster.serving_engine import engine_policy, request_delay, request_floors
from opcast.predict.cluster.serving_load import draw
from opcast.predict.cluster.serving_table import (
    ServingRow,
    serving_row,
    serving_rows,
)
from opcast.simulate.serving.checkpoints import served_by_name
from opcast.simulate.serving.forward import decode_ops, prefill_ops
from opcast.simulate.serving.load import Load
from opcast.simulate.serving.policies import Policy
from opcast.simulate.serving.served import EnginePlan, Formats, format_in
from opcast.simulate.step.named_workloads import read_workload

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[4] / "shared/data"))
TABLE = PACK / "published-serving" / "serving.csv.gz"

DENSE = {
    "id": "a", "source": "mine@1", "device": "h100-sxm", "framework": "vLLM", "n_gpus": 4,
    "model": "llama", "arch": "llama", "layers": 80, "d_model": 8192, "heads": 64, "kv_heads": 8,
    "head_dim": 128, "d_ff": 28672, "vocab": 128256, "weight_dtype": "fp8", "tp": 4, "pp": 1,
    "load": "closed", "isl": 1024, "osl": 256, "concurrency": 16, "tpot_ms": 12.5,
}  # fmt: skip
LATENT = {
    **DENSE, "model": "deepseek-r1", "arch": "mla-moe", "layers": 61, "d_model": 7168, "heads": 128,
    "kv_heads": 128, "head_dim": 128, "d_ff": 18432, "moe_d_ff": 2048, "experts": 256, "top_k": 8,
    "shared_experts": 1, "dense_layers": 3, "vocab": 129280, "mla": "yes", "n_gpus": 8, "tp": 1,
    "dp": 8, "ep": 8, "moe_tp": 1, "framework": "TensorRT-LLM",
    "attention_note": "kv_lora 512, q_lora 1536, rope 64, nope 128, v 128; MTP head",
}  # fmt: skip


def test_a_dense_row() -> None:
    row = serving_row(DENSE)
    measured, row = row.measured, row.deployment
    assert (row.framework, row.source, row.devices) == ("vllm", "mine", 4)
    assert row.engine.plan.text() == "tp=4"
    assert row.model.weights == "fp8" and row.model.cache == "bf16"
    # Llama 3 70B has 70.6e9 parameters; the embedding and the head stay in 16 bits.
    tables = 2 * 128256 * 8192
    assert row.model.weight_bytes(row.engine.plan) * 4 == pytest.approx(
        70.55e9 - tables + 2 * tables, rel=0.01
    )
    # 80 layers, keys and values of two of eight heads of 128 in 16 bits.
    assert row.model.token_bytes(row.engine.plan) == 2 * 80 * 2 * 128 * 2
    assert measured == {"tpot_ms": 12.5}


def test_latent_attention_with_experts_over_data_parallel_ranks() -> None:
    row = serving_row(LATENT).deployment
    w, plan = row.model.workload, row.engine.plan
    assert (w.kv_lora, w.q_lora, w.rope_dim, w.head, w.v_dim) == (512, 1536, 64, 128, 128)
    assert (plan.tp, plan.dp, plan.ep, plan.moe_tp, plan.devices) == (1, 8, 8, 1, 8)
    assert row.model.expert_weights == "fp8_block"
    # TensorRT-LLM keeps the cache of quantised checkpoints in fp8: 61 layers of 576 bytes.
    assert row.model.token_bytes(plan) == 61 * 576
    assert w.parameters == pytest.approx(671e9, rel=0.01)


def test_only_experts_are_quantised_in_four_bits() -> None:
    row = serving_row({**LATENT, "weight_dtype": "mxfp4", "framework": "vLLM"}).deployment
    assert (row.model.weights, row.model.expert_weights) == ("bf16", "mxfp4")


def test_windows_and_dense_layers_of_notes() -> None:
    note = "every 2nd layer sliding window 128, sinks, biases"
    w = serving_row({**LATENT, "mla": "", "attention_note": note}).deployment.model.workload
    assert (w.window, w.window_share) == (128, 0.5)
    note = "MoE every 2nd layer; 3 of 4 layers chunked attention 8192"
    w = serving_row(
        {**LATENT, "mla": "", "layers": 48, "attention_note": note}
    ).deployment.model.workload
    assert (w.dense_layers, w.window, w.window_share) == (24, 8192, 0.75)
    note = "3 of 4 layers gated delta net"
    assert serving_row({**DENSE, "attention_note": note}).deployment.model.linear_layers == 60


def test_data_parallel_engines_without_experts_are_replicas() -> None:
    row = serving_row({**DENSE, "dp": 2, "n_gpus": 8})
    assert (row.deployment.engine.count, row.deployment.devices) == (2, 8)
    assert draw(row.spec).concurrency == 16


def test_a_plan_takes_no_more_devices_than_there_are() -> None:
    with pytest.raises(PlanError, match="n_gpus=1, but tp, pp and dp spread the model over 2"):
        serving_row({**DENSE, "n_gpus": 1, "tp": 2})
    # A chip of two cores is two devices of the catalogue.
    chip = {**DENSE, "device": "tpu-v7x", "n_gpus": 1, "tp": 2, "note": "tp counts cores"}
    assert serving_row(chip).deployment.devices == 2


def test_workers_of_their_own_for_prompts() -> None:
    split = {
        "tp": None, "prefill_tp": 4, "prefill_workers": 2, "decode_tp": 8, "decode_workers": 1,
        "prefill_batch": 1, "decode_batch": 64,
    }  # fmt: skip
    row = serving_row({**DENSE, **split}).deployment
    assert row.prefill is not None
    assert (row.prefill.devices, row.engine.devices) == (8, 8)
    # Tables state how full batches are, not what limits them.
    assert (row.prefill.batch, row.options.max_batch) == (0, 0)


def test_lengths_of_a_load() -> None:
    row = serving_row({**DENSE, "length_dist": "uniform 0.8..1.0 x nominal", "isl_mean": 922})
    load = draw(row.spec)
    assert load.prompts.min() >= 819 and load.prompts.max() <= 1025
    assert load.prompts.mean() == pytest.approx(922, rel=0.01)
    assert len(load.prompts) == 160


def test_lengths_below_a_token_are_refused_as_such() -> None:
    for cells, said in (({"isl": -4}, "isl=-4"), ({"osl_mean": 0}, "osl_mean=0")):
        with pytest.raises(DatasetError, match=f"a: {said} is below 1"):
            serving_row({**DENSE, **cells})
    with pytest.raises(PlanError, match="are not given"):
        serving_row({**DENSE, "osl": None})


def test_lengths_of_conversations_vary() -> None:
    named = {"length_dist": "ShareGPT", "isl_mean": 302, "osl_mean": 188, "n_requests": 1000}
    load = draw(serving_row({**DENSE, **named, "concurrency": 100}).spec)
    for lengths, mean in ((load.prompts, 302), (load.outputs, 188)):
        assert lengths.mean() == pytest.approx(mean, rel=0.15)
        # The median of a geometric distribution is ln 2 of its mean.
        assert np.median(lengths) / lengths.mean() == pytest.approx(np.log(2), rel=0.15)


def test_drafts_are_accepted_one_after_the_other() -> None:
    options = serving_row({**LATENT, "drafts": 3}).deployment.options
    # 0.85 of the first, and so on (DeepSeek-V3, 2024, section 5.4.3).
    assert options.accepted == pytest.approx(1 + 0.85 + 0.85**2 + 0.85**3)
    assert options.drafts == 3
    row = serving_row({**LATENT, "drafts": 3, "spec_accept_len": 2.5}).deployment
    assert (row.options.drafts, row.options.accepted) == (3, 2.5)
    assert row.draft is not None and row.draft.workload.layers == 1
    plain = serving_row({**LATENT, "drafts": 0}).deployment
    assert (plain.options.drafts, plain.options.accepted, plain.draft) == (0, 1.0, None)


#: Cells of a published run on B200 whose engines only its configuration gives
#: (SemiAnalysisAI/InferenceX, ctx1_gen5_dep8_batch16_eplb0_mtp3.yaml of b200-fp4/1k1k).
APART = {
    **LATENT, "source": "aiconfigurator/inferencex", "mode": "disagg", "device": "b200",
    "model_group": "deepseek-r1", "weight_dtype": "nvfp4", "isl": 1024.0, "osl": 1024.0,
    "concurrency": 875.0, "prefill_tp": 4.0, "prefill_pp": 1.0, "prefill_dp": 1.0,
    "prefill_ep": 4.0, "prefill_moe_tp": 1.0, "decode_tp": 8.0, "decode_pp": 1.0, "decode_dp": 1.0,
    "decode_ep": 4.0, "decode_moe_tp": 2.0, "spec_decode": "ambiguous",
    "note": "image nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.8.1.post1",
}  # fmt: skip


def test_engines_of_published_configurations() -> None:
    own = serving_row(APART).deployment
    assert own.prefill is not None
    assert (own.prefill.count, own.prefill.plan.text()) == (1, "dp=4,ep=4")
    assert (own.engine.count, own.engine.plan.text()) == (5, "dp=8,ep=8")
    assert (own.engine.batch, own.options.drafts) == (16, 3)
    # Ten in flight ran with drafts and without, on the same engines.
    assert serving_row({**APART, "concurrency": 10}).deployment.options.drafts == 3
    told = serving_row({**APART, "concurrency": 10, "spec_decode": "no"}).deployment
    assert (told.engine.count, told.engine.batch, told.options.drafts) == (5, 32, 0)


@pytest.mark.parametrize(
    "cells",
    [
        {"concurrency": 876},
        {"note": "image nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.5.1-rc0.pre3"},
        {"decode_tp": 4.0},
        # 128 and 512 in flight ran with one engine on two devices, or with two.
        {"device": "gb200", "model_group": "gpt-oss-120b", "weight_dtype": "mxfp4",
         "concurrency": 512, "prefill_tp": 1, "decode_tp": 2, "spec_decode": "no"},
    ],
    ids=["other load", "other release", "other devices", "two fit"],
)  # fmt: skip
def test_engines_that_no_configuration_gives_are_not_guessed(cells: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="the number of workers is not given"):
        serving_row({**APART, **cells})


def limits(columns: dict[str, object]) -> Policy:
    own = serving_row(columns).deployment
    return engine_policy(own, own.engine, 1024.0)


def test_limits_of_a_row_go_before_those_of_its_framework() -> None:
    policy = limits({**DENSE, "max_num_seqs": 32, "max_num_batched_tokens": 512})
    assert (policy.max_batch, policy.token_budget) == (32, 512)
    # Each rank with sequences of its own has the limits for itself.
    assert limits({**LATENT, "max_num_seqs": 32}).max_batch == 256
    # SGLang runs 48 requests on all ranks while it drafts, if it is given no limit.
    drafting = {**LATENT, "framework": "SGLang", "drafts": 3}
    assert limits(drafting).max_batch == 48
    assert limits({**drafting, "max_num_seqs": 32}).max_batch == 256
    assert limits({**drafting, "drafts": 0}).max_batch == 8 * 4096


def simulated(row: ServingRow) -> Simulated:
    """A row without learned effects."""
    return ServingPredictor(None, ServingModel()).simulate(row.deployment, row.spec)


def test_scheduling_of_a_row_goes_before_that_of_its_release() -> None:
    for cell, told in {"": None, "yes": True, True: True, "no": False, False: False}.items():
        row = serving_row({**DENSE, "async_scheduling": cell})
        assert row.deployment.options.async_scheduling is told, cell
    waits = {"recv_interval": 30, "framework": "SGLang"}
    assert serving_row({**DENSE, **waits}).deployment.options.recv_interval == 30


def test_accepted_drafts_make_steps_fewer_and_wider() -> None:
    row = serving_row({**DENSE, "spec_decode": "eagle", "spec_accept_len": 2.5})
    assert (row.deployment.options.drafts, row.deployment.options.accepted) == (2, 2.5)
    plain = serving_row({**DENSE, "spec_decode": "no"})
    fast, slow = (simulated(r).seconds("tpot") for r in (row, plain))
    # A step verifies three tokens where it made one: reading weights takes as long.
    assert slow / 2.5 < fast < slow / 1.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": None}, "sizes of llama are not known"),
        ({"load": "bursty"}, "'bursty' is not known"),
        ({"osl": None}, "lengths"),
        ({"concurrency": None}, "needs a concurrency of at least 1"),
        ({"concurrency": 0}, "needs a concurrency of at least 1"),
        ({"concurrency": -8}, "concurrency=-8 is below 1"),
        ({"n_gpus": -8}, "n_gpus=-8 is below 0"),
        ({"tp": None, "n_gpus": None}, "neither tp nor n_gpus"),
        ({"weight_dtype": "ternary"}, "ternary"),
        ({"spec_accept_len": 0.5}, "below 1"),
    ],
)
def test_what_cannot_be_expressed_says_why(change: dict[str, object], says: str) -> None:
    with pytest.raises(OpcastError, match=says):
        serving_row({**DENSE, **change})


def test_a_table_without_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("device\nh100-sxm\n")
    with pytest.raises(DatasetError, match="framework, load"):
        read_cases(tmp_path / "t.csv", "serving")


def test_a_table_in_the_words_of_its_source(tmp_path: Path) -> None:
    """ML.ENERGY's columns: all devices are one engine, tokens of prompts go by the task."""
    row = {
        "id": "a", "source": "ml-energy", "model": "Qwen/Qwen3-14B", "device": "h100-sxm",
        "task": "gpqa", "num_gpus": 2, "expert_parallel": 1, "avg_batch_size": 15.6,
        "max_num_seqs": 16, "avg_output_len": 700.0, "weight_precision": "bfloat16",
        "output_throughput_tokens_per_sec": 900.0, "avg_power_watts": 1000.0,
        "energy_per_token_joules": 1.1,
    }  # fmt: skip
    other = {**row, "id": "b", "task": "video-chat"}
    pd.DataFrame([row, other]).to_parquet(tmp_path / "own.parquet")
    rows, reasons = read_rows(read_cases(tmp_path / "own.parquet", "serving"), serving_row)
    assert rows[1] is None and "lengths of prompts" in reasons[1]
    read = rows[0]
    assert read is not None and (read.deployment.framework, read.spec.concurrency) == ("vllm", 16)
    assert (read.spec.prompt, read.spec.output) == ("250", "lognormal:700:0.55")
    assert read.deployment.engine.plan.tp == 2 and read.deployment.model.weights == "bf16"
    assert read.measured == {
        "out_tok_s": 900.0,
        "j_per_tok": 1.1,
        "power_w": 1000.0,
    }
    assert read.deployment.version == "0.11.1"


def test_releases_of_engines_and_of_routers_before_them() -> None:
    told = [
        {**DENSE, "framework_version": "0.12.0"},
        {**DENSE, "framework_version": "nightly"},
        {**DENSE, "framework": "TensorRT-LLM", "framework_version": "1.2.0rc2"},
        # Dynamo's releases; TensorRT-LLM's own of these numbers served whole batches.
        {**DENSE, "framework": "TensorRT-LLM", "framework_version": "0.8.1.post1"},
        {
            **DENSE,
            "framework": "TensorRT-LLM",
            "framework_version": "0.8.0",
            "load": "static-batch",
        },
        {**DENSE, "load": "static-batch"},
    ]
    rows, _ = read_rows(pd.DataFrame(told), serving_row)
    versions = [row.deployment.version for row in rows if row is not None]
    assert versions == ["0.12.0", "", "1.2.0rc2", "", "0.8.0", "0"]


@pytest.fixture(scope="module")
def published() -> tuple[list[ServingRow | None], list[str]]:
    """All published rows, and why some are none."""
    if not TABLE.is_file():
        pytest.skip(f"no published serving at {TABLE}")
    return read_rows(read_cases(TABLE, "serving"), partial(serving_row, folder=TABLE.parent))


def test_nearly_all_published_rows_are_expressed(
    published: tuple[list[ServingRow | None], list[str]],
) -> None:
    rows, reasons = published
    # Some publishers give neither the lengths of prompts nor those of outputs.
    told = [row for row, why in zip(rows, reasons, strict=True) if "lengths of prompts" not in why]
    assert len(told) / len(rows) > 0.95
    # Nor does the catalogue have all chips (Intel's Max 1550, SambaNova's, Jetson).
    unknown = sum("is not in the catalogue" in why for why in reasons)
    assert unknown / len(rows) < 0.015
    # Of 481 rows without a number of prefill workers, published configurations give 260 or so.
    uncounted = sum("number of workers" in why for why in reasons)
    assert uncounted / len(rows) < 0.035
    assert sum(row is not None for row in told) / (len(told) - unknown - uncounted) > 0.98
    assert all("fails on this row" not in reason for reason in reasons)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct-FP8", 70.6), ("llama2-70b", 69.0),
        ("Qwen/Qwen3-235B-A22B-FP8", 235.1), ("DeepSeek-R1-0528", 671.0), ("kimi-k2.5", 1026.0),
        ("glm-4.6", 353.0), ("gptj-99", 6.05), ("qwen3-next-80b-a3b-instruct", 80.0),
        ("llama-4-maverick", 400.0), ("step-3.5-flash", 196.0),
    ],
)  # fmt: skip
def test_names_of_models_stand_for_sizes(name: str, billions: float) -> None:
    sizes = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab", "arch")
    row = serving_row({k: v for k, v in DENSE.items() if k not in sizes} | {"model": name})
    assert row.deployment.model.workload.parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_an_unknown_model_without_sizes_is_refused() -> None:
    with pytest.raises(PlanError, match="the sizes of mine are not known"):
        serving_row({**DENSE, "model": "mine", "layers": ""})


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("fp16/bf16", "bf16"), ("w4a8_awq", "int4"), ("FP8-dynamic", "fp8"), ("fp4", "nvfp4"),
        ("fp8 blockwise", "fp8_block"), ("mxfp4", "mxfp4_a4"), ("W8A8", "int8"),
    ],
)  # fmt: skip
def test_formats_by_the_names_of_sources(text: str, known: str) -> None:
    assert serving_row({**DENSE, "weight_dtype": text}).deployment.model.weights == known


def test_frameworks_by_the_names_of_sources() -> None:
    for text, known in (
        ("Dynamo-TRT", "tensorrt-llm"), ("sglang-disagg", "sglang"), ("vllm-tpu", "vllm"),
        ("MLPerf harness (TensorRT-LLM)", "tensorrt-llm"), ("atom", ""),
    ):  # fmt: skip
        assert serving_row({**DENSE, "framework": text}).deployment.framework == known


def test_throughput_without_a_plan_takes_the_fewest_ranks_that_leave_room() -> None:
    """Of 70.6 GB in fp8 and 4 GB of tables, 60 % of the 141 GB of one device are enough."""
    row = {**DENSE, "device": "h200-sxm", "tp": "", "n_gpus": 8}
    assert serving_row({**row, "load": "offline"}).deployment.engine.plan.tp == 1
    assert serving_row({**row, "load": "offline"}).deployment.engine.count == 8
    assert serving_row(row).deployment.engine.plan.tp == 8


def test_sparse_attention_reads_the_keys_that_its_indexer_chooses() -> None:
    note = "kv_lora 512, q_lora 2048, rope 64, nope 192, v 256; sparse top-k 2048"
    model = serving_row({**LATENT, "attention_note": note}).deployment.model
    plan = EnginePlan()
    near, far = (decode_ops(model, plan, 4, n)[0][0].sizes()["kv_len"] for n in (1024, 8192))
    assert (near, far) == (1024, 2048)


def test_latent_attention_has_the_widths_of_its_model() -> None:
    """GLM-5's heads are 192 + 64 and 256 wide in prefill, those of DeepSeek-V3 192 and 128."""
    plan, widths = EnginePlan(), {}
    for name in ("glm-5", "deepseek-v3"):
        model = served_by_name(name, {}, Formats())
        (prompt, _), *_ = prefill_ops(model, plan, 1, 512, 0)
        (token, _), *_ = decode_ops(model, plan, 1, 512)
        widths[name] = [own.shape[3:5] for own in (prompt, token)]
    assert widths["glm-5"] == [(256, 256), (576, 512)]
    assert widths["deepseek-v3"] == [(192, 128), (576, 512)]


@pytest.mark.parametrize(
    ("name", "billions", "weights", "linear"),
    [
        ("llama-3.1-8b", 8.03, "bf16", 0),
        ("Qwen/Qwen3-32B-FP8", 32.8, "fp8", 0),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 107.8, "bf16", 0),
        ("qwen3-next-80b-a3b", 79.7, "bf16", 36),
        ("deepseek-ai/DeepSeek-V3.2", 671.0, "fp8_block", 0),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.6, "bf16", 0),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.8, "bf16", 0),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", 8.19, "bf16", 0),
        ("moe", 46.7, "bf16", 0),
    ],
)
def test_models_by_name_as_a_command_takes_them(
    name: str, billions: float, weights: str, linear: int
) -> None:
    found = served_by_name(name, {}, Formats())
    assert found.workload.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    assert (found.weights, found.linear_layers) == (weights, linear)
    wide = served_by_name(name, {"n_layers": 40}, Formats("int8"))
    assert (wide.workload.layers, wide.weights) == (40, "int8")


@pytest.mark.parametrize(
    ("name", "weights", "experts"),
    [
        ("openai/gpt-oss-120b", "bf16", "mxfp4"),
        ("unsloth/gpt-oss-120b-BF16", "bf16", "bf16"),
        ("deepseek-ai/DeepSeek-R1-0528", "fp8_block", "fp8_block"),
        ("nvidia/DeepSeek-R1-FP4", "nvfp4", "nvfp4"),
        ("moonshotai/Kimi-K2-Instruct", "fp8_block", "fp8_block"),
        ("moonshotai/Kimi-K2-Thinking", "bf16", "int4"),
        ("Qwen/Qwen3-30B-A3B", "bf16", "bf16"),
    ],
)
def test_models_are_in_the_format_they_are_published_in(
    name: str, weights: str, experts: str
) -> None:
    found = served_by_name(name, {}, Formats())
    assert (found.weights, found.expert_weights) == (weights, experts)
    # What is asked for counts.
    assert served_by_name(name, {}, Formats("bf16")).expert_weights == "bf16"


def test_gpt_oss_fits_the_one_h100_that_its_authors_name() -> None:
    found = served_by_name("openai/gpt-oss-120b", {}, Formats())
    # The model card says 60.8 GiB for the checkpoint.
    assert found.weight_bytes(EnginePlan()) / 2**30 == pytest.approx(60.8, rel=0.01)
    assert found.formats() == {"weights": "bf16", "experts": "mxfp4", "cache": "bf16"}


_MOE = {
    "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_size": 2048, "intermediate_size": 5120, "num_experts": 512, "num_hidden_layers": 48,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512,
}  # fmt: skip
_LATENT = {
    "vocab_size": 129280, "num_attention_heads": 128, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "weights"),
    [
        (
            {**_MOE, "model_type": "qwen3_next", "shared_expert_intermediate_size": 512},
            "qwen3-next-80b-a3b", "bf16",
        ),
        (
            {**_LATENT, "model_type": "deepseek_v32", "index_topk": 2048,
             "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "deepseek-v3.2", "fp8_block",
        ),
        ({**_LATENT, "model_type": "kimi_k2"}, "deepseek-v3", "bf16"),
        (
            {"model_type": "llama4", "text_config": {
                "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120,
                "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                "num_hidden_layers": 48, "num_local_experts": 128, "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
             }, "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {
                    "weights": {"num_bits": 8, "type": "float"},
                    "input_activations": {"num_bits": 8, "type": "float"},
                }},
             }, "tie_word_embeddings": False},
            "llama-4-maverick", "fp8",
        ),
    ],
)  # fmt: skip
def test_a_config_is_the_model_of_its_name(
    tmp_path: Path, config: dict[str, object], name: str, weights: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = served_by_name(str(path), {}, Formats(), files=True)
    want = served_by_name(name, {}, Formats())
    assert found.workload.parameters == pytest.approx(want.workload.parameters, rel=0.01)
    assert found.shape() == want.shape() and found.weights == weights
    assert found.linear_layers == want.linear_layers
    assert found.workload.window == want.workload.window
    if name != "deepseek-v3":
        with pytest.raises(PlanError, match="which no step has"):
            read_workload(str(path))


def test_quantised_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {**_MOE, "model_type": "qwen3_moe"}

    def served(**how: object) -> str:
        path.write_text(json.dumps({**sizes, "quantization_config": how}))
        return served_by_name(str(path), {}, Formats(), files=True).expert_weights

    assert served(quant_method="mxfp4") == "mxfp4"
    assert served(quant_method="awq", bits=4) == "int4"
    # GPTQ has no format of activations; LLM Compressor gives one where they are quantised.
    assert served(quant_method="gptq", bits=8) == "int8_wo"
    kept = {"weights": {"num_bits": 8, "type": "int"}}
    both = {**kept, "input_activations": {"num_bits": 8, "type": "int"}}
    for group, want in ((kept, "int8_wo"), (both, "int8")):
        assert served(quant_method="compressed-tensors", config_groups={"g": group}) == want
    for kind, want in (("fp8_e4m3", "fp8"), ("fp4", "mxfp4")):
        assert served(quant_method="quark", global_quant_config={"weight": {"dtype": kind}}) == want
    assert format_in("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8") == "int8_wo"
    assert format_in("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4") == "int4"
    assert served(quant_method="modelopt", quant_algo="NVFP4") == "nvfp4"
    assert served(quant_method="fp8", weight_block_size=[128, 128]) == "fp8_block"
    hqq = {"weight_quant_params": {"nbits": 8, "group_size": 64}}
    for how, said in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes of 4 bits"),
        ({"quant_method": "hqq", "quant_config": hqq}, "hqq of 8 bits"),
        ({"quant_method": "hqq"}, "hqq"),
    ):
        with pytest.raises(PlanError, match=f"'{said}' are not known .*; --weights int4 takes"):
            served(**how)
    with pytest.raises(PlanError, match="configuration cannot be read"):
        served(quant_method="awq", bits="four")


def test_a_burst_queues_whatever_its_rate() -> None:
    """200 requests of 2048 tokens of output within 0.2 s are the same as all at once."""
    burst = {**DENSE, "osl": 2048, "n_requests": 200, "concurrency": None}
    rows = [
        serving_row({**burst, "load": "open", "request_rate": 1000}),
        serving_row({**burst, "load": "offline"}),
    ]
    one, other = (simulated(row).seconds("per_token") for row in rows)
    assert one == pytest.approx(other, rel=0.05)


def test_workers_that_nobody_counted_are_refused() -> None:
    split = {**DENSE, "tp": None, "n_gpus": None, "prefill_tp": 4, "decode_tp": 4}
    told = {"prefill_workers": 1, "n_decode_gpus": 12}
    own = serving_row({**split, **told}).deployment
    assert own.prefill is not None and (own.prefill.count, own.engine.count) == (1, 3)
    for lacking in told:
        with pytest.raises(PlanError, match="the number of workers is not given"):
            serving_row({**split, **told, lacking: None})


def test_decoding_engines_that_recipes_size_hold_the_power_of_two_below_the_most() -> None:
    """A series of 8, 24 and 88 requests on four workers: 22 of each rank at most, so 16."""
    split = {
        **LATENT, "tp": None, "dp": None, "ep": None, "n_gpus": None, "prefill_tp": 8,
        "decode_tp": 8, "prefill_workers": 1, "decode_workers": 4, "device": "h200-sxm",
    }  # fmt: skip
    series = [{**split, "concurrency": c} for c in (8, 24, 88)]
    others = [
        {**split, "concurrency": 88, "framework": "SGLang"},
        {**split, "concurrency": 88, "max_num_seqs": 64},
        {**split, "concurrency": 88, "decode_tp": 1, "decode_dp": 8},
    ]
    rows = serving_rows(pd.DataFrame(series + others))[0]
    assert [row.deployment.engine.batch for row in rows if row] == [16] * 3 + [0, 0, 0]
    assert [row.deployment.options.max_batch for row in rows if row] == [0] * 4 + [64, 0]
    # 22 share 16 places: a request waits for 6 / 16 of the time of another one.
    last = rows[2]
    assert last is not None
    seen = simulated(last).seen
    decoding = seen.figure("e2e", 50) - seen.figure("ttft", 50)
    free = simulated(serving_row(series[2])).seen.figure("ttft", 50)
    assert seen.figure("ttft", 50) - free == pytest.approx(6 / 16 * decoding, rel=0.25)


def test_a_worker_of_one_device_that_weights_do_not_fit_has_the_fewest_that_leave_room() -> None:
    ones = {
        f"{role}_{name}": 1
        for role in ("prefill", "decode")
        for name in ("tp", "dp", "ep", "moe_tp")
    }
    counts = {"prefill_workers": 1, "decode_workers": 1, "n_gpus": None}
    lost = {**LATENT, **ones, **counts, "tp": None, "dp": None, "ep": None, "moe_tp": None}
    own = serving_row({**lost, "device": "gb200"}).deployment
    # 671e9 bytes of DeepSeek-R1 in fp8 are more than 0.6 of four times 199e9.
    assert own.engine.plan == own.prefill.plan == EnginePlan(tp=8, moe_tp=8)  # type: ignore[union-attr]
    split = {"tp": None, "prefill_tp": 1, "decode_tp": 1, "device": "gb200"}
    small = serving_row({**DENSE, **counts, **split})
    assert small.deployment.engine.plan.devices == 1


def test_answers_of_two_kinds_of_workers_take_longer_to_hand_over() -> None:
    apart = {"tp": None, "prefill_tp": 4, "prefill_workers": 1, "decode_tp": 4, "decode_workers": 1}
    weights = ServingEffects().weights({})
    delays = [
        request_delay(serving_row({**DENSE, **more}).deployment, served=True, weights=weights)
        for more in ({}, apart)
    ]
    assert delays == pytest.approx([0.010, 0.05])
    assert simulated(serving_row({**DENSE, "load": "static-batch"})).delay == 0.0


def test_no_published_run_is_faster_than_the_data_sheet(
    published: tuple[list[ServingRow | None], list[str]],
) -> None:
    rows = [row for row in published[0] if row and not row.spec.requests]
    judged = {"ttft": 0, "tpot": 0}
    for row in rows:
        drawn = draw(row.spec)
        means = drawn.prompts.mean(), drawn.outputs.mean()
        prompt, output = (np.array([mean]) for mean in means)
        floor = request_floors(row.deployment, Load(prompt, output, np.zeros(1)), np.zeros(1))
        tpot = row.measured.get("tpot_ms", row.measured.get("itl_ms"))
        for metric, measured in (("ttft", row.measured.get("ttft_ms")), ("tpot", tpot)):
            if measured is not None:
                judged[metric] += 1
                assert measured > 1e3 * getattr(floor, metric)[0], (row.id, metric)
    assert min(judged.values()) > 1000
