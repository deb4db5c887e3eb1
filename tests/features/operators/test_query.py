"""Operators written by hand."""

import numpy as np
import pytest

from opcast.common.errors import ProgramError
from opcast.features.operators import op_features
from opcast.features.operators.query import parse_op, parse_op_columns


def test_a_product_with_defaults():
    assert parse_op("linear m=8 n=16 k=32 dtype=bfloat16 backend=vllm") == {
        "key": "graph/linear", "method": "graph", "family": "linear", "op": "linear",
        "b": 1, "m": 8, "n": 16, "k": 32, "dtype": "bf16", "backend": "vllm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("linear m=1 n=1 k=1 dtype=f32", "eager/linear"),
        ("linear m=1 n=1 k=1 dtype=fp16", "kernel/linear"),
        ("eager/linear m=1 n=1 k=1 dtype=fp16", "eager/linear"),
        ("norm op=rmsnorm rows=1 cols=1 dtype=bf16", "kernel/norm"),
    ],
)
def test_how_it_is_timed_follows_from_the_dtype(text, key):
    assert parse_op(text)["key"] == key


def test_attention_fills_in_what_follows():
    row = parse_op("generation_attention batch=4 q_heads=32 head_dim=128 kv_len=99 dtype=bf16")
    assert row["kv_heads"] == 32 and row["v_head_dim"] == 128 and row["kv_dtype"] == "bf16"
    assert row["q_len"] == 1 and row["window"] == 0 and row["causal"] == 1
    row = parse_op("context_attention batch=1 q_heads=8 kv_heads=2 head_dim=64 q_len=7 dtype=bf16")
    assert row["kv_heads"] == 2 and row["kv_len"] == 7
    assert parse_op(
        "encoder_attention batch=1 q_heads=8 head_dim=64 q_len=7 dtype=bf16"
    )["causal"] == 0  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "moe tokens=8 hidden=64 inter=32 topk=2 experts=8 dtype=bf16",
        "eager/conv batch=1 cin=3 cout=8 ksize=3 insize=32 dtype=fp32",
        "elementwise op=gelu rows=8 cols=8 dtype=fp32",
        "generation_mla batch=4 q_heads=16 kv_heads=1 head_dim=576 v_head_dim=512 kv_len=99"
        " dtype=bf16",
    ],
)
def test_what_is_parsed_has_features(text, round_gpu):
    import pandas as pd

    row = parse_op(text)
    found = op_features(pd.DataFrame([row]).assign(device="a"), row["key"], {"a": round_gpu()})
    assert found.base_s[0] > 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no operator ''"),
        ("matmul m=1", "no operator 'matmul'"),
        ("linear m=1 n=1 dtype=bf16", "needs k"),
        ("linear m=1 n=1 k=1", "needs dtype"),
        ("linear m=1 n=1 k=1 dtype=fp7", "no dtype 'fp7'"),
        ("linear m=1.5 n=1 k=1 dtype=bf16", "m=1.5 is not a whole number"),
        ("linear m=1 n=1 k=1 dtype=bf16 heads=2", "no parameter 'heads'"),
        ("linear m 1", "not name=value"),
        ("norm rows=1 cols=1 dtype=fp16", "needs op"),
    ],
)
def test_what_is_wrong_is_named(text, what):
    with pytest.raises(ProgramError, match=what):
        parse_op(text)


@pytest.mark.parametrize(
    "text", ["elementwise", "norm", "linear m=7", "generation_mla batch=4", "moe"]
)
def test_the_example_of_an_error_is_of_the_family_and_valid(text):
    with pytest.raises(ProgramError) as error:
        parse_op(text)
    example = error.value.hint.removeprefix("such as: ")
    assert example.startswith(text)
    assert parse_op(example)["family"] == text.split()[0]


def test_close_names_are_given():
    with pytest.raises(ProgramError, match="close to it: softmax"):
        parse_op("softmx rows=1 cols=1")


def test_decode_needs_the_length_of_its_cache():
    with pytest.raises(ProgramError, match="generation_attention needs kv_len"):
        parse_op("generation_attention batch=4 q_heads=32 head_dim=128 dtype=bf16")


def test_unknown_backends_are_refused():
    with pytest.raises(ProgramError, match=r"no backend 'foo' \(backends: sglang, trtllm, vllm\)"):
        parse_op("linear m=1 n=8 k=8 dtype=bf16 backend=foo")


def test_columns_are_rows_with_the_same_defaults():
    columns = {"batch": [1, 4], "q_heads": [32, 8], "head_dim": 128, "kv_len": [99, 7]}
    found = parse_op_columns("generation_attention", columns | {"dtype": "bfloat16"})
    for row in range(2):
        sizes = {k: v[row] if isinstance(v, list) else v for k, v in columns.items()}
        text = " ".join(f"{k}={v}" for k, v in sizes.items())
        expected = parse_op(f"generation_attention {text} dtype=bfloat16")
        own = {k: v[row] if isinstance(v, np.ndarray) else v for k, v in found.items()}
        assert own == expected


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"m": [1, 2], "n": [1]}, r"columns have \[1, 2\] rows"),
        ({"m": [], "n": 1, "k": 1}, r"columns have \[0\] rows"),
        ({"m": [1, 0], "n": 1, "k": 1}, "m=0 is not from 1"),
        ({"m": [2**41], "n": 1, "k": 1}, "is not from 1 to"),
        ({"m": [2**70], "n": 1, "k": 1}, "m must contain whole numbers"),
        ({"m": 1, "n": 1, "backend": [1]}, "backend is a name"),
    ],
)
def test_what_is_wrong_with_columns_is_named(columns, what):
    with pytest.raises(ProgramError, match=what):
        parse_op_columns("linear", columns | {"dtype": "bf16"})
