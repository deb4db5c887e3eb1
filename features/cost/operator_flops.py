"""FLOPs of operators that no HLO op expresses: fused attention, experts, gradients, products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Inner width, experts of a token and experts of models without a gate, whose activation is a
#: squared ReLU: Nemotron 3 (``mlp_hidden_act`` of their configurations).
UNGATED = ((1856, 6, 128), (2688, 22, 512), (5120, 22, 512))


def ungated(inner: float, topk: float, experts: float, kernel: str) -> bool:
    """Whether an expert has two matrices instead of three.

    TensorRT-LLM's kernels show it in their name. Where other libraries call them (``trtllm`` in the
    name), the sizes of the model tell. Other kernels are estimated as gated ones whatever they do:
    some of them compute a gate for these models all the same, and models of operators learn which.

    Args:
        inner: Width of an expert.
        topk: Experts of a token.
        experts: Of the layer.
        kernel: Name of the kernel, empty if unknown.
    """
    known = (inner, topk, experts) in UNGATED
    return "nongated" in kernel or (known and "trtllm" in kernel)


def op_flops(params: Mapping[str, Any]) -> float:
    """Count the FLOPs of one execution from what :func:`read_op` gives; 0 for other operators.

    Products count two for each pair of operands, gradients of convolutions as many as the
    convolution itself, padding included. Attention counts two products over the visible pairs of
    queries and keys, experts their two or three matrices over every routed row.
    """
    if "trans_a" in params:
        return float(2 * params["b"] * params["m"] * params["n"] * params["k"])
    if "stride_h" in params:
        return _convolution(params)
    if "head_dim" in params:
        return _attention(params)
    if "topk" in params:
        rows = params["tokens"] * params["topk"] / params["ep"]
        # A gated expert has a gate, an up and a down projection, any other one up and down.
        sizes = params["inter"], params["topk"], params["experts"]
        matrices = 2 if ungated(*sizes, params.get("kernel", "")) else 3
        return float(2 * rows * params["hidden"] * params["inter"] / params["tp"] * matrices)
    return 0.0


def _attention(params: Mapping[str, Any]) -> float:
    q_len, kv_len = params["q_len"], params["kv_len"]
    reach = params["window"] or kv_len
    if params["causal"] and not params["family"].startswith("generation"):
        first = kv_len - q_len + 1
        # As operators/attention/estimate.py: visible_pairs, for one row of plain numbers.
        growing = min(max(reach - first + 1, 0), q_len)
        pairs = growing * (2 * first + growing - 1) / 2 + (q_len - growing) * reach
    else:
        pairs = q_len * min(kv_len, reach)
    width = params["head_dim"] + params["v_head_dim"]
    return float(2 * params["batch"] * params["q_heads"] * pairs * width)


def _convolution(params: Mapping[str, Any]) -> float:
    taps, places = 1, 1
    for axis in "dhw":
        reach = (params[f"k{axis}"] - 1) * params[f"dil_{axis}"] + 1
        inside = params[axis] + 2 * params[f"pad_{axis}"]
        places *= max((inside - reach) // params[f"stride_{axis}"] + 1, 1)
        taps *= params[f"k{axis}"]
    pairs = params["c"] * params["k"] / params["groups"]
    return float(2 * params["n"] * places * taps * pairs)
