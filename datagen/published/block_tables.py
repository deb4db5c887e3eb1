"""Reads the kernel pack's tables of attention and experts, of layers, and of new attention.

Their rows become operators of the families in :data:`~opcast.features.operators.schema.BLOCKS`.
Sizes that a table gives only by a model's name are filled in from the model's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.operators.schema import BLOCKS
from .packs import BLOCK_TABLES, doubted, kind_of, numbers, pack_data

#: Width of a shared expert if the table gives none, and of the feed-forward layer of Llama 8B.
_SHARED, _LLAMA_INNER = 512, 14336


def block_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Convert a table to operators of blocks.

    Args:
        table: ``attention_moe``, ``layers`` or ``new_attention`` of the kernel pack, with or
            without latencies.

    Returns:
        ``id``, ``key``, ``device``, ``dtype``, ``kv_dtype``, ``op``, ``backend``, ``kernel`` (with
        the method), ``distribution`` (formats and scales; the model for layers), the families'
        parameters, ``split`` and ``latency_us`` if present, and ``suspect`` (whether the
        publishers doubt the row).

    Raises:
        DatasetError: The columns match none of the tables.
        KeyError: A column is missing.
    """
    readers = dict(zip(BLOCK_TABLES, (_attention_moe, _layers, _new_attention), strict=True))
    read = readers.get(kind_of(table.columns))
    if read is None:
        raise DatasetError("is no table of attention, experts, layers or new attention")
    rows = pd.DataFrame(index=range(len(table)))
    given = table["id"].astype(str) if "id" in table else pd.Series(range(len(table))).astype(str)
    rows["id"] = given.to_numpy(object)
    for column in ("device", "dtype", "op", "backend", "kv_dtype"):
        rows[column] = _texts(table, column)
    rows["method"] = _texts(table, "method")
    for column in ("split", "latency_us"):
        if column in table:
            rows[column] = table[column].to_numpy()
    rows = read(table.reset_index(drop=True), rows)
    rows["suspect"] = doubted(table)
    return rows


def training_blocks(paths: Iterable[Path]) -> pd.DataFrame:
    """Rows of the tables that a model may learn from: known devices, no doubted labels.

    Raises:
        DatasetError: A file cannot be read, or is none of the tables.
    """
    from ...common.parquet import read_table
    from ...features.devices.catalogue import find_device, in_catalogue

    parts = []
    for path in paths:
        rows = block_rows(read_table(path))
        known = {name: in_catalogue(name) for name in rows["device"].unique()}
        # Half of the layers that a TPU's compiler merges are doubted row by row, and the rest may
        # be wrong as well (README of the kernel pack, trap 4); they stay, since queries ask for
        # them.
        good = ~rows["suspect"] & (rows["key"] != "") & (rows["latency_us"] > 0)
        rows = rows[good & rows["device"].map(known)]
        parts.append(rows.assign(device=rows["device"].map(lambda name: find_device(name).name)))
    return pd.concat(parts, ignore_index=True)


