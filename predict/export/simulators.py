"""Files of simulators that need times of layers or rates of a machine.

- LLMServingSim (https://github.com/casys-kaist/LLMServingSim): ``layers.csv`` of a model on a
  device, one row per layer and number of tokens, in nanoseconds.
- SimAI (https://github.com/aliyun/SimAI): a workload in AICB's text format, one line per layer and
  pass, in nanoseconds.
- Calculon (https://github.com/calculon-ai/calculon): a system's JSON, with efficiencies by size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...common.errors import PlanError
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from ...simulate.clusters.topology import Cluster
from ...simulate.step.costs import CommCall, OpLatency
from ...simulate.step.layer_ops import PassOps, embedding_ops, head_ops, layer_ops
from ...simulate.step.plan import Group, Plan, resolved
from ...simulate.step.traffic import (
    expert_calls,
    gradient_bytes,
    layer_held,
    table_held,
    tensor_calls,
)
from ...simulate.step.workload import Workload, layer_kinds
from ..cluster.network import ClusterNetwork
from .vidur import check_shards, refuse_experts, sizes

#: Columns of LLMServingSim's layer table.
LAYER_COLUMNS = ("layer_name", "input", "kv_cache", "tp_size", "latency(ns)")
#: Values that AICB writes for every item.
_NO_DEPENDENCY, _PROCESS_TIME = -1, 100
#: Calculon's thresholds in GFLOP of a product, and in MB of a pass, in descending order (as in its
#: own systems); the last one covers everything smaller.
GFLOPS, MEGABYTES = (1000.0, 128.0, 16.0, 1.0, 0.0), (1000.0, 100.0, 10.0, 1.0, 0.0)
#: Size that represents the smallest ones, and bytes of a bandwidth-bound collective.
_SMALL, _LARGE_BYTES = 0.1, 2**28
#: Calculon's collectives, with opcast's names.
_NETWORK_OPS = {
    "p2p": "send_recv",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
}

#: A layer's operator from model, tensor-parallel degree and tokens.
_Layer = Callable[[Workload, int, int], Op]


def _linear(n: Callable[[Workload, int], int], k: Callable[[Workload, int], int]) -> _Layer:
    return lambda w, tp, t: Op("linear", (t, n(w, tp), k(w, tp)), w.dtype)


def _rows(op: str, cols: Callable[[Workload, int], int]) -> _Layer:
    return lambda w, tp, t: Op(op or w.norm, (t, cols(w, tp)), w.dtype)


def _attention(w: Workload, tp: int, tokens: int) -> Op:
    shape = (1, w.heads // tp, max(1, w.groups // tp), w.head, w.head, tokens, tokens, 1)
    return Op("attention", shape, w.dtype)


#: LLMServingSim's layers of a decoder, in its order.
LAYERS: dict[str, _Layer] = {
    "embedding": lambda w, tp, t: Op("move", (2 * w.width * t * w.d_model,), w.dtype),
    "input_layernorm": _rows("", lambda w, tp: w.d_model),
    "q_proj": _linear(lambda w, tp: w.heads // tp * w.head, lambda w, tp: w.d_model),
    "k_proj": _linear(lambda w, tp: w.groups // tp * w.head, lambda w, tp: w.d_model),
    "v_proj": _linear(lambda w, tp: w.groups // tp * w.head, lambda w, tp: w.d_model),
    "rope": _rows("rope", lambda w, tp: (w.heads + w.groups) // tp * w.head),
    "attn": _attention,
    "o_proj": _linear(lambda w, tp: w.d_model, lambda w, tp: w.heads // tp * w.head),
    "post_layernorm": _rows("", lambda w, tp: w.d_model),
    "gate_proj": _linear(lambda w, tp: w.d_ff // tp, lambda w, tp: w.d_model),
    "up_proj": _linear(lambda w, tp: w.d_ff // tp, lambda w, tp: w.d_model),
    "act_fn": _rows("silu_and_mul", lambda w, tp: w.d_ff // tp),
    "down_proj": _linear(lambda w, tp: w.d_model, lambda w, tp: w.d_ff // tp),
    "final_layernorm": _rows("", lambda w, tp: w.d_model),
    "lm_head": _linear(lambda w, tp: -(-w.vocab // tp), lambda w, tp: w.d_model),
}


def llmservingsim_layers(
    work: Workload, tensor_parallel: Sequence[int], max_tokens: int, latency: OpLatency
) -> pd.DataFrame:
    """Return LLMServingSim's ``layers.csv``: columns :data:`LAYER_COLUMNS`, in nanoseconds.

    Args:
        work: A decoder with gated feed-forward layers.
        tensor_parallel: Tensor-parallel degrees.
        max_tokens: Maximum tokens of a batch.
        latency: Latencies of operators on the device.

    Raises:
        PlanError: Workers do not divide heads, or the model has experts or no gate.
    """
    refuse_experts(work, "LLMServingSim's table of layers has")
    check_shards(work, tensor_parallel)
    if not work.gated:
        raise PlanError("LLMServingSim's layers need a gate", where="workload", hint="gated=true")
    grid = [(tp, t, name) for tp in tensor_parallel for t in sizes(max_tokens) for name in LAYERS]
    calls = [LAYERS[name](work, tp, tokens) for tp, tokens, name in grid]
    seconds = _seconds(calls, latency)
    return pd.DataFrame(
        {
            "layer_name": [name for _, _, name in grid],
            "input": [tokens for _, tokens, _ in grid],
            # New sequences: cached tokens are in the attention tables, which have Vidur's format.
            "kv_cache": 0,
            "tp_size": [tp for tp, _, _ in grid],
            "latency(ns)": np.maximum(1, np.round(seconds * 1e9)).astype(np.int64),
        },
        columns=list(LAYER_COLUMNS),
    )


def simai_workload(work: Workload, plan: Plan, devices: int, latency: OpLatency) -> str:
    """Return SimAI's workload of a training step: AICB's text, a line per layer and micro-batch.

    A line has one collective per pass: a layer's two all-reduces of activations become one of twice
    the bytes, and sequence parallelism, which moves as many bytes, counts as all-reduces. The two
    all-to-alls of a layer with experts are combined in a separate line.

    Args:
        work: The model.
        plan: Tensor, data and expert parallelism.
        devices: Devices of the cluster.
        latency: Latencies of operators on the device.

    Raises:
        PlanError: The plan has other axes, or does not fit the model or the cluster.
    """
    plan = resolved(work, replace(plan, sp=False), devices)
    if plan.changed(tp=1, dp=1, ep=1, microbatches=0) != Plan(sp=False):
        raise PlanError(
            "SimAI's workload supports only tensor, data and expert parallelism",
            where=f"plan {plan.text()}",
            hint="use only tp, dp, ep and microbatches",
        )
    known = {kind: _layer_items(kind, plan, latency) for kind in dict.fromkeys(layer_kinds(work))}
    table = _gradients(table_held(work, plan).trained(work).total, work, plan)
    first, head = (
        [_item(name, ops, latency), _item(name, ops, latency, reduced=reduced)]
        for name, ops, reduced in (
            ("embedding_layer", embedding_ops(work, plan), table),
            # A tied head has no parameters to reduce.
            ("head_layer", head_ops(work, plan), _NOTHING if work.tied else table),
        )
    )
    lines = []
    count = max(1, plan.microbatches)
    for step in range(count):
        # Gradients are reduced once, with the last micro-batch.
        last = step == count - 1
        layers = [line for kind in layer_kinds(work) for line in known[kind][last]]
        lines += [first[last], *layers, head[last]]
    title = (
        f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {plan.tp} ep: {plan.ep} pp: 1 "
        f"vpp: {work.layers} ga: {count} all_gpus: {devices} checkpoints: 0 "
        "checkpoint_initiates: 0 pp_comm: 0"
    )
    return "\n".join([title, str(len(lines)), *lines]) + "\n"


def calculon_system(cluster: Cluster, spec: DeviceSpec, latency: OpLatency) -> dict[str, object]:
    """Return Calculon's system of a cluster: data-sheet rates with predicted efficiencies.

    Args:
        cluster: The cluster; nodes are one network, the whole cluster the other.
        spec: Device of the cluster.
        latency: Latencies of operators on the device.
    """
    peak = spec.matrix_peak("bf16")
    # Square products with as many FLOPs, with sides in multiples of 64.
    sides = [max(64, round((max(g, _SMALL) * 1e9 / 2) ** (1 / 3) / 64) * 64) for g in GFLOPS]
    products = _seconds([Op("linear", (s, s, s), "bf16") for s in sides], latency)
    matrix = [min(1.0, 2 * s**3 / t / peak) for s, t in zip(sides, products, strict=True)]
    moved = [max(m, _SMALL) * 1e6 for m in MEGABYTES]
    passes = _seconds([Op("move", (int(b),), "bf16") for b in moved], latency)
    memory = [min(1.0, b / t / spec.bandwidth) for b, t in zip(moved, passes, strict=True)]
    box = cluster.box or cluster.size
    levels = [n for n in dict.fromkeys((box, cluster.size)) if n > 1]
    return {
        "matrix": _engine(peak, GFLOPS, matrix),
        # Passes are memory-bound and never reach the vector units' rate.
        "vector": _engine(spec.vector_peak("bf16"), (0.0,), [1.0]),
        "mem1": _memory(spec.memory_bytes, spec.bandwidth, MEGABYTES, memory),
        # Host memory is not described.
        "mem2": _memory(0.0, spec.host_link, (0.0,), [1.0]),
        "processing_mode": "roofline",
        "networks": [_network(cluster, n, n == box) for n in levels],
    }


def _engine(rate: float, at: Sequence[float], shares: Sequence[float]) -> dict[str, object]:
    pairs = [[size, round(share, 4)] for size, share in zip(at, shares, strict=True)]
    return {"tflops": rate / 1e12, "gflops_efficiency": {"float16": pairs}}


def _memory(
    capacity: float, rate: float, at: Sequence[float], shares: Sequence[float]
) -> dict[str, object]:
    pairs = [[size, round(share, 4)] for size, share in zip(at, shares, strict=True)]
    return {"GiB": capacity / 2**30, "GBps": rate / 1e9, "MB_efficiency": pairs}


def _network(cluster: Cluster, size: int, box: bool) -> dict[str, object]:
    """Return one level of the network, with each collective's scalar from its predicted time.

    Calculon fills nodes by tensor parallelism and uses the network between ranks of different
    nodes, each with its own port, so outer collectives involve one device per node. Calculon's time
    is ``latency + bytes · scalar · (1 + offset / n) / (bandwidth · efficiency)``.
    """
    time = ClusterNetwork(cluster)
    dims = [d.bandwidth for d in cluster.topology.dims]
    bandwidth = max(dims) if box else min(dims)
    # Neighbours in a node, or the first devices of two nodes.
    pair = Group(2, 1 if box else cluster.box or 1)
    ranks = Group(size, 1) if box else Group(size // pair.stride, pair.stride)
    start = time("send_recv", 8.0, pair).value
    ops: dict[str, list[float | None]] = {}
    for name, kind in _NETWORK_OPS.items():
        alone = name == "p2p"
        seconds = time(kind, float(_LARGE_BYTES), pair if alone else ranks).value
        moved = _LARGE_BYTES * (1.0 if alone else 1.0 - 1.0 / ranks.size)
        scalar = max(seconds - start, 1e-9) * bandwidth / moved
        # Offset -1: a device keeps its own of n shares.
        ops[name] = [round(scalar, 4), None if alone else -1.0]
    return {
        "bandwidth": bandwidth / 1e9,
        # Lost bandwidth is part of each collective's scalar.
        "efficiency": 1.0,
        "size": size,
        "latency": start,
        "ops": ops,
        "must_be_filled": box and size < cluster.size,
        "processor_usage": 0.0,
    }


def _layer_items(work: Workload, plan: Plan, latency: OpLatency) -> tuple[list[str], list[str]]:
    """Return the lines of a layer in a micro-batch without gradient reduction, and in the last one.

    A layer with experts has a second line with the exchange of tokens.
    """
    ops, wide = layer_ops(work, plan), gradient_bytes(work, plan)
    held = layer_held(work, plan).trained(work)
    gradients = _gradients(held.dense, work, plan)
    sent = _Sent("ALLREDUCE", _sum_bytes(tensor_calls(work, plan)))
    swapped = _Sent("ALLTOALL_EP", _sum_bytes(expert_calls(work, plan)))
    lines: tuple[list[str], list[str]] = ([], [])
    for last, own in enumerate(lines):
        dense = gradients if last else _NOTHING
        own.append(_item("transformer_layer", ops, latency, sent, dense))
        # Expert gradients are reduced over dp / ep ranks.
        copies = last and plan.dp > plan.ep
        experts = _Sent("ALLREDUCE_DP_EP", int(held.expert * wide) if copies else 0)
        if swapped.size or experts.size:
            own.append(_item("mlp_moelayer", PassOps(()), latency, swapped, experts))
    return lines


class _Sent(NamedTuple):
    """A collective of a line: AICB's name, which implies the group, and bytes; 0 for none."""

    kind: str = "NONE"
    size: int = 0

    def words(self) -> tuple[str, int]:
        return (self.kind if self.size else "NONE"), self.size


