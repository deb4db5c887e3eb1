"""Converts the columns of publishers' tables to the schema of the packs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

#: Operators of NeuSight's tables by family; ``n_in`` is 2 for those of two tensors.
NEUSIGHT_OPS = {
    "bmm": "bmm",
    "linear": "linear",
    "conv": "conv",
    "softmax": "softmax",
    "ln": "ln",
    **dict.fromkeys(
        ("add", "mul", "pow", "div", "addu", "mulu", "powu", "divu", "gelu", "relu", "tanh"),
        "elementwise",
    ),
}
#: Operators of two tensors; those with a ``u`` take a scalar instead.
_BINARY = ("add", "mul", "pow", "div")
#: Dtypes of aiconfigurator's tables; both 16-bit floats run at the same rate there.
DTYPES = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "sq": "int8_sq",
    "int8_sq": "int8_sq",
    "int8_wo": "int8_wo",
    "int4_wo": "int4_wo",
    "w4a16_mxfp4": "w4a16_mxfp4",
    "w4a8_mxfp4_mxfp8": "w4a8_mxfp4_mxfp8",
}
#: Widths of keys and values in multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024): in
#: prefill 128 + 64 for RoPE and 128, in decode the latent itself, 512 + 64 and 512.
_LATENT = {"context": (192, 128), "generation": (576, 512)}
#: Heads of DeepSeek-V2 and V3, which tables without a column of heads were measured with.
_ALL_HEADS = 128


def neusight_rows(table: pd.DataFrame, op: str | None, device: str | None) -> pd.DataFrame:
    """Convert one of NeuSight's tables.

    Its ``N`` is the reduced dimension and ``K`` the width of the result; latencies are in
    milliseconds.

    Args:
        table: Table as NeuSight's ``collect.py`` writes it.
        op: Operator, if the path says so; else the column ``OPName`` does.
        device: Device, likewise.

    Raises:
        KeyError: A column is missing.
    """
    ops = pd.Series(op, index=table.index) if op else table["OPName"].astype(str)
    parts = []
    for name in dict.fromkeys(ops):
        if name in NEUSIGHT_OPS:
            own = table[ops == name]
            shaped = _neusight_shape(own, name)
            shaped["op"], shaped["family"] = name, NEUSIGHT_OPS[name]
            shaped["latency_us"] = own["Latency"].to_numpy(np.float64) * 1e3
            shaped["device"] = device or own["Device"].astype(str).str.strip().to_numpy()
            parts.append(shaped)
    rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"latency_us": []})
    return rows.assign(source="neusight", dtype="fp32")


def _neusight_shape(own: pd.DataFrame, op: str) -> pd.DataFrame:
    family = NEUSIGHT_OPS[op]
    if family in ("bmm", "linear"):
        names = {"b": "B", "m": "M", "n": "K", "k": "N"}
    elif family == "conv":
        # The first spelling is the publisher's own.
        spelling = "Kernel_Szie" if "Kernel_Szie" in own else "Kernel_Size"
        names = {
            "batch": "B",
            "cin": "Input_Channel",
            "cout": "Output_Channel",
            "ksize": spelling,
            "insize": "Input_Size",
            "stride": "Stride",
            "pad": "Padding",
        }
    else:
        names = {"rows": "B", "cols": "H"}
    shape = pd.DataFrame({new: own[old].to_numpy() for new, old in names.items()})
    # A linear layer folds its batch into the rows.
    if family == "linear":
        shape["b"] = 1
    if "rows" in shape:
        shape["n_in"] = 2 if op in _BINARY else 1
    return shape


def vidur_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Convert one of Vidur's ``mlp.csv``: a row for each operator of a layer and token count.

    Times are medians in milliseconds over profiled runs, of one rank under tensor parallelism.

    Raises:
        KeyError: A column is missing.
    """
    tp = table["num_tensor_parallel_workers"]
    gated = table["use_gated_mlp"].astype(str).str.lower().isin(["true", "1"]).to_numpy()
    tokens, width, inner = table["num_tokens"], table["n_embd"], table["n_expanded_embd"] // tp
    heads, kv_heads = table["n_head"] // tp, np.maximum(table["n_kv_head"] // tp, 1)
    head = width // table["n_head"]
    norm = np.where(gated, "rmsnorm", "layernorm")
    shapes: dict[str, tuple[str, object, dict[str, object]]] = {
        "attn_pre_proj": _product((heads + 2 * kv_heads) * head, width),
        "attn_post_proj": _product(width, heads * head),
        # Gate and up projection are one product.
        "mlp_up_proj": _product(inner * np.where(gated, 2, 1), width),
        "mlp_down_proj": _product(width, inner),
        "attn_rope": ("elementwise", "rope", {"cols": (heads + kv_heads) * head, "n_in": 1}),
        "emb": ("elementwise", "embedding", {"cols": width, "n_in": 1}),
        # Without a gate, attention and the network run side by side and are added at once.
        "add": ("elementwise", "add", {"cols": width, "n_in": np.where(gated, 2, 3)}),
        "mlp_act": (
            "elementwise",
            np.where(gated, "silu_and_mul", "gelu"),
            {"cols": inner, "n_in": np.where(gated, 2, 1)},
        ),
        "input_layernorm": ("norm", norm, {"cols": width, "n_in": 1}),
        "post_attention_layernorm": ("norm", norm, {"cols": width, "n_in": 1}),
    }
    parts = []
    for column, (family, op, shape) in shapes.items():
        times = f"time_stats.{column}"
        if f"{times}.median" not in table:
            continue
        rows = "m" if family == "linear" else "rows"
        part = pd.DataFrame({rows: tokens, **shape, "tp": tp, "op": op})
        part["latency_us"] = table[f"{times}.median"] * 1e3
        for name in ("min", "std"):
            if f"{times}.{name}" in table:
                part[f"latency_{name}_us"] = table[f"{times}.{name}"] * 1e3
        parts.append(part.assign(family=family, column=column))
    if not parts:
        raise KeyError("time_stats.attn_pre_proj.median")
    joined = pd.concat(parts, ignore_index=True)
    return joined[joined["latency_us"] > 0].assign(source="vidur", dtype="fp16")


