import json
from itertools import pairwise

import jax
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import PlanError, ProgramError
from opcast.common.parquet import write_table
from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.lower import lower
from opcast.models.collectives.on_cluster import ClusterCollectives
from opcast.predict.cluster.network import ClusterNetwork
from opcast.predict.export.latency_table import expand_ops, kernel_table, operator_table
from opcast.predict.export.vidur import attention_table, mlp_table, sizes, write_vidur
from opcast.predict.operator.step_operators import OperatorLatency
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Group


def test_grids_of_operators():
    assert expand_ops("linear m=1/64 n=8 k=4/2 dtype=bf16") == [
        f"linear m={m} n=8 k={k} dtype=bf16" for m in (1, 64) for k in (4, 2)
    ]
    with pytest.raises(ProgramError, match="1,048,576 operators"):
        expand_ops("linear " + " ".join(f"m{i}=1/2" for i in range(20)))


def test_table_of_operators_is_read_back(tmp_path):
    devices = {n: find_device(n) for n in ("h100-sxm", "b200")}
    texts = expand_ops("linear m=1/8192 n=8192 k=8192 dtype=bf16")
    write_table(operator_table(texts, devices, None), tmp_path / "t.parquet")
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert len(table) == 4
    assert [json.loads(s)["m"] for s in table["shape"]] == [1, 1, 8192, 8192]
    assert (table["lo_us"] < table["latency_us"]).all()
    assert (table["latency_us"] < table["hi_us"]).all()
    large = table[(table["device"] == "h100-sxm")].iloc[1]
    # 2 · 8192³ FLOPs at 989.4 TFLOP/s.
    assert large["latency_us"] >= 2 * 8192**3 / 989.4e12 * 1e6
    assert set(table["source"]) == {"roofline"}


def test_table_of_kernels_has_each_once(predictor, device):
    step = jax.jit(lambda x, y: (x @ y, x @ y.T)).lower(
        *[jax.ShapeDtypeStruct((64, 64), np.float32)] * 2
    )
    lowered = lower(step.as_text(), "op")
    table = kernel_table(lowered, device, predictor.model)
    dot = table[table["op"] == "dot"]
    assert len(dot) == 1
    shape = json.loads(dot["shape"].iloc[0])
    assert len(shape["operands"]) == 2
    assert len(shape["results"]) == 1
    assert (table["latency_us"] > 0).all()


def test_sizes_are_dense_first():
    assert sizes(20) == [*range(1, 20), 20]
    assert sizes(70)[-4:] == [62, 64, 68, 70]
    found = sizes(4096)
    assert found[-1] == 4096
    assert max(b / a for a, b in pairwise(found[15:])) <= 1 + 1 / 16


@pytest.fixture(scope="module")
def vidur(tmp_path_factory):
    out = tmp_path_factory.mktemp("vidur")
    device, cluster = find_device("h100-sxm"), find_cluster("h100-sxm-x4")
    work = make_workload("llama", {"layers": 2, "d_model": 1024, "heads": 8, "d_ff": 2816})
    latency = OperatorLatency(device, None)
    rows = write_vidur(out, "org/tiny", "h100", work, [1, 2], 512, latency, cluster)
    return {f.rsplit("/", 1)[1]: pd.read_csv(out / f) for f in rows}, rows, work


def test_vidur_reads_what_it_filters_by(vidur):
    tables, rows, work = vidur
    assert next(iter(rows)) == "compute/h100/org/tiny/mlp.csv"
    mlp, attention = tables["mlp.csv"], tables["attention.csv"]
    chosen = mlp[
        (mlp["n_head"] == 8) & (mlp["n_kv_head"] == 8) & (mlp["n_embd"] == 1024)
        & (mlp["n_expanded_embd"] == 2816) & mlp["use_gated_mlp"]
        & (mlp["vocab_size"] == work.vocab) & (mlp["num_tensor_parallel_workers"] == 2)
    ]  # fmt: skip
    assert len(chosen) == len(mlp) / 2
    for op in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act",
               "input_layernorm", "post_attention_layernorm", "attn_rope", "add"):  # fmt: skip
        assert (chosen[f"time_stats.{op}.median"] > 0).all()
    prefill = attention[attention["is_prefill"]]
    assert (prefill["prefill_chunk_size"] > 0).all()
    assert prefill["time_stats.attn_prefill.median"].notna().all()
    assert prefill["time_stats.attn_decode.median"].isna().all()
    assert (attention["prefill_chunk_size"] + attention["kv_cache_size"] <= 512).all()
    assert attention["time_stats.attn_kv_cache_save.median"].notna().all()