_NOTHING = _Sent()


def _gradients(held: float, work: Workload, plan: Plan) -> _Sent:
    """Return the gradient all-reduce of parameters that every data-parallel rank holds."""
    return _Sent("ALLREDUCE", int(held * gradient_bytes(work, plan)) if plan.dp > 1 else 0)


def _item(
    name: str,
    ops: PassOps,
    latency: OpLatency,
    sent: _Sent = _NOTHING,
    reduced: _Sent = _NOTHING,
) -> str:
    forward, backward, weights = (
        max(1, round(float(_seconds(calls, latency).sum()) * 1e9)) if calls else 1
        for calls in (ops.forward, ops.backward, ops.weights)
    )
    values = (
        *(name, _NO_DEPENDENCY, forward, *sent.words(), backward, *sent.words()),
        *(weights, *reduced.words(), _PROCESS_TIME),
    )
    return "\t".join(map(str, values))


def _sum_bytes(calls: Sequence[CommCall]) -> int:
    return int(sum(call.size * call.times for call in calls))


def _seconds(calls: Sequence[Op], latency: OpLatency) -> np.ndarray:
    """Return the seconds of operators, scales included, shape ``(n,)``."""
    unique = list(dict.fromkeys(calls))
    said = dict(zip(unique, np.asarray(latency(unique))[:, 0], strict=True))
    return np.array([said[call] for call in calls])