def _product(n: object, k: object) -> tuple[str, object, dict[str, object]]:
    return "linear", "linear", {"b": 1, "n": n, "k": k}


def perf_rows(table: pd.DataFrame, kind: str) -> tuple[pd.DataFrame, int]:
    """Convert one of aiconfigurator's tables; equal shapes become one row with their median.

    Args:
        table: Table as aiconfigurator's collectors write it; latencies are in milliseconds.
        kind: Name of the file without ``_perf``, one of :data:`TABLES`.

    Returns:
        The rows, and how many were of a dtype that opcast does not know.

    Raises:
        KeyError: A column is missing.
    """
    dtype, shape = TABLES[kind]
    raw = table[dtype].astype(str) if dtype else pd.Series("bf16", index=table.index)
    # A latency of zero is not a measurement.
    good = raw.isin(list(DTYPES)).to_numpy() & (table["latency"].to_numpy(np.float64) > 0)
    own = table[good].reset_index(drop=True)
    rows = pd.DataFrame({"dtype": raw[good].map(DTYPES).to_numpy(), **shape(own)}, index=own.index)
    if "kv_cache_dtype" in own:
        rows["kv_dtype"] = own["kv_cache_dtype"].astype(str).map(DTYPES).to_numpy()
    rows["kernel"] = own["kernel_source"].astype(str) if "kernel_source" in own else ""
    rows["family"] = _FAMILY_OF[kind]
    rows["op"] = "quantize_fp8" if kind == "scale_matrix" else rows["family"]
    latency = own["latency"].to_numpy(np.float64) * 1e3
    keys = list(rows.columns)
    # ``dropna=False``: rows without a value in an optional column are shapes as well.
    grouped = rows.assign(latency_us=latency).groupby(keys, sort=False, dropna=False)["latency_us"]
    merged = grouped.median().reset_index()
    return merged.assign(source="aiconfigurator"), int((~raw.isin(list(DTYPES))).sum())


