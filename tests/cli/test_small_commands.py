"""Small things that newcomers stumble over."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import opcast
from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.models.core.kernel_table import KernelTable
from opcast.models.trust.domain import Domain


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_version():
    assert invoke("--version").strip() == f"opcast {opcast.__version__}"


def test_fewer_kernels_than_one_are_refused():
    for command in ("predict", "explain", "check"):
        result = CliRunner().invoke(app, [command, "x.mlir", "--top", "-1"])
        assert result.exit_code == 2 and "--top" in result.output


def test_a_device_that_a_model_knows_is_shown():
    assert "measured" in invoke("device", "cpu-amd-epyc-2c")
    assert json.loads(invoke("device", "cpu-amd-epyc-2c", "--json"))["platform"] == "cpu"


def test_sizes_of_collectives_are_explained():
    assert "input bytes per rank" in invoke("cluster", "h100-sxm-x4")


def test_an_operator_outside_says_why():
    op = "linear m=4 n=4096000 k=40960 dtype=fp8 backend=vllm"
    assert "outside: " in invoke("predict", "--op", op, "--device", "h100-sxm")
    data = json.loads(invoke("predict", "--op", op, "--device", "h100-sxm", "--json"))
    assert not data["in_domain"] and len(data["outside"]) >= 1


def test_reasons_by_hand():
    """Two features on a diagonal: out of range, and in range but off the diagonal."""
    line = np.linspace(0, 16, 33)
    domain = Domain.fit(table(np.stack([line, line], axis=1)))
    assert domain.reasons(table(np.array([[8.0, 8.0]]))) == []
    assert domain.reasons(table(np.array([[20.0, 8.0]]))) == ["a is 20, trained from 0 to 16"]
    assert domain.reasons(table(np.array([[1.0, 15.0]]))) == ["a with b as here was not seen"]


def table(values: np.ndarray) -> KernelTable:
    n = len(values)
    bound = np.full(n, "memory", object)
    return KernelTable(values, ("a", "b"), np.ones(n), bound, np.zeros(n, int), "s")


def test_the_documented_table_of_operators_is_audited_and_judged(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "operator-tables.md").read_text(encoding="utf-8")
    text = page.split("```csv\n")[1].split("```")[0]
    table = tmp_path / "mine.csv"
    table.write_text(text)
    assert "2 rows checked, 0 flagged" in invoke("audit", str(table))
    judged = invoke("drift", "--data", str(table))
    assert "kernel/linear" in judged and "0 of 1 have drifted" in judged


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("source,", "from,", ["the table cannot be checked", "'source' is missing"]),
        (",family,", ",what,", ["the table cannot be checked", "no rows of operators"]),
        ("linear,bf16", "matmul,bf16", ["no family kernel/matmul", "family of the model"]),
    ],
)
def test_tables_without_a_source_or_family_are_told_which_there_are(tmp_path, old, new, said):
    table = tmp_path / "mine.csv"
    table.write_text(
        "source,device,op,family,dtype,b,m,n,k,latency_us\n"
        "me,h100-sxm,linear,linear,bf16,1,256,4096,4096,24.1\n".replace(old, new)
    )
    for command, expected in zip((["audit"], ["drift", "--data"]), said, strict=True):
        with pytest.raises(DatasetError) as error:
            CliRunner().invoke(app, [*command, str(table)], catch_exceptions=False)
        assert expected in str(error.value)
        assert "vidur or any name of your own (kernel durations): linear, norm" in str(error.value)


def test_an_audit_names_the_sizes_that_are_missing(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text(
        "source,device,op,family,dtype,m,n,latency_us\n"
        "me,h100-sxm,linear,linear,bf16,256,4096,24.1\n"
    )
    with pytest.raises(DatasetError, match=r"kernel/linear needs the columns k \(its columns"):
        CliRunner().invoke(app, ["audit", str(table)], catch_exceptions=False)


# 2 · 4096³ operations take 139 µs at the H100's 989 TFLOP/s; 4 · 4 · 32 · 128 · 8192² / 2 of causal
# attention 2,223 µs.
_LINEAR = "linear,linear,bf16,4096,4096,4096,,,,,"
_PREFILL = "context_attention,context_attention,bf16,,,,4,32,8,128,8192"


@pytest.mark.parametrize(
    ("row", "sound", "wrong"),
    [(_LINEAR, 220, 100), (_PREFILL, 3500, 1500)],
    ids=["linear", "attention"],
)
def test_tables_may_leave_out_what_a_query_may(tmp_path, row, sound, wrong):
    """The same rows with b=1, window=0 and the values' width written out give the same."""
    head = "op,family,dtype,m,n,k,batch,q_heads,kv_heads,head_dim,q_len,device,source,latency_us"
    body = "\n".join(f"{row},h100-sxm,mine,{t}" for t in (sound, wrong))
    short = tmp_path / "short.csv"
    short.write_text(f"{head}\n{body}\n")
    full = tmp_path / "full.csv"
    more = "b,window,v_head_dim,causal,kv_len,kv_dtype"
    lines = body.split("\n")
    full.write_text("\n".join([f"{head},{more}", *(f"{x},1,0,128,1,8192,bf16" for x in lines)]))
    found = []
    for table in (short, full):
        result = CliRunner().invoke(app, ["audit", str(table), "--json"], catch_exceptions=False)
        assert result.exit_code == 1
        found.append(json.loads(result.stdout))
    assert found[0] == found[1]
    assert found[0]["rows"] == 2 and found[0]["impossible"] == 1


