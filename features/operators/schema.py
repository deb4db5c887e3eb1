"""Columns, families and timing methods of operator tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


#: Integer parameters by group of families; absent ones are missing values in a table. Heads are
#: those of one rank; ``experts`` and ``inter`` are the whole layer's, of which a rank has
#: ``experts / ep`` of width ``inter / tp``. Samples store parameters by name.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "gemm": ("b", "m", "n", "k"),
    "conv": ("batch", "cin", "cout", "ksize", "insize", "stride", "pad"),
    # The forward problem for every direction, which is the ``op``: ``fwd``, ``bwd_data``,
    # ``bwd_weights``. Sizes of absent dimensions are 1, their padding 0.
    "conv_nd": (
        "ndim",
        "n",
        "c",
        "d",
        "h",
        "w",
        "k",
        "kd",
        "kh",
        "kw",
        "stride_d",
        "stride_h",
        "stride_w",
        "pad_d",
        "pad_h",
        "pad_w",
        "dil_d",
        "dil_h",
        "dil_w",
        "groups",
        "channels_last",
    ),
    # ``trans_a`` and ``trans_b``: whether the reduced dimension of the first operand is outermost,
    # and that of the second innermost; ``preshuffled``: weights stored in the kernel's own order;
    # ``rotated``: whether operands are changed from call to call, so that none is in a cache.
    "tuned_gemm": ("b", "m", "n", "k", "trans_a", "trans_b", "preshuffled", "rotated"),
    "pointwise": ("rows", "cols", "n_in"),
    "attention": (
        "batch",
        "q_heads",
        "kv_heads",
        "head_dim",
        "v_head_dim",
        "q_len",
        "kv_len",
        "window",
        "causal",
    ),
    "moe": ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep"),
}
#: Text parameters.
NAMES = ("op", "family", "dtype", "kv_dtype", "backend", "kernel", "distribution")
#: How a label was taken, by the source of its row. ``eager``: one call between two events, so the
#: launch from the host is inside; ``kernel``: sum of kernel durations; ``graph``: replay of a
#: captured graph, so gaps between its kernels are inside; ``xla``: median over the kernels of ten
#: runs of a product that XLA autotuned, of which a call of two kernels reads as half; ``tuned``:
#: device time of the fastest of a library's kernels, with operands quantised already;
#: ``profiled``: mean by a profiler of what the library itself chose, the same operands.
METHODS = {
    "neusight": "eager",
    "vidur": "kernel",
    "aiconfigurator": "graph",
    "xla": "xla",
    "MIOpen": "tuned",
    "aiter": "tuned",
    "rocBLAS": "tuned",
    "pipeweave": "profiled",
}
#: Group of parameters by (method, family).
FAMILIES: dict[str, str] = {
    "eager/linear": "gemm",
    "eager/bmm": "gemm",
    "eager/conv": "conv",
    "eager/elementwise": "pointwise",
    "eager/softmax": "pointwise",
    "eager/ln": "pointwise",
    "kernel/linear": "gemm",
    "kernel/norm": "pointwise",
    "kernel/elementwise": "pointwise",
    "kernel/bmm": "gemm",
    "kernel/softmax": "pointwise",
    "kernel/context_attention": "attention",
    "kernel/conv": "conv_nd",
    "graph/linear": "gemm",
    "graph/bmm": "gemm",
    "graph/quantize": "pointwise",
    "graph/context_attention": "attention",
    "graph/generation_attention": "attention",
    "graph/encoder_attention": "attention",
    "graph/context_mla": "attention",
    "graph/generation_mla": "attention",
    "graph/moe": "moe",
    "xla/linear": "gemm",
    "xla/bmm": "gemm",
    "tuned/conv": "conv_nd",
    "tuned/linear": "tuned_gemm",
    "tuned/bmm": "tuned_gemm",
    "profiled/linear": "tuned_gemm",
}
#: Families that come from users' traces alone: no shipped model has them, so that a short name
#: without a method never means one.
TRACED = ("kernel/bmm", "kernel/softmax", "kernel/context_attention", "kernel/conv")
#: Families of whole layers and blocks, with their parameters, any of which may be zero. They come
#: from tables alone (datagen/published/block_tables.py) and have no HLO text; source and method of
#: a measurement are among their names, since rows of all methods are learned together.
BLOCKS: dict[str, tuple[str, ...]] = {
    "layer/product": ("m", "n", "k"),
    "layer/pass": ("rows", "cols"),
    "layer/experts": ("tokens", "hidden", "inter", "topk", "experts", "ep", "routed"),
    "batch/attention": (
        *("q_heads", "kv_heads", "head_dim", "batch", "q_len", "kv_prefill"),
        *("n_decode", "kv_decode", "n_decode_big", "kv_decode_big"),
    ),
    "graph/sparse": (
        *("batch", "heads", "q_len", "kv_history", "ratio", "latent", "groups"),
        *("index_heads", "chosen", "window", "shared_weights", "head_weights"),
    ),
    "graph/scan": (
        *("batch", "seq_len", "key_heads", "key_dim"),
        *("value_heads", "value_dim", "chunk"),
    ),
    "graph/streams": ("rows", "cols", "copies"),
}


def parameters_of(family: str) -> tuple[str, ...]:
    """Return the integer parameters of a family.

    Raises:
        KeyError: There is no such family.
    """
    return BLOCKS[family] if family in BLOCKS else PARAMETERS[FAMILIES[family]]


def families_told() -> str:
    """Say for messages which values the columns ``source`` and ``family`` of a table may have."""
    parts = []
    for method in dict.fromkeys(METHODS.values()):
        sources = [source for source, own in METHODS.items() if own == method]
        # As family_keys() reads sources without an entry.
        own_name = " or any name of your own (kernel durations)" if method == "kernel" else ""
        names = [key.split("/")[1] for key in FAMILIES if key.startswith(method + "/")]
        parts.append(f"{', '.join(sources)}{own_name}: {', '.join(names)}")
    return "families by source: " + "; ".join(parts)


def family_keys(frame: pd.DataFrame) -> pd.Series:
    """Return ``method/family`` of each row, from its columns ``source`` and ``family``."""
    # Sources without an entry are users' own tables: profilers report kernel durations.
    method = frame["source"].map(METHODS).fillna("kernel")
    keys: pd.Series = method.astype(str) + "/" + frame["family"].astype(str)
    return keys
