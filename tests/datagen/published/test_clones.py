"""Clones of the publishers' repositories: made-up values under their headers and paths."""

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.datagen.published.clones import clone_files
from opcast.datagen.published.importer import import_published
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.operators.schema import sources
from opcast.models.operators import rows_of_dataset

GRID = "Grid x,Grid y,Grid z,Block x,Block y,Block z,Kernels"
PERF = "framework,version,device,op_name,kernel_source"


def write(path: Path, header: str, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture
def neusight(tmp_path):
    root = tmp_path / "NeuSight" / "scripts" / "asplos" / "data"
    train = root / "dataset" / "train" / "collect"
    head, tail = "OPName,Latency,Device,Kernel Name", "1,1,1,128,1,1,k"
    write(train / "linear" / "p2.1.0" / "Tesla T4.csv", f"{head},{GRID},B,M,N,K",
          f"linear,0.25,Tesla T4,sgemm,{tail},1,64,512,128",
          f"linear,0.5,Tesla T4,sgemm,{tail},1,128,512,128")  # fmt: skip
    write(train / "conv" / "p2.1.0" / "Tesla P4.csv",
          f"{head},{GRID},B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding",
          f"conv,2.0,Tesla P4,conv,{tail},8,16,32,3,28,1,1")  # fmt: skip
    write(train / "add" / "p2.1.0" / "Tesla T4.csv", f"{head},{GRID},B,H",
          f"add,0.04,Tesla T4,add,{tail},300,768")  # fmt: skip
    write(root / "dataset" / "test" / "vec.csv", f"{head},{GRID},B,H",
          f"softmax,0.03,NVIDIA L4,softmax,{tail},4096,1024",
          f"other,0.03,NVIDIA L4,other,{tail},4096,1024")  # fmt: skip
    write(root / "prediction" / "summary.csv", "a,b", "1,2")
    return tmp_path / "NeuSight"


@pytest.fixture
def vidur(tmp_path):
    columns = ["emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"]
    columns += ["post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"]
    stats = ("min", "max", "mean", "median", "std")
    head = ",".join(f"time_stats.{c}.{s}" for c in columns for s in stats)
    head += ",n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens"
    times = ",".join(f"{0.01 * (i + 1):.2f}" for i in range(len(columns)) for _ in stats)
    root = tmp_path / "vidur" / "data" / "profiling" / "compute" / "a40" / "maker" / "model"
    write(root / "mlp.csv", head + ",num_tensor_parallel_workers",
          f"{times},64,8,8192,28672,32000,True,4096,2")  # fmt: skip
    write(root / "attention.csv", "n_embd", "1")
    return tmp_path / "vidur"


@pytest.fixture
def aiconfigurator(tmp_path):
    data = tmp_path / "aic" / "src" / "aiconfigurator" / "systems" / "data"
    new, old = data / "h200_sxm" / "trtllm" / "1.3.0rc10", data / "h200_sxm" / "trtllm" / "1.2.0"
    gemm = f"{PERF},gemm_dtype,m,n,k,latency,power"
    write(old / "gemm_perf.txt", gemm, "TRTLLM,1.2.0,H200,gemm,torch_flow,fp8,1,1,1,9.0,0")
    write(new / "gemm_perf.txt", gemm,
          "TRTLLM,1.3.0rc10,H200,gemm,torch_flow,bfloat16,64,256,512,0.010,0",
          "TRTLLM,1.3.0rc10,H200,gemm,torch_flow,bfloat16,64,256,512,0.030,0",
          "TRTLLM,1.3.0rc10,H200,gemm,torch_flow,w4afp8,64,256,512,0.030,0",
          "TRTLLM,1.3.0rc10,H200,gemm,torch_flow,fp8_block,64,256,512,0.005,0")  # fmt: skip
    heads = "batch_size,isl,num_heads,num_key_value_heads,head_dim,beam_width,kv_cache_dtype"
    write(new / "generation_attention_perf.txt",
          f"{PERF},{heads},attn_dtype,window_size,step,latency",
          "TRTLLM,1,H200,generation,flash,4,1,32,8,128,1,fp8,bfloat16,0,1023,0.02",
          "TRTLLM,1,H200,generation,flash,4,1,32,0,128,1,fp8,bfloat16,0,1023,0.03")  # fmt: skip
    write(new / "context_mla_perf.txt",
          f"{PERF},mla_dtype,kv_cache_dtype,num_heads,batch_size,isl,tp_size,step,latency",
          "TRTLLM,1,H200,mla,default,bfloat16,bfloat16,16,2,128,8,0,0.05")  # fmt: skip
    write(new / "mla_bmm_perf.txt", f"{PERF},bmm_dtype,num_tokens,num_heads,latency",
          "TRTLLM,1,H200,mla_gen_pre,default,bfloat16,32,16,0.006",
          "TRTLLM,1,H200,mla_gen_post,default,bfloat16,32,16,0.007")  # fmt: skip
    moe = "num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution"
    write(data / "b60" / "moe" / "vllm" / "0.20.0" / "moe_perf.csv",
          f"{PERF},moe_dtype,{moe},latency",
          "VLLM,0.20.0,B60,moe,triton,int4_wo,8,2048,768,8,128,2,4,balanced,0.4")  # fmt: skip
    write(new / "scale_matrix_perf.txt", f"{PERF},m,k,quant_dtype,latency",
          "TRTLLM,1,H200,scale_matrix,torch_ops,16,512,fp8,0.003")  # fmt: skip
    write(new / "wideep_moe_perf.txt", "a", "1")
    return tmp_path / "aic"


def imported(folder, out):
    import_published(folder, out)
    return rows_of_dataset(Dataset.load(out))


def only(rows, **values):
    for column, value in values.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def test_neusight(neusight, tmp_path):
    rows = imported(neusight, tmp_path / "d")
    assert len(rows) == 5
    row = only(rows, key="eager/linear", m=64)
    assert (row.b, row.n, row.k) == (1, 128, 512)  # its N is what is summed over
    assert (row.device, row["dtype"], row.latency_us) == ("t4", "fp32", 250.0)
    row = only(rows, key="eager/conv")
    assert [row[c] for c in ("batch", "cin", "cout", "ksize", "insize", "stride", "pad")] == [
        8, 16, 32, 3, 28, 1, 1,
    ]  # fmt: skip
    assert row.device == "p4" and row.latency_us == 2000.0
    assert only(rows, op="add").n_in == 2
    row = only(rows, key="eager/softmax")
    assert (row.rows, row.cols, row.device, row.split) == (4096, 1024, "l4", "test")


def test_vidur(vidur, tmp_path):
    """A layer with 64 heads of 128, 8 of them for keys, cut in two."""
    rows = imported(vidur, tmp_path / "d")
    assert set(rows.device) == {"a40"} and set(rows.dtype) == {"fp16"}
    assert len(rows) == 10 and set(rows.method) == {"kernel"}
    shapes = {(r.n, r.k) for r in rows[rows.family == "linear"].itertuples()}
    assert shapes == {(5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336)}
    assert set(rows.m.dropna()) == {4096}
    assert only(rows, op="rope").cols == 36 * 128
    assert only(rows, op="silu_and_mul").cols == 14336
    assert (rows.op == "rmsnorm").sum() == 2
    assert only(rows, op="embedding").latency_us == pytest.approx(10.0)
    assert only(rows, n=5120).latency_us == pytest.approx(30.0)


def test_aiconfigurator(aiconfigurator, tmp_path, caplog):
    rows = imported(aiconfigurator, tmp_path / "d")
    assert set(rows.method) == {"graph"}
    assert "1 rows of other dtypes" in caplog.text
    assert (rows.latency_us < 1000).all()  # the older version is left out
    row = only(rows, key="graph/linear", dtype="bf16")
    assert (row.device, row.backend, row.kernel) == ("h200-sxm", "trtllm", "torch_flow")
    assert row.latency_us == pytest.approx(20.0)  # the median of two
    assert only(rows, key="graph/linear", dtype="fp8_block").latency_us == pytest.approx(5.0)
    row = only(rows, key="graph/generation_attention", kv_heads=8)
    assert (row.q_len, row.kv_len, row.kv_dtype, row.causal) == (1, 1024, "fp8", 1)
    assert only(rows, key="graph/generation_attention", kv_heads=32).q_heads == 32
    row = only(rows, key="graph/context_mla")
    assert (row.q_heads, row.kv_heads, row.head_dim, row.v_head_dim) == (16, 16, 192, 128)
    assert (row.q_len, row.kv_len) == (128, 128)
    row = only(rows, key="graph/bmm", n=512)
    assert (row.b, row.m, row.k) == (16, 32, 128)
    row = only(rows, key="graph/moe")
    assert (row.device, row.tp, row.ep, row.experts, row["dtype"]) == (
        "arc-b60",
        2,
        4,
        128,
        "int4_wo",
    )
    row = only(rows, key="graph/quantize")
    assert (row.rows, row.cols, row.op) == (16, 512, "quantize_fp8")


def test_the_command_takes_a_clone_and_resumes(vidur, tmp_path):
    arguments = ["data", "import", "published", str(vidur), "--out", str(tmp_path / "d")]
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "10 samples of 1 devices" in first.output
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "1 shards already existed" in again.output


def test_a_missing_column_is_named_with_its_file(neusight, tmp_path):
    path = next(neusight.rglob("linear/*/Tesla T4.csv"))
    pd.read_csv(path).drop(columns="K").to_csv(path, index=False)
    with pytest.raises(DatasetError, match=r"Tesla T4.csv: column 'K' is missing"):
        import_published(neusight, tmp_path / "d")


def test_what_is_no_clone_is_refused(tmp_path):
    write(tmp_path / "x" / "data.csv", "a", "1")
    assert clone_files(tmp_path / "x") == []
    with pytest.raises(DatasetError, match="clone of NeuSight"):
        import_published(tmp_path / "x", tmp_path / "d")


def test_some_shapes_are_put_aside_on_every_device(tmp_path):
    shapes = [f"linear,0.2,x,k,1,{m},64,64" for m in range(1, 401)]
    for device in ("Tesla T4", "Tesla P4"):
        write(tmp_path / "c" / "dataset" / "train" / "collect" / "linear" / "p2" / f"{device}.csv",
              "OPName,Latency,Device,Kernel Name,B,M,N,K", *shapes)  # fmt: skip
    rows = imported(tmp_path / "c", tmp_path / "d")
    held = [set(rows[(rows.device == d) & (rows.split == "val")].m) for d in ("t4", "p4")]
    assert held[0] == held[1]
    assert 5 < len(held[0]) < 45


def test_every_system_is_in_the_catalogue():
    names = [n for own in sources().values() for n in own.clone.get("devices", {}).values()]
    assert len(names) > 10
    for name in names:
        assert find_device(name).name == name