def test_times_are_in_milliseconds_and_those_of_the_model(vidur):
    tables, _, _ = vidur
    mlp, reduce = tables["mlp.csv"], tables["all_reduce.csv"]
    row = mlp[(mlp["num_tokens"] == 512) & (mlp["num_tensor_parallel_workers"] == 1)].iloc[0]
    device = find_device("h100-sxm")
    flops = 2 * 512 * 1024 * 2 * 2816 / (0.7 * device.matrix_peak("f16"))
    moved = 2 * (512 * 5632 + 512 * 1024 + 5632 * 1024) / (0.85 * device.bandwidth)
    expected = max(flops, moved) + device.floor
    assert row["time_stats.mlp_up_proj.median"] == pytest.approx(1e3 * expected)
    assert (reduce["devices_per_node"] == reduce["num_workers"]).all()
    assert set(tables["send_recv.csv"]["devices_per_node"]) == {2}


def test_collectives_are_those_of_steps(vidur):
    tables, _, _ = vidur
    network = ClusterNetwork(find_cluster("h100-sxm-x4"))
    model = ClusterCollectives()
    for kind, rows in (("all_reduce", 5), ("send_recv", 5)):
        for row in tables[f"{kind}.csv"].iloc[::rows].to_dict("records"):
            workers, size = row["num_workers"], float(row["size"])
            found = network(kind, size, Group(workers, 1))
            own = model.estimate(kind, size, workers, network.cluster)
            assert found == (own.latency, own.lo, own.hi)
            assert row[f"time_stats.{kind}.mean"] == pytest.approx(1e3 * found.value)
            deviation = 1e3 * (found.hi - found.lo) / (2 * 1.645)
            assert row[f"time_stats.{kind}.std"] == pytest.approx(deviation)


def test_workers_that_do_not_divide_are_refused(tmp_path):
    latency = OperatorLatency(find_device("h100-sxm"), None)
    work = make_workload("llama", {"heads": 8, "d_model": 1024})
    with pytest.raises(PlanError, match="3 workers do not divide"):
        write_vidur(tmp_path, "x", "h100", work, [3], 64, latency)


def test_of_models_with_experts_vidur_gets_what_its_columns_hold(tmp_path):
    latency = OperatorLatency(find_device("h100-sxm"), None)
    sizes = {"layers": 2, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 2816}
    plain, mixed = (
        make_workload("llama", {**sizes, **m}) for m in ({}, {"experts": 4, "top_k": 1})
    )
    rows = write_vidur(tmp_path, "x", "h100", mixed, [1], 64, latency)
    assert list(rows) == ["compute/h100/x/attention.csv"]
    # Attention is that of the same model without experts.
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "compute/h100/x/attention.csv"),
        attention_table(plain, [1], 64, latency).reset_index(drop=True),
        check_dtype=False,
    )
    with pytest.raises(PlanError, match="no columns for experts"):
        mlp_table(mixed, [1], 64, latency)
    command = ["export", "vidur", "--workload", "moe", "--device", "h100-sxm", "--out"]
    said = CliRunner().invoke(
        app, [*command, str(tmp_path / "o"), "--max-tokens", "64", "--model", "roofline"]
    )
    assert said.exit_code == 0, said.output
    assert "no mlp.csv: it has no columns for routed experts" in said.output
    assert "simulate-serving" in said.output
