"""Training tables for Vidur's random forests, for models and devices that were not profiled.

Columns and units (milliseconds) are those that Vidur (https://github.com/microsoft/vidur) reads:
``mlp.csv`` and ``attention.csv`` per device and model, ``all_reduce.csv`` and ``send_recv.csv`` per
network. Every statistic of a time is the prediction; ``std`` is derived from its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import PlanError
from ...common.files import write_text
from ...features.operators.op import Op
from ...models.trust.calibrator import NORMAL_90
from ...simulate.clusters.topology import Cluster
from ...simulate.step.costs import OpLatency
from ...simulate.step.plan import Group
from ...simulate.step.workload import Workload
from ..cluster.network import ClusterNetwork

#: Sizes per octave of the token grid; below this number, all sizes. Engineering estimate.
_PER_OCTAVE = 16
#: Decode batch sizes, and the largest message in bytes (256 MiB: larger ones are bandwidth-bound,
#: so that extrapolation is linear). Engineering estimates.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_MOST_BYTES = 2**28
#: Tokens per block of the paged KV cache.
_BLOCK = 16
#: Alternatives for models whose tables cannot be written.
INSTEAD = (
    "for a mixture of experts use opcast simulate-serving, and for training "
    "opcast export simai or export chakra"
)
# Vidur's published profiles are in fp16.
_DTYPE = "f16"
_WIDTH = 2


def sizes(limit: int, per_octave: int = _PER_OCTAVE) -> list[int]:
    """List integers up to ``limit``: all small ones, then ``per_octave`` per octave."""
    points, at = [], 1
    while at <= limit:
        points.append(at)
        # The step doubles per octave, as errors are relative and latencies close to power laws.
        at += max(1, 2 ** (at.bit_length() - 1) // per_octave)
    return points if points[-1] == limit else [*points, limit]


def mlp_table(
    work: Workload, tensor_parallel: Sequence[int], max_tokens: int, latency: OpLatency
) -> pd.DataFrame:
    """Return ``mlp.csv``: a layer without attention, by tokens and tensor-parallel workers.

    Raises:
        PlanError: Workers do not divide heads, or the model has experts.
    """
    refuse_experts(work, "Vidur's table of layers has")
    check_shards(work, tensor_parallel)
    grid = [(tp, n) for tp in tensor_parallel for n in sizes(max_tokens)]
    calls = [_layer_calls(work, tp, n) for tp, n in grid]
    table = pd.DataFrame(
        {
            "n_head": work.heads,
            "n_kv_head": work.groups,
            "n_embd": work.d_model,
            "n_expanded_embd": work.d_ff,
            "vocab_size": work.vocab,
            "use_gated_mlp": work.gated,
            "num_tokens": [n for _, n in grid],
            "num_tensor_parallel_workers": [tp for tp, _ in grid],
        }
    )
    return pd.concat([_times(calls, latency), table], axis=1)


def attention_table(
    work: Workload,
    tensor_parallel: Sequence[int],
    max_len: int,
    latency: OpLatency,
) -> pd.DataFrame:
    """Return ``attention.csv``: prefill by chunk and cache, decode by batch and cache.

    Raises:
        PlanError: Workers do not divide heads.
    """
    check_shards(work, tensor_parallel)
    chunks = [c for c in sizes(max_len, 4) if c >= _BLOCK]
    prefill = [(c, k, 1) for c in chunks for k in (0, *sizes(max_len, 2)) if c + k <= max_len]
    # One token less than the longest sequence, since decoding appends one.
    caches = [k for k in sizes(max_len - 1, 4) if k >= _BLOCK]
    decode = [(0, k, b) for b in _BATCHES for k in caches]
    grid = [(tp, *point) for tp in tensor_parallel for point in (*prefill, *decode)]
    calls = [_attention_calls(work, *point) for point in grid]
    table = pd.DataFrame(
        grid,
        columns=[
            "num_tensor_parallel_workers",
            "prefill_chunk_size",
            "kv_cache_size",
            "batch_size",
        ],
    )
    table = table.assign(
        n_embd=work.d_model,
        n_q_head=work.heads,
        n_kv_head=work.groups,
        block_size=_BLOCK,
        max_model_len=max_len,
        is_prefill=table["prefill_chunk_size"] > 0,
        # Text of Vidur's enum of attention kernels.
        attention_backend="AttentionBackend.FLASHINFER",
    )
    return pd.concat([_times(calls, latency), table], axis=1)


def collective_table(kind: str, workers: Sequence[int], cluster: Cluster) -> pd.DataFrame:
    """Return ``all_reduce.csv`` or ``send_recv.csv`` with the collective model of steps.

    Args:
        kind: ``all_reduce`` or ``send_recv``.
        workers: Sizes of the group, which consists of the first ranks.
        cluster: The devices and their links.
    """
    per_node = cluster.devices_per_node or cluster.size
    # Below 1 KiB an all-reduce is latency-bound.
    grid = [(n, s) for n in workers for s in sizes(_MOST_BYTES, 4) if s >= 1024]
    network = ClusterNetwork(cluster)
    times = np.array([network(kind, float(s), Group(n, 1)) for n, s in grid]).reshape(-1, 3)
    table = pd.DataFrame(
        {
            "rank": 0,
            "num_workers": [n for n, _ in grid],
            "size": [s for _, s in grid],
            "collective": kind,
            "devices_per_node": [min(n, per_node) for n, _ in grid],
            "max_devices_per_node": per_node,
        }
    )
    return pd.concat([_statistics(kind, times), table], axis=1)


def write_vidur(
    out: Path,
    name: str,
    device: str,
    work: Workload,
    tensor_parallel: Sequence[int],
    max_tokens: int,
    latency: OpLatency,
    cluster: Cluster | None = None,
    progress: Callable[[Path, int], None] = lambda file, rows: None,
) -> dict[str, int]:
    """Write the tables in Vidur's layout; for a model with experts all except ``mlp.csv``.

    Its columns describe one MLP for all tokens, without routing.

    Args:
        out: Folder that replaces Vidur's ``data/profiling``.
        name: Name of the model, such as ``meta-llama/Llama-2-7b-hf``.
        device: Name of the device in Vidur.
        work: The model.
        tensor_parallel: Tensor-parallel degrees.
        max_tokens: Maximum tokens of a batch and of a sequence.
        latency: Latencies of operators on the device.
        cluster: Cluster for network tables; ``None`` to omit them.
        progress: Called with each written file and its number of rows.

    Returns:
        Rows by file.

    Raises:
        PlanError: The model or its sizes do not fit Vidur.
    """
    compute = out / "compute" / device / name
    tables: dict[Path, Callable[[], pd.DataFrame]] = {}
    if not work.experts:
        tables[compute / "mlp.csv"] = lambda: mlp_table(work, tensor_parallel, max_tokens, latency)
    tables[compute / "attention.csv"] = lambda: attention_table(
        work, tensor_parallel, max_tokens, latency
    )
    if cluster is not None:
        network = out / "network" / cluster.name
        # A single worker has nothing to reduce.
        many = [n for n in tensor_parallel if n > 1]
        if many:
            tables[network / "all_reduce.csv"] = lambda: collective_table(
                "all_reduce", many, cluster
            )
        tables[network / "send_recv.csv"] = lambda: collective_table("send_recv", [2], cluster)
    rows = {}
    for path, make in tables.items():
        table = make()
        write_text(path, table.to_csv(index=False))
        rows[str(path.relative_to(out))] = len(table)
        progress(path, len(table))
    return rows


def refuse_experts(work: Workload, whose: str) -> None:
    """Refuse models with experts, for which a simulator's table has no columns.

    Args:
        work: The model.
        whose: Subject and verb of the refusal.

    Raises:
        PlanError: The model has experts.
    """
    if work.experts:
        raise PlanError(f"{whose} no columns for experts", where="workload", hint=INSTEAD)


def check_shards(work: Workload, tensor_parallel: Sequence[int]) -> None:
    """Refuse degrees that do not divide a layer.

    Raises:
        PlanError: Workers do not divide heads.
    """
    for tp in tensor_parallel:
        if tp < 1 or work.heads % tp or work.groups % tp or work.d_ff % tp:
            raise PlanError(
                f"{tp} workers do not divide {work.heads} heads, {work.groups} key-value heads "
                f"and d_ff={work.d_ff}",
                where="workload",
                hint="choose others with --tp",
            )


def _layer_calls(work: Workload, tp: int, tokens: int) -> dict[str, Op]:
    """Return the operators of a layer by Vidur's names."""
    d, heads, groups, inner = work.d_model, work.heads // tp, work.groups // tp, work.d_ff // tp
    # Gate and up projections are one product; ``matrices`` counts the down projection as well.
    wide = inner * (work.matrices - 1)
    act = "silu_and_mul" if work.gated else "gelu"

    def linear(n: int, k: int) -> Op:
        return Op("linear", (tokens, n, k), _DTYPE)

    def rows(op: str, cols: int) -> Op:
        return Op(op, (tokens, cols), _DTYPE)

    return {
        # A gather: each row of the table is read and written once.
        "emb": Op("move", (2 * _WIDTH * tokens * d,), _DTYPE),
        "input_layernorm": rows(work.norm, d),
        "attn_pre_proj": linear((heads + 2 * groups) * work.head, d),
        "attn_rope": rows("rope", (heads + groups) * work.head),
        "attn_post_proj": linear(d, heads * work.head),
        "post_attention_layernorm": rows(work.norm, d),
        "mlp_up_proj": linear(wide, d),
        "mlp_act": rows(act, wide),
        "mlp_down_proj": linear(d, inner),
        "add": rows("add", d),
    }


