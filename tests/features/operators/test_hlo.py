"""Operators as HLO text and back: by hand, by this package's reader and by XLA itself."""

import jax
import pandas as pd
import pytest
from jaxlib import _hlo, _jax

from opcast.common.errors import DatasetError
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.operators import FAMILIES, op_features
from opcast.features.operators.hlo import TARGET, op_frame, op_ir, read_op

ROWS, COLS = 6, 10
N = ROWS * COLS
#: FLOPs, transcendentals, bytes read and bytes written for 4-byte elements.
PASSES = {
    "add": (N, 0, 8 * N, 4 * N), "mul": (N, 0, 8 * N, 4 * N), "div": (N, 0, 8 * N, 4 * N),
    "pow": (0, N, 8 * N, 4 * N), "addu": (N, 0, 4 * N, 4 * N), "mulu": (N, 0, 4 * N, 4 * N),
    "divu": (N, 0, 4 * N, 4 * N), "powu": (0, N, 4 * N, 4 * N), "tanh": (0, N, 4 * N, 4 * N),
    "relu": (N, 0, 4 * N, 4 * N), "gelu": (3 * N, N, 4 * N, 4 * N),
    # x cos + rotate(x) sin: half is negated; the angles are one for each row.
    "rope": (3.5 * N, 0, 4 * N + 2 * 4 * ROWS, 4 * N),
    # Two products and 1 / (1 + exp(-x)), which XLA counts as one transcendental, on half of it.
    "silu_and_mul": (2 * N / 2, N / 2, 4 * N, 2 * N),
    # Subtract and divide once an element, a maximum and a sum of COLS - 1 steps a row.
    "softmax": (2 * N + 2 * ROWS * (COLS - 1), N, 4 * N, 4 * N),
    # Square, scale, weigh; sum of squares and its division a row; a root a row.
    "rmsnorm": (3 * N + ROWS * (COLS - 1) + ROWS, ROWS, 4 * N + 4 * COLS, 4 * N),
    # Besides: centre and shift, and the sum and division of the mean.
    "layernorm": (5 * N + 2 * ROWS * (COLS - 1) + 2 * ROWS, ROWS, 4 * N + 8 * COLS, 4 * N),
    "ln": (5 * N + 2 * ROWS * (COLS - 1) + 2 * ROWS, ROWS, 4 * N + 8 * COLS, 4 * N),
    # The rows that are looked up and an index each, of a table of 32 000.
    "embedding": (0, 0, 4 * N + 4 * ROWS, 4 * N),
    "quantize_fp8": (2 * N, 0, 4 * N + 4, N),
}  # fmt: skip
REDUCING = ("softmax", "ln", "layernorm", "rmsnorm")
#: Bits of a stored weight, with those of the scales of its blocks of 16, 32 or 128 values.
WEIGHTS = {
    "fp8": 8, "int8_sq": 8, "int8_wo": 8, "nvfp4": 4 + 8 / 16, "w4a16_mxfp4": 4 + 8 / 32,
    "w4a8_mxfp4_mxfp8": 4 + 8 / 32, "int4_wo": 4 + 8 / 128, "fp8_block": 8 + 8 / 128**2,
}  # fmt: skip
PLAIN = {"fp32": 4, "fp16": 2, "bf16": 2}
ATTENTION = {
    "method": "graph", "op": "attention", "dtype": "bf16", "backend": "vllm", "batch": 2,
    "q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 6, "q_len": 5, "kv_len": 9,
    "window": 0, "causal": 1,
}  # fmt: skip
EXPERTS = {
    "method": "graph", "family": "moe", "op": "moe", "dtype": "bf16", "backend": "trtllm",
    "kernel": 'a "quoted" {name}', "distribution": "power_law_1.2", "tokens": 16, "hidden": 64,
    "inter": 32, "topk": 2, "experts": 8, "tp": 1, "ep": 2,
}  # fmt: skip
CONV = {
    "method": "eager", "family": "conv", "op": "conv", "dtype": "fp32", "batch": 2, "cin": 3,
    "cout": 4, "ksize": 3, "insize": 8, "stride": 2, "pad": 1,
}  # fmt: skip


def passing(op, dtype="fp32", **changes):
    row = {"method": "kernel", "family": "elementwise", "op": op, "dtype": dtype}
    return {**row, "rows": ROWS, "cols": COLS, "n_in": 1, **changes}


def product(family, dtype, method="graph", b=1, m=8, n=256, k=128):
    row = {"method": method, "family": family, "op": family, "dtype": dtype}
    return {**row, "b": b, "m": m, "n": n, "k": k}