def test_audit_exits_with_1_if_a_row_is_impossible(tmp_path):
    table = tmp_path / "t.csv"
    head = "op,family,dtype,device,source,b,m,n,k,latency_us\n"
    row = "linear,linear,bf16,h100-sxm,mine,1,4096,4096,4096"
    table.write_text(f"{head}{row},400\n")
    sound = CliRunner().invoke(app, ["audit", str(table)])
    assert sound.exit_code == 0
    assert "1 rows checked, 0 flagged, 0 of them impossible" in sound.output
    table.write_text(f"{head}{row},100\n")
    out = tmp_path / "flagged.csv"
    wrong = CliRunner().invoke(app, ["audit", str(table), "--out", str(out), "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["reasons"][0]["reason"] == "above the peak"
    assert f"wrote {out}: 1 rows" in wrong.stderr
    assert "the peak is 989.4" in out.read_text()


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_documented_candidates_are_ranked(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    example = Path(__file__).parents[2] / "docs" / "examples" / "tile_candidates.csv"
    lines = invoke("tune-kernel", str(example), "--top", "2").splitlines()
    assert "19 candidates" in lines[0] and max(map(len, lines)) <= int(width)
    # What all candidates have in common is not printed.
    assert "block_q=" in " ".join(lines) and "q_layout" not in " ".join(lines)
    # Each device's first and second place; equal times share one.
    places = [line.split()[:1] + re.findall(r"  (\d)  +[\d.]+ ms", line) for line in lines]
    assert [p for p in places if p[0] == "h100-sxm"] == [["h100-sxm", "1"], ["h100-sxm", "2"]]
    assert next(p for p in places if p[0] == "tpu-v6e") == ["tpu-v6e", "1"]


UNDONATED = """
import jax
import jax.numpy as jnp

def step(p, x, y):
    def loss(p):
        return jnp.mean((jax.nn.gelu(x @ p["w1"]) @ p["w2"] - y) ** 2)
    value, found = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 1e-3 * b, p, found), value

shape = jax.ShapeDtypeStruct
w = {"w1": shape((256, 512), "float32"), "w2": shape((512, 256), "float32")}
example_args = (w, shape((64, 256), "float32"), shape((64, 256), "float32"))
"""


def test_the_batch_of_a_step_that_donates_nothing_is_found(tmp_path):
    (tmp_path / "own.py").write_text(UNDONATED)
    out = tmp_path / "step8.mlir"
    said = invoke("partition", f"{tmp_path / 'own.py'}:step", "--mesh", "dp=8", "--out", str(out))
    assert "taking x, y as the batch" in said
    # Gradients of both parameters, 2 · 256 · 512 of 4 bytes, and the loss.
    assert "collectives move 1.0 MiB per run" in said
    assert "num_partitions = 8" in out.read_text() and "tensor<8x256xf32>" in out.read_text()


@pytest.mark.parametrize("command", [("tune-kernel",), ("audit",), ("drift", "--data")])
def test_an_empty_table_is_an_error_that_names_it(command, tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("")
    with pytest.raises(DatasetError, match=r"empty\.csv"):
        CliRunner().invoke(app, [*command, str(path)], catch_exceptions=False)
