"""Files of other simulators, read back by the definitions of their columns."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import PlanError
from opcast.features.devices.catalogue import find_device
from opcast.predict.cluster.network import ClusterNetwork
from opcast.predict.export.simulators import (
    LAYERS,
    calculon_system,
    llmservingsim_layers,
    simai_workload,
)
from opcast.predict.export.vidur import write_vidur
from opcast.predict.operator.step_operators import OperatorLatency
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Group, Plan

#: Columns of a line of SimAI's workload, as in AICB's ``Work_Item``.
ITEM_COLUMNS = (
    *("name", "dependency", "forward_ns", "forward_comm", "forward_bytes"),
    *("backward_ns", "backward_comm", "backward_bytes", "weights_ns", "weights_comm"),
    *("weights_bytes", "process_time"),
)
H100 = find_device("h100-sxm")
LATENCY = OperatorLatency(H100, None)
WORK = make_workload("llama", {"layers": 2, "batch": 4, "seq": 1024})


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_layers_for_llmservingsim(tmp_path):
    out = tmp_path / "layers.csv"
    run("export", "llmservingsim", "--workload", "llama", "--device", "h100-sxm", "--tp", 1, "--tp",
        2, "--max-tokens", 64, "--model", "roofline", "--out", out)  # fmt: skip
    table = pd.read_csv(out)
    # Their profiler's header, and integers of nanoseconds.
    assert list(table.columns) == ["layer_name", "input", "kv_cache", "tp_size", "latency(ns)"]
    assert (table["latency(ns)"] > 0).all()
    assert set(table["layer_name"]) == set(LAYERS)
    one = table[(table["input"] == 64)].pivot(
        index="layer_name", columns="tp_size", values="latency(ns)"
    )
    # 2 · 64 tokens · 4096 · 14336 at 989 TFLOP/s are 7.6 µs, its weights at 3.35 TB/s 35 µs.
    assert 35e3 < one.loc["up_proj", 1] < 100e3
    assert 0.4 < one.loc["up_proj", 2] / one.loc["up_proj", 1] < 0.7
    assert one.loc["input_layernorm", 1] == one.loc["input_layernorm", 2]


def test_layers_need_a_gate_and_heads_that_divide():
    with pytest.raises(PlanError, match="need a gate"):
        llmservingsim_layers(make_workload("gpt", {}), [1], 8, LATENCY)
    with pytest.raises(PlanError, match="3 workers do not divide"):
        llmservingsim_layers(WORK, [3], 8, LATENCY)


def items(text: str) -> tuple[str, pd.DataFrame]:
    head, count, *lines = text.splitlines()
    table = pd.DataFrame([line.split("\t") for line in lines], columns=list(ITEM_COLUMNS))
    assert int(count) == len(table)
    kept = ("name", "forward_comm", "backward_comm", "weights_comm")
    return head, table.astype({c: int for c in ITEM_COLUMNS if c not in kept})


def test_workload_for_simai(tmp_path):
    head, table = items(simai_workload(WORK, Plan(tp=2, dp=2), 4, LATENCY))
    assert head.split()[:3] == ["HYBRID_TRANSFORMER_FWD_IN_BCKWD", "model_parallel_NPU_group:", "2"]
    assert "ga: 1 all_gpus: 4" in head or "ga: 2 all_gpus: 4" in head
    steps = int(head.split("ga: ")[1].split()[0])
    assert len(table) == steps * (WORK.layers + 2)
    layer = table[table["name"] == "transformer_layer"]
    # Two all-reduces of a micro-batch's activations: tokens · 4096 · 2 bytes.
    tokens = 2 * 1024 // steps
    assert set(layer["forward_comm"]) == {"ALLREDUCE"}
    assert set(layer["forward_bytes"]) == {2 * tokens * 4096 * 2}
    # Every parameter's gradient once, with the last micro-batch, in f32 where they are added up.
    assert (layer["weights_bytes"] > 0).sum() == WORK.layers
    wide = 4 if steps > 1 else 2
    tables = 2 * WORK.vocab * WORK.d_model
    of_layers = WORK.layers * (WORK.attention_parameters + WORK.expert_parameters)
    assert table["weights_bytes"].sum() == (tables + of_layers) // 2 * wide
    # One table where it is tied.
    tied = items(simai_workload(replace(WORK, tied=True), Plan(tp=2, dp=2), 4, LATENCY))[1]
    assert tied["weights_bytes"].sum() == (tables // 2 + of_layers) // 2 * wide
    # Gradients of inputs take about as long as the forward pass.
    assert (layer["backward_ns"] / layer["forward_ns"]).between(0.7, 2.0).all()
    out = tmp_path / "w.txt"
    said = run("export", "simai", "--workload", "llama", "--set", "layers=2,batch=8", "--cluster",
               "h100-sxm-x4", "--plan", "tp=4", "--model", "roofline", "--out", out)  # fmt: skip
    assert "lines" in said
    assert set(items(out.read_text())[1]["weights_comm"]) == {"NONE"}


@pytest.mark.parametrize(
    "plan", [Plan(pp=2, tp=2), Plan(fsdp=4), Plan(fsdp=4, ep=4), Plan(dp=4, zero=1)]
)
def test_other_axes_have_no_workload_for_simai(plan):
    work = replace(WORK, experts=4, top_k=2)
    with pytest.raises(PlanError, match="tensor, data and expert parallelism"):
        simai_workload(work, plan, 4, LATENCY)


def test_experts_for_simai():
    sizes = {"layers": 2, "batch": 8, "seq": 1024, "experts": 8, "top_k": 2}
    work = make_workload("moe", sizes)
    head, table = items(simai_workload(work, Plan(tp=2, dp=4, ep=2, microbatches=2), 8, LATENCY))
    assert "model_parallel_NPU_group: 2 ep: 2 pp: 1" in head
    # Embedding, two layers of two lines each, head; two micro-batches.
    assert table["name"].tolist() == 2 * [
        "embedding_layer", *["transformer_layer", "mlp_moelayer"] * 2, "head_layer"
    ]  # fmt: skip
    moe = table[table["name"] == "mlp_moelayer"]
    assert set(moe["forward_comm"]) == set(moe["backward_comm"]) == {"ALLTOALL_EP"}
    # A sequence of each rank, every token to two experts and back.
    assert set(moe["forward_bytes"]) == {2 * 1024 * 2 * work.d_model * 2}
    assert set(moe["forward_ns"]) == {1}
    # Four of the experts on each rank, cut by tp, in f32, once; two ranks hold the same.
    assert moe["weights_comm"].tolist() == ["NONE", "NONE", "ALLREDUCE_DP_EP", "ALLREDUCE_DP_EP"]
    three = 3 * work.d_model * work.d_ff
    assert set(moe["weights_bytes"]) == {0, 4 * three // 2 * 4}
    # Without copies of the experts nothing is reduced.
    _, alone = items(simai_workload(work, Plan(tp=2, dp=4, ep=4), 8, LATENCY))
    experts = alone[alone["name"] == "mlp_moelayer"]
    assert set(experts["weights_comm"]) == {"NONE"}
    assert set(alone[alone["name"] == "transformer_layer"]["weights_comm"]) >= {"ALLREDUCE"}


def test_system_for_calculon(tmp_path):
    out = tmp_path / "s.json"
    run("export", "calculon", "--cluster", "dgx-h100-x16", "--model", "roofline", "--out", out)
    system = json.loads(out.read_text())
    cluster = find_cluster("dgx-h100-x16")
    assert system == json.loads(json.dumps(calculon_system(cluster, H100, LATENCY)))
    assert set(system) == {"matrix", "vector", "mem1", "mem2", "processing_mode", "networks"}
    assert system["matrix"]["tflops"] == pytest.approx(989.4)
    for pairs in (
        system["matrix"]["gflops_efficiency"]["float16"],
        system["mem1"]["MB_efficiency"],
    ):
        # Largest first down to 0, as Calculon looks them up.
        assert [p[0] for p in pairs] == sorted((p[0] for p in pairs), reverse=True)
        assert pairs[-1][0] == 0
        assert all(0 < p[1] <= 1 for p in pairs)
    assert [n["size"] for n in system["networks"]] == [8, 16]
    keys = {"bandwidth", "efficiency", "size", "latency", "ops", "must_be_filled"}
    for network in system["networks"]:
        assert set(network) == keys | {"processor_usage"}
        scalar, offset = network["ops"]["all_reduce"]
        # Between boxes, ranks of the same number in each: a port of 50 GB/s sends 2 (n - 1) / n of
        # the bytes, and no less for that there are seven more.
        group, size = (Group(8, 1) if network["size"] == 8 else Group(2, 8)), 2**28
        assert scalar >= (1.0 if network["size"] == 8 else 2.0)
        n = group.size
        # Calculon's formula gives our time.
        seconds = network["latency"] + size * scalar * (1 + offset / n) / (
            network["bandwidth"] * 1e9 * network["efficiency"])  # fmt: skip
        ours = ClusterNetwork(cluster)("all_reduce", float(size), group).value
        assert seconds == pytest.approx(ours, rel=1e-3)
        assert network["ops"]["p2p"][1] is None


def test_vidur_without_other_workers_has_no_empty_table(tmp_path):
    work = make_workload("llama", {"layers": 2, "d_model": 512, "heads": 8, "d_ff": 1024})
    cluster = find_cluster("h100-sxm-x4")
    rows = write_vidur(tmp_path, "m", "h100", work, [1], 64, LATENCY, cluster)
    assert all(rows.values())
    assert not any("all_reduce" in name for name in rows)
    assert any("send_recv" in name for name in rows)
    rows = write_vidur(tmp_path, "m", "h100", work, [1, 2], 64, LATENCY, cluster)
    assert any("all_reduce" in name for name in rows)