def _attention_calls(work: Workload, tp: int, chunk: int, cache: int, batch: int) -> dict[str, Op]:
    """Return attention itself, and the write of new keys and values."""
    heads, groups, new = work.heads // tp, work.groups // tp, chunk or 1
    shape = (batch, heads, groups, work.head, work.head, new, new + cache, 1)
    name = "attn_prefill" if chunk else "attn_decode"
    # Keys and values, each read once and written once into the paged cache.
    saved = 2 * 2 * _WIDTH * batch * new * groups * work.head
    return {
        name: Op("attention", shape, _DTYPE),
        "attn_kv_cache_save": Op("move", (saved,), _DTYPE),
    }


def _times(calls: Sequence[dict[str, Op]], latency: OpLatency) -> pd.DataFrame:
    """Return statistics of all operators; empty where a row has no such operator."""
    # Many rows share an operator; each distinct one is predicted once, in a single call.
    unique = list(dict.fromkeys(c for row in calls for c in row.values()))
    said = dict(zip(unique, latency(unique), strict=True))
    parts = []
    for name in dict.fromkeys(n for row in calls for n in row):
        times = np.array([said[row[name]] if name in row else [np.nan] * 3 for row in calls])
        parts.append(_statistics(name, times))
    return pd.concat(parts, axis=1)


def _statistics(name: str, times: np.ndarray) -> pd.DataFrame:
    """Return columns of an operator from seconds with interval bounds, shape ``(n, 3)``."""
    # Milliseconds, Vidur's unit.
    middle, lo, hi = times.T * 1e3
    table = {f"time_stats.{name}.{s}": middle for s in ("min", "max", "mean", "median")}
    return pd.DataFrame({**table, f"time_stats.{name}.std": (hi - lo) / (2 * NORMAL_90)})