def _attention_moe(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    experts = (table["family"] == "moe").to_numpy()
    rows["key"] = np.where(experts, "layer/experts", "batch/attention")
    # Which of hundreds of kernels was fastest is known only after they have run.
    rows["kernel"] = rows["method"]
    rows["op"] = np.where(experts, rows["op"], table["family"].astype(str))
    rows["distribution"] = _texts(table, "detail")
    for column in BLOCKS["batch/attention"]:
        rows[column] = numbers(table, column)
    for column in BLOCKS["layer/experts"]:
        rows[column] = numbers(table, column, 1.0 if column in ("ep", "topk") else 0.0)
    spread: pd.Series = rows["tokens"] * rows["topk"] / np.maximum(rows["ep"], 1)
    rows["routed"] = np.where(rows["routed"] > 0, rows["routed"], spread)
    return rows


def _layers(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    layer = table["layer"].astype(str)
    hidden, heads, groups, width = (
        _of_models(table, "dense")[c].to_numpy() for c in ("hidden", "heads", "groups", "width")
    )
    tp = numbers(table, "tp", 1.0)
    tokens = numbers(table, "tokens")
    columns = {
        "attn_pre_proj": ((heads + 2 * groups) * width / tp, hidden),
        "attn_post_proj": (hidden, heads * width / tp),
        "share_expert_up_proj": (2 * _SHARED / tp, hidden),
        "share_expert_down_proj": (hidden, _SHARED / tp),
        "sum:q+o+gate+up+down": ((2 * hidden + 3 * _LLAMA_INNER) / tp, hidden),
        "sum:up+down": (np.full(len(tp), 2 * _LLAMA_INNER) / tp, hidden),
    }
    n, k, m = (numbers(table, c) for c in ("n", "k", "m"))
    for name, (wide, deep) in columns.items():
        lacking = (layer == name).to_numpy() & (n == 0)
        n, k = np.where(lacking, wide, n), np.where(lacking, deep, k)
    product = (n > 0) & (k > 0)
    rows["key"] = np.where(product, "layer/product", "layer/pass")
    rows["op"], rows["kernel"] = layer.to_numpy(object), rows["method"]
    # A norm is one kernel in some models and five in others, whatever its width.
    rows["distribution"] = _texts(table, "model")
    rows["m"], rows["n"], rows["k"] = np.where(m > 0, m, tokens), np.ceil(n), np.ceil(k)
    wide = np.where(layer == "attn_rope", (heads + groups) * width / tp, hidden)
    cols = numbers(table, "cols")
    rows["cols"] = np.ceil(np.where(cols > 0, cols, wide))
    own = numbers(table, "rows")
    rows["rows"] = np.where(own > 0, own, tokens)
    return rows


def _new_attention(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    family = table["family"].astype(str)
    scan = family.isin(["gdn", "kda", "mamba2"]).to_numpy()
    mixed = (family == "mhc").to_numpy()
    rows["key"] = np.where(scan, "graph/scan", np.where(mixed, "graph/streams", "graph/sparse"))
    rows["op"] = (_texts(table, "op") + " " + _texts(table, "phase")).astype(object)
    rows["op"] = rows["op"].where(rows["key"] != "graph/sparse", family + " " + rows["op"])
    rows["kernel"] = _texts(table, "kernel")
    formats = (_texts(table, "gemm_dtype") + " " + _texts(table, "score_mode")).astype(object)
    rows["distribution"] = pd.Series(formats).str.strip().to_numpy(object)
    for name, values in _of_models(table, "sparse").items():
        rows[name] = values
    _only_stages(rows, family.to_numpy(object))
    heads = numbers(table, "num_heads")
    rows["batch"] = numbers(table, "batch", 1.0)
    rows["heads"], rows["q_len"] = heads, numbers(table, "q_len")
    rows["kv_history"] = numbers(table, "kv_history")
    rows["ratio"] = numbers(table, "compress_ratio", 1.0)
    # MiniMax-M3 shares keys among 16 query heads, the others among all of a rank.
    rows["groups"] = np.where(family == "msa", np.maximum(heads / 16, 1), 1.0).round()
    mamba = (family == "mamba2").to_numpy()
    for column, own, other in (
        ("key_heads", "num_k_heads", "n_groups"),
        ("key_dim", "head_k_dim", "d_state"),
        ("value_heads", "num_v_heads", "num_heads"),
        ("value_dim", "head_v_dim", "head_dim"),
    ):
        rows[column] = np.where(mamba, numbers(table, other), numbers(table, own))
    tokens, length = numbers(table, "num_tokens"), numbers(table, "seq_len")
    rows["seq_len"] = np.where(length > 0, length, np.ceil(tokens / rows["batch"]))
    rows["chunk"] = numbers(table, "chunk_size")
    rows["rows"], rows["cols"] = tokens, numbers(table, "hidden")
    rows["copies"] = numbers(table, "hc_mult", 1.0)
    return rows


def _only_stages(rows: pd.DataFrame, family: np.ndarray) -> None:
    """Clear the sizes of stages that a single kernel does not compute; HCA has no indexer."""
    op = rows["op"].astype(str).to_numpy(object)
    says = [
        ("logits" in f, "attn" in f, "skip_indexer" in o) for f, o in zip(family, op, strict=True)
    ]
    logits, attends, skips = np.array(says, bool).reshape(-1, 3).T
    unprojected = logits | attends
    dense = np.array(["hca" in f for f in family], bool)
    rows.loc[unprojected, ["shared_weights", "head_weights"]] = 0.0
    rows.loc[attends | skips | dense, "index_heads"] = 0.0
    rows.loc[logits, "chosen"] = 0.0
    # All compressed keys are visible: more than any history has.
    rows.loc[dense, "chosen"] = 2.0**30


def _of_models(table: pd.DataFrame, what: str) -> pd.DataFrame:
    """Sizes of each row's model: ``sparse`` or ``dense`` of ``packs.yaml``."""
    known = pack_data()[what]
    code, names = pd.factorize(_texts(table, "model"))
    found = [next(own for part, own in known.items() if part in str(n).lower()) for n in names]
    sizes = pd.DataFrame(found, columns=list(known[""]), dtype=np.float64)
    return sizes.iloc[code].reset_index(drop=True)


def _texts(table: pd.DataFrame, column: str) -> np.ndarray:
    if column not in table:
        return np.full(len(table), "", object)
    return table[column].astype(object).fillna("").astype(str).to_numpy(object)
