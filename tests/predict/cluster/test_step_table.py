"""Rows of tables of training steps as the simulator takes them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, OpcastError
from opcast.models.operators import OpModel
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.case_table import read_cases, read_rows
from opcast.predict.cluster.step_table import StepRuns, step_row
from opcast.predict.locate import find_model

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[4] / "shared/data"))
MLPERF = PACK / "published-mlperf" / "training.parquet"

LLAMA = {
    "id": "x",
    "source": "someone/runs@abc README.md",
    "framework": "Megatron-LM (core 0.9)",
    "device": "a100-sxm-80gb",
    "n_devices": 16,
    "devices_per_node": 8,
    "network": 200,
    "network_scope": "node",
    "dtype": "bf16",
    "layers": 32,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "d_ff": 14336,
    "gated": True,
    "vocab": 128256,
    "norm": "rmsnorm",
    "position": "rope",
    "attention": "flash2",
    "seq": 8192,
    "global_batch": 64,
    "micro_batch": 1,
    "grad_accum": 16,
    "dp": 4,
    "tp": 2,
    "pp": 2,
    "step_s": 20.0,
    "memory_gib": 60,
}


def test_a_row_says_model_plan_cluster_and_what_was_measured() -> None:
    row = step_row(LLAMA)
    # 8.03e9 parameters: Llama 3 8B (The Llama 3 Herd of Models, 2024, table 3).
    assert row.workload.parameters == pytest.approx(8.03e9, rel=0.001)
    assert row.workload.attention == "flash2" and row.workload.rope
    assert row.plan.text() == "dp=4,tp=2,pp=2,microbatches=16,schedule=1f1b"
    assert (row.framework, row.source) == ("megatron-lm", "someone/runs")
    assert (row.measured_s, row.memory_bytes, row.share) == (20.0, 60 * 2.0**30, 1.0)
    inside, between = row.cluster.topology.dims
    assert (inside.size, between.size) == (8, 2)
    # 200 GB/s of a node are 25 GB/s of each of its eight devices.
    assert between.bandwidth == 25e9
    assert row.launched


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compile": True}, {"launched": False}),
        ({"overlap": "cuda graphs full_iteration"}, {"launched": False}),
        ({"dtype": "mxfp8"}, {"workload.products": "mxfp8", "workload.dtype": "bf16"}),
        ({"dtype": "fp8_full"}, {"workload.products": "fp8"}),
        (
            {"arch_note": "5 of 6 layers have a sliding window of 1024; attention scaling"},
            {"workload.window": 1024, "workload.window_share": 5 / 6},
        ),
        (
            {"arch_note": "every second layer has a sliding window of 128; biases"},
            {"workload.window": 128, "workload.window_share": 0.5},
        ),
        # An expert axis of its own: 2 x 2 x 2 x 2 devices.
        (
            {"experts": 8, "top_k": 2, "dp": 2, "ep": 2},
            {"plan.dp": 4, "plan.ep": 2},
        ),
        ({"dtype": "fp16"}, {"workload.products": "", "workload.dtype": "f16"}),
        ({"attention": "torch (fused scale-mask-softmax)"}, {"workload.attention": "eager"}),
        ({"attention": float("nan")}, {"workload.attention": "fused"}),
        ({"recompute": "offload"}, {"plan.recompute": "full", "plan.offload": "activations"}),
        ({"virtual": 4}, {"plan.schedule": "interleaved", "plan.virtual": 4}),
        ({"zero": 1}, {"plan.zero": 1}),
        ({"dp": 1, "fsdp": 4, "zero": 3}, {"plan.fsdp": 4, "plan.zero": 0}),
        ({"dp": 1, "fsdp": 4, "zero": 2}, {"plan.dp": 4, "plan.zero": 2}),
        ({"reduce_dtype": "fp32"}, {"plan.reduce": "f32"}),
        # 126 layers over 8 stages of 8 chunks: embedding and head take the places of two.
        ({"layers": 126, "pp": 2, "virtual": 64}, {"plan.virtual": 64}),
        # The last micro-batch of 60 sequences over four ranks is smaller than the others.
        ({"global_batch": 60}, {"workload.batch": 64, "share": 60 / 64}),
        ({"n_devices": 16, "network": float("nan")}, {"cluster.size": 16}),
    ],
)
def test_what_columns_mean(changes: dict[str, object], expected: dict[str, object]) -> None:
    row = step_row(LLAMA | changes)
    for name, value in expected.items():
        found: object = row
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


def test_notes_hold_latent_attention_and_shared_experts() -> None:
    row = step_row(
        LLAMA
        | {
            "device": "gb200",
            "n_devices": 128,
            "devices_per_node": 4,
            "network": float("nan"),
            "layers": 61,
            "d_model": 7168,
            "heads": 128,
            "kv_heads": 128,
            "d_ff": 2048,
            "vocab": 129280,
            "experts": 256,
            "top_k": 8,
            "ep": 32,
            "dp": 64,
            "tp": 1,
            "pp": 2,
            "global_batch": 1024,
            "seq": 4096,
            "arch_note": "MLA q_lora 1536 kv_lora 512 nope 128 rope 64 v 128; first 3 layers dense "
            "ff 18432; 1 shared expert; d_ff is per expert",
        }
    )
    # DeepSeek-V3 (2024), section 4.2: 671 billion parameters, 37 billion of them active.
    assert row.workload.parameters == pytest.approx(671e9, rel=0.001)
    tokens = row.workload.batch * row.workload.seq
    assert row.workload.model_flops() / tokens / 6 == pytest.approx(37e9, rel=0.15)
    # 128 devices are no multiple of a rack's 72: domains of 64.
    assert [d.size for d in row.cluster.topology.dims] == [64, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"device": "h900"}, "h900"),
        ({"n_devices": 12}, "takes 16 devices"),
        ({"n_devices": 0}, "n_devices=0 is below 1"),
        ({"micro_batch": -2}, "micro_batch=-2 is below 0"),
        ({"layers": "many"}, "many"),
        ({"heads": 30}, "does not divide|not a multiple"),
    ],
)
def test_rows_that_cannot_be_expressed_say_why(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OpcastError, match=message):
        step_row(LLAMA | changes)
    rows, reasons = read_rows(pd.DataFrame([LLAMA, LLAMA | changes]), step_row)
    assert rows[0] is not None and rows[1] is None
    assert not reasons[0] and reasons[1]


GPT3 = {
    "source": "MLPerf training v4.0 Google",
    "framework": "maxtext",
    "device": "tpu-v5p",
    "n_devices": 512,
    "layers": 96,
    "d_model": 12288,
    "heads": 96,
    "kv_heads": 96,
    "d_ff": 49152,
    "vocab": 50304,
    "seq": 2048,
    "dtype": "int8",
    "recompute": "full",
    "global_batch": 2048,
    "micro_batch": 4,
    "fsdp": 64,
    "tp": 8,
    "block_s": 285.0,
    "remark": "block_s = 24576 training sequences (24576 / global_batch steps) AND a forward pass "
    "over 24567 sequences: judge block_s",
}


def test_a_block_is_worth_its_steps_and_its_forward_pass() -> None:
    row = step_row(GPT3)
    # 12 steps, and 12 forward passes, each a quarter of a step that computes everything again.
    assert row.share == pytest.approx(12 + 24567 / 2048 / 4) and row.measured_s == 285.0
    assert step_row(GPT3 | {"recompute": "none"}).share == pytest.approx(12 + 24567 / 2048 / 3)
    assert step_row(GPT3 | {"step_s": 20.0}).share == 1.0


def test_cells_that_say_something_else_are_mended() -> None:
    # MaxText's batch of a device: 4 x 8 sequences a data-parallel rank in one go.
    assert step_row(GPT3).plan.microbatches == 1
    assert step_row(GPT3 | {"source": "mine"}).plan.microbatches == 8
    cisco = LLAMA | {"source": "MLPerf training v5.1 Cisco", "attention": ""}
    assert step_row(cisco).workload.attention == "flash2"


def test_throughput_of_a_known_configuration_is_a_step(tmp_path: Path) -> None:
    pax = {"project": "pax", "model": "5B", "device": "a100-sxm-80gb", "devices": 256.0}
    pax |= {"batch_per_device": 8.0, "fsdp": 256.0, "dp": 1.0, "tp": 1.0, "gbs": np.nan}
    pax |= {"quantity": "Sequences/Sec", "value": 512.0, "precision": "TE BF16", "last_date": ""}
    pd.DataFrame([pax]).to_csv(tmp_path / "rows.csv", index=False)
    row = step_row(read_cases(tmp_path / "rows.csv", "steps").iloc[0])
    # GPT of 24 layers of 4096: 12 d² each, and the embeddings of tokens and positions.
    parameters = 24 * 12 * 4096**2 + (50304 + 2048) * 4096
    assert row.workload.parameters == pytest.approx(parameters, rel=1e-3)
    assert (row.workload.batch, row.measured_s, row.share) == (2048, 4.0, 1.0)
    assert (row.framework, row.workload.attention) == ("paxml", "fused")


@pytest.mark.parametrize(("dtype", "products"), [("fp8?", "fp8"), ("nvfp4|fp8", "nvfp4")])
def test_of_undecided_formats_the_first_counts(dtype: str, products: str) -> None:
    assert step_row(LLAMA | {"dtype": dtype}).workload.products == products


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        # 32 layers in 2 stages: chunks of two layers, as recipes of NeMo have.
        ({"framework": "nemo"}, ("interleaved", 8, "bf16", None)),
        ({"framework": "nemo", "virtual": 1}, ("1f1b", 1, "bf16", None)),
        ({"framework": "nemo", "reduce_dtype": "fp32"}, ("interleaved", 8, "f32", None)),
        # 15 micro-batches are no whole groups of two.
        ({"framework": "nemo", "global_batch": 60, "grad_accum": 15}, ("1f1b", 1, "bf16", None)),
        # Operands of 8 bits are gathered where there are some.
        (
            {"framework": "nemo", "dtype": "fp8", "zero": 1},
            ("interleaved", 8, "bf16", True),
        ),
        ({}, ("1f1b", 1, "", None)),
    ],
)
def test_what_is_not_said_is_as_in_recipes(
    changes: dict[str, object], plan: tuple[str, int, str, bool | None]
) -> None:
    found = step_row(LLAMA | changes).plan
    assert (found.schedule, found.virtual, found.reduce, found.quantized_weights) == plan


def test_tables_are_put_together(tmp_path: Path) -> None:
    pd.DataFrame([LLAMA]).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame([GPT3]).to_csv(tmp_path / "b.csv", index=False)
    both = read_cases([tmp_path / "a.csv", tmp_path / "b.csv"], "steps")
    rows, reasons = read_rows(both, step_row)
    assert reasons == ["", ""]
    assert [row.share for row in rows if row] == [1.0, step_row(GPT3).share]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    pd.DataFrame([{"device": "h100-sxm", "n_devices": 8}]).to_csv(path)
    with pytest.raises(DatasetError, match="no columns layers, d_model"):
        read_cases(path, "steps")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_cases(tmp_path / "none.csv", "steps")


def test_parquet_and_csv_hold_the_same(tmp_path: Path) -> None:
    table = pd.DataFrame([LLAMA])
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    rows = [
        step_row(read_cases(tmp_path / f"a.{kind}", "steps").iloc[0]) for kind in ("csv", "parquet")
    ]
    assert rows[0] == rows[1]
    assert np.isfinite(rows[0].measured_s)


@pytest.mark.skipif(not MLPERF.is_file(), reason=f"no submissions to MLPerf at {MLPERF}")
def test_adapters_are_trained_in_the_time_that_submissions_take() -> None:
    """Llama 2 70B, to whose runs no constant is fitted; published peaks of memory are in GB."""
    table = read_cases(MLPERF, "steps")
    table = table[(table["model"] == "llama2_70b_lora") & table["tp"].notna()]
    rows = [row for row in read_rows(table, step_row)[0] if row is not None]
    assert len(rows) == 32 and {row.workload.lora_rank for row in rows} == {16}
    # An empty ``dp`` is what tensor and context parallelism leave.
    assert all(row.plan.devices == row.cluster.size for row in rows)
    runs = StepRuns(rows, OpModel.load(find_model("gpu-operators")))
    found = runs.predict(StepModel.find())
    errors, peaks = [], []
    for row, own, peak in zip(rows, found, table["memory_gb"], strict=True):
        assert not isinstance(own, str)
        errors.append(own.step.total * row.share / row.measured_s - 1.0)
        if np.isfinite(peak):
            peaks.append(own.fit.worst.total / (peak * 1e9) - 1.0)
    # Those of MI300X, of which no training step was measured, are a quarter off.
    assert np.mean(np.abs(errors)) < 0.15 and abs(np.median(errors)) < 0.06
    assert len(peaks) == 7 and np.mean(np.abs(peaks)) < 0.12


@pytest.mark.skipif(not MLPERF.is_file(), reason=f"no submissions to MLPerf at {MLPERF}")
def test_encoders_that_nothing_was_learned_of() -> None:
    """BERT-large: its packed sequences have 256 of 512 tokens, of which 15 % are predicted."""
    table = read_cases(MLPERF, "steps")
    table = table[(table["model"] == "bert") & (table["device"] != "h100-sxm-96gb")]
    rows = [row for row in read_rows(table, step_row)[0] if row is not None]
    assert len(rows) == 86 and {row.split for row in rows} == {"test"}
    # 335e6 parameters (Devlin et al., 2019), without the pooler and segments' embeddings.
    assert rows[0].workload.parameters == pytest.approx(335e6, rel=0.01)
    found = StepRuns(rows, OpModel.load(find_model("gpu-operators"))).predict(StepModel.find())
    errors: dict[str, list[float]] = {}
    for row, own in zip(rows, found, strict=True):
        assert not isinstance(own, str)
        error = own.step.total * row.share / row.measured_s - 1.0
        errors.setdefault(row.cluster.device, []).append(error)
    for device, most in (("h100-sxm", 0.03), ("h200-sxm", 0.08)):
        assert np.median(np.abs(errors[device])) < most
    # Its small products gain less from Blackwell than those of language models.
    assert -0.35 < np.median(errors["b200"] + errors["gb200"]) < 0.0