def every_row():
    rows = [passing(op, dtype) for op in PASSES for dtype in PLAIN]
    for dtype in (*PLAIN, *WEIGHTS):
        rows += [product("linear", dtype), product("bmm", dtype, b=3), {**EXPERTS, "dtype": dtype}]
    rows += [product("linear", "fp32", "eager"), CONV]
    for name in ("context", "generation", "encoder"):
        rows += [{**ATTENTION, "family": f"{name}_attention", "kv_dtype": "fp8"}]
    rows += [{**ATTENTION, "family": f"{name}_mla"} for name in ("context", "generation")]
    return [*rows, {**passing("quantize_fp8", "bf16"), "method": "graph", "family": "quantize"}]


def label(row):
    return f"{row['family']}-{row['op']}-{row['dtype']}"


@pytest.mark.parametrize("row", every_row(), ids=label)
def test_parameters_are_read_back_and_both_parsers_accept_the_text(row):
    text = op_ir(row)
    assert read_op(text) == row
    kernel = kernel_from_ir(text)
    assert kernel.ir == text  # canonical, so that equal operators have equal hashes
    assert read_op(kernel.ir) == row
    assert parse_hlo(text).entry_computation.root_op.results[0].size > 0
    assert xla_module(text).name == "kernel"


def xla_module(text):
    return _hlo.hlo_module_from_text(text)


def xla_cost(text):
    return _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, xla_module(text))


@pytest.mark.parametrize("op", PASSES)
def test_passes_over_memory(op):
    kernel = kernel_from_ir(op_ir(passing(op)))
    found = (kernel.flops, kernel.transcendentals, kernel.bytes_in, kernel.bytes_out)
    assert found == PASSES[op]
    fusing = "gather_scatter" if op == "embedding" else "fusion"
    assert kernel.kind == ("reduce" if op in REDUCING else fusing)


@pytest.mark.parametrize("row", [r for r in every_row() if TARGET not in op_ir(r)], ids=label)
def test_agrees_with_the_cost_analysis_of_xla(row):
    text = op_ir(row)
    kernel, cost = kernel_from_ir(text), xla_cost(text)
    assert cost.get("flops", 0.0) == kernel.flops
    assert cost.get("transcendentals", 0.0) == kernel.transcendentals
    if row["op"] not in ("embedding", "rope"):  # XLA counts the table, and slices one by one
        assert cost["bytes accessed"] == kernel.bytes_in + kernel.bytes_out


@pytest.mark.parametrize(("dtype", "width"), PLAIN.items())
def test_plain_products(dtype, width):
    kernel = kernel_from_ir(op_ir(product("bmm", dtype, b=3)))
    assert kernel.kind == "gemm"
    assert kernel.flops == 3 * 2 * 8 * 256 * 128
    assert kernel.bytes_in == 3 * (8 * 128 + 128 * 256) * width
    assert kernel.bytes_out == 3 * 8 * 256 * width
    kernel = kernel_from_ir(op_ir(product("linear", dtype)))
    assert kernel.flops == 2 * 8 * 256 * 128
    assert kernel.bytes_in == (8 * 128 + 128 * 256) * width


def test_eager_linear_adds_a_bias():
    kernel = kernel_from_ir(op_ir(product("linear", "fp32", "eager")))
    assert kernel.kind == "gemm"
    assert kernel.flops == 2 * 8 * 256 * 128 + 8 * 256
    assert kernel.bytes_in == 4 * (8 * 128 + 128 * 256 + 256)


@pytest.mark.parametrize(("dtype", "bits"), WEIGHTS.items())
def test_narrow_products_read_weights_with_their_scales(dtype, bits):
    for b in (1, 3):
        kernel = kernel_from_ir(op_ir(product("bmm" if b > 1 else "linear", dtype, b=b)))
        assert kernel.kind == "gemm"
        assert kernel.flops == b * 2 * 8 * 256 * 128
        assert kernel.bytes_in == pytest.approx(b * (2 * 8 * 128 + 128 * 256 * bits / 8))
        assert kernel.bytes_out == b * 2 * 8 * 256


def test_convolution():
    kernel = kernel_from_ir(op_ir(CONV))
    assert kernel.kind == "conv"
    # The 4 × 4 outputs, of which the first row and column see two of three taps of the filter.
    taps = (2 + 3 + 3 + 3) ** 2
    assert kernel.flops == 2 * 2 * 3 * 4 * taps
    assert kernel.bytes_in == 4 * (2 * 3 * 8 * 8 + 4 * 3 * 3 * 3)
    assert kernel.bytes_out == 4 * 2 * 4 * 4 * 4
    plain = kernel_from_ir(op_ir({**CONV, "ksize": 1, "stride": 1, "pad": 0}))
    assert plain.flops == 2 * 2 * (8 * 8) * 3 * 4