Shape = dict[str, object]


def _gemm(t: pd.DataFrame) -> Shape:
    return {"b": 1, "m": t["m"], "n": t["n"], "k": t["k"]}


def _latent_product(t: pd.DataFrame) -> Shape:
    """Products with the absorbed weights of latent attention: to the latent, or back from it."""
    before = t["op_name"].astype(str).str.endswith("pre").to_numpy()
    wide, narrow = _LATENT["generation"][1], _LATENT["context"][1]
    n, k = np.where(before, wide, narrow), np.where(before, narrow, wide)
    return {"b": t["num_heads"], "m": t["num_tokens"], "n": n, "k": k}


def _attention(causal: int, decode: bool = False) -> Callable[[pd.DataFrame], Shape]:
    def shape(t: pd.DataFrame) -> Shape:
        heads = t["num_heads"]
        kv = t.get("num_key_value_heads", heads)
        width = t.get("head_dim", 128)
        return {
            "batch": t["batch_size"],
            "q_heads": heads,
            # 0 means as many as query heads.
            "kv_heads": kv.where(kv > 0, heads),
            "head_dim": width,
            "v_head_dim": width,
            **_lengths(t, decode),
            "window": t.get("window_size", 0),
            "causal": causal,
        }

    return shape


def _latent(kind: str) -> Callable[[pd.DataFrame], Shape]:
    width, value_width = _LATENT[kind]

    def shape(t: pd.DataFrame) -> Shape:
        heads = t["num_heads"] if "num_heads" in t else _ALL_HEADS // t["tp_size"]
        decode = kind == "generation"
        return {
            "batch": t["batch_size"],
            "q_heads": heads,
            # Decoding reads one latent for all heads; prefill expands it to keys and values.
            "kv_heads": 1 if decode else heads,
            "head_dim": width,
            "v_head_dim": value_width,
            **_lengths(t, decode),
            "window": 0,
            "causal": 1,
        }

    return shape


def _lengths(t: pd.DataFrame, decode: bool) -> Shape:
    """Return query and key lengths: a decoding step attends to the past and to its own token."""
    if not decode:
        return {"q_len": t["isl"], "kv_len": t["isl"]}
    return {"q_len": 1, "kv_len": t["isl"] + t["step"]}


def _moe(t: pd.DataFrame) -> Shape:
    return {
        "tokens": t["num_tokens"],
        "hidden": t["hidden_size"],
        "inter": t["inter_size"],
        "topk": t["topk"],
        "experts": t["num_experts"],
        "tp": t["moe_tp_size"],
        "ep": t["moe_ep_size"],
        "distribution": t["distribution"].astype(str),
    }


def _matrix(t: pd.DataFrame) -> Shape:
    return {"rows": t["m"], "cols": t["k"]}


#: Tables of aiconfigurator that are read: the column of the dtype, and how shapes are spelled.
TABLES: dict[str, tuple[str, Callable[[pd.DataFrame], Shape]]] = {
    "gemm": ("gemm_dtype", _gemm),
    "mla_bmm": ("bmm_dtype", _latent_product),
    "context_attention": ("attn_dtype", _attention(1)),
    "generation_attention": ("attn_dtype", _attention(1, decode=True)),
    "encoder_attention": ("attn_dtype", _attention(0)),
    "context_mla": ("mla_dtype", _latent("context")),
    "generation_mla": ("mla_dtype", _latent("generation")),
    "moe": ("moe_dtype", _moe),
    "scale_matrix": ("", _matrix),
}
_FAMILY_OF = {
    **{kind: kind for kind in TABLES},
    "gemm": "linear",
    "mla_bmm": "bmm",
    "scale_matrix": "quantize",
}