@pytest.mark.parametrize(
    ("family", "changes", "pairs", "cached"),
    [
        ("context_attention", {}, 5 + 6 + 7 + 8 + 9, 9 * (8 + 6)),
        ("context_attention", {"window": 6}, 5 + 6 + 6 + 6 + 6, 9 * (8 + 6)),
        ("encoder_attention", {"causal": 0}, 5 * 9, 9 * (8 + 6)),
        ("generation_attention", {"q_len": 1, "window": 4}, 4, 9 * (8 + 6)),
        ("generation_mla", {"q_len": 1}, 9, 9 * 8),
    ],
)
def test_attention(family, changes, pairs, cached):
    for kv_dtype, width in (("", 2), ("fp8", 1)):
        row = {**ATTENTION, "family": family, "kv_dtype": kv_dtype, **changes}
        kernel = kernel_from_ir(op_ir(row))
        assert kernel.kind == "gemm"
        assert kernel.flops == 2 * 2 * 4 * pairs * (8 + 6)
        assert kernel.bytes_in == 2 * row["q_len"] * 4 * 8 * 2 + 2 * 2 * cached * width
        assert kernel.bytes_out == 2 * row["q_len"] * 4 * 6 * 2


def test_experts():
    kernel = kernel_from_ir(op_ir(EXPERTS))
    assert kernel.kind == "custom_call"
    assert kernel.flops == 2 * (16 * 2 // 2) * 64 * 32 * 3
    tokens, routes, weights = 16 * 64 * 2, 16 * 2 * (4 + 4), 4 * 64 * 32 * 3 * 2
    assert kernel.bytes_in == tokens + routes + weights
    assert kernel.bytes_out == 16 * 64 * 2
    ungated = kernel_from_ir(op_ir({**EXPERTS, "kernel": "moe_torch_flow_nongated"}))
    assert ungated.flops == kernel.flops * 2 / 3
    assert kernel.bytes_in - ungated.bytes_in == 4 * 64 * 32 * 2
    sizes = {"inter": 1856, "topk": 6, "experts": 128, "ep": 1}
    nano = kernel_from_ir(op_ir({**EXPERTS, **sizes, "kernel": "sglang_flashinfer_trtllm_moe"}))
    assert nano.flops == 2 * 16 * 6 * 64 * 1856 * 2


def test_flops_are_those_of_the_physics(op_rows, round_gpu):
    """But for the bias, the padding of convolutions and the passes, of which physics count none."""
    for family, group in FAMILIES.items():
        if group not in ("gemm", "attention", "moe") or family == "eager/linear":
            continue
        rows = op_rows(family, 20)
        physics = op_features(rows.assign(device="a"), family, {"a": round_gpu()})
        kernels = [kernel_from_ir(op_ir(row)) for row in rows.to_dict("records")]
        assert [k.flops for k in kernels] == pytest.approx(list(physics.flops)), family


def test_absent_parameters_are_left_out():
    row = {**passing("add"), "n_in": pd.NA, "backend": None, "kernel": float("nan"), "kv_dtype": ""}
    left = {k: v for k, v in passing("add").items() if k != "n_in"}
    assert read_op(op_ir(row)) == left


def test_table_of_kernels():
    texts = [op_ir(passing("add")), "HloModule other", op_ir(CONV)]
    frame = op_frame(texts)
    assert list(frame["method"]) == ["kernel", "", "eager"]
    assert frame["rows"][0] == ROWS and frame["ksize"][2] == 3
    assert pd.isna(frame["rows"][2]) and pd.isna(frame["op"][1])
    assert {"experts", "kv_len", "distribution"} <= set(frame)


def test_other_kernels_hold_no_operator():
    assert read_op("HloModule m\n\nENTRY main {\n  ROOT p = f32[2] parameter(0)\n}\n") is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**passing("add"), "family": "sort"}, r"no operator family 'kernel/sort'.*eager/conv"),
        (passing("erf"), r"no element-wise op 'erf'.*softmax"),
        (passing("add", "fp7"), r"no dtype 'fp7'.*nvfp4"),
        ({**EXPERTS, "dtype": ""}, r"no dtype ''"),
        ({k: v for k, v in CONV.items() if k != "cin"}, r"eager/conv .*'cin'"),
        (product("linear", "bf16", n=None), r"graph/linear .*'n'"),
    ],
)
def test_rows_that_make_no_kernel(row, message):
    with pytest.raises(DatasetError, match=message):
        op_ir(row)
