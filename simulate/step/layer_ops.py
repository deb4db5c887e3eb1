"""The operators of one device: those of a layer, of both ends of the model, and of the update.

Shapes are those of one rank and one micro-batch. Backward passes: a product has two of the same
size (for its input and its weights); fused attention has five products where the forward pass has
two (Dao, FlashAttention-2, ICLR 2024); norms and activations move at least half as much again.
"""

from __future__ import annotations

from dataclasses import dataclass

from .calls import OpCall
from .plan import Plan
from .workload import Workload

# Time of a backward pass over the forward pass, for operators whose measured tables hold forward
# kernels alone.
#: Five products instead of two, at a rate a sixth lower: 2.5 / (5/6) (the rate is an engineering
#: estimate; not fitted).
ATTENTION_BACKWARD = 3.0
#: Bound by memory: input and gradient read, one gradient written, against one read and one write.
NORM_BACKWARD = 1.5
#: Of a gated activation: gate, product and gradient read, two gradients written, against three
#: tensors forward. Used for GELU as well, whose own ratio is 3/2.
ACTIVATION_BACKWARD = 5.0 / 3.0
#: Each grouped product has two of its size, for inputs and for weights.
EXPERTS_BACKWARD = 2.0
#: Bytes of optimiser traffic per parameter, Adam in mixed precision: gradient, master weight and
#: two moments read in f32 (16), the last three written (12), and the weight in 16 bits (2).
UPDATE_BYTES = 30


@dataclass(frozen=True)
class PassOps:
    """Operators of a part of a model.

    Attributes:
        forward: Operators of the forward pass, in order.
        backward: Operators of the backward pass, in order, without ``weights``.
        weights: Operators that only make gradients of weights, which zero-bubble schedules move.
        selective: Operators that ``recompute=selective`` runs again.
    """

    forward: tuple[OpCall, ...]
    backward: tuple[OpCall, ...] = ()
    weights: tuple[OpCall, ...] = ()
    selective: tuple[OpCall, ...] = ()


def micro_tokens(workload: Workload, plan: Plan) -> int:
    """Return the tokens of a micro-batch on one device."""
    sequences = workload.batch // plan.batch_ranks // max(1, plan.microbatches)
    return sequences * workload.seq // plan.cp


def layer_ops(workload: Workload, plan: Plan) -> PassOps:
    """List the operators of one layer on one device, for one micro-batch."""
    parts = [_attention(workload, plan), _feed_forward(workload, plan)]
    return PassOps(
        forward=tuple(c for p in parts for c in p.forward),
        backward=tuple(c for p in reversed(parts) for c in p.backward),
        weights=tuple(c for p in reversed(parts) for c in p.weights),
        selective=tuple(c for p in parts for c in p.selective),
    )


def embedding_ops(workload: Workload, plan: Plan) -> PassOps:
    """List the token embedding: rows gathered, their gradients added in f32."""
    tokens = micro_tokens(workload, plan)
    size = tokens * workload.d_model
    # Forward reads and writes a row per token. Backward reads its gradient and adds it into the
    # table in f32: one read and one write of 4 bytes.
    forward = OpCall("embedding", "move", (2 * workload.width * size,), workload.dtype)
    backward = OpCall("embedding", "move", ((workload.width + 8) * size,), workload.dtype)
    return PassOps((forward,), (backward,))


def head_ops(workload: Workload, plan: Plan) -> PassOps:
    """List the last norm, vocabulary projection and cross-entropy (softmax in f32)."""
    tokens = micro_tokens(workload, plan)
    # Masked-language models project only the masked positions.
    seen = max(1, round(tokens * workload.head_share))
    # Rounded up: vocabularies are padded to a multiple of the tensor-parallel degree.
    vocab = -(-workload.vocab // plan.tp)
    head = _product("head", seen, vocab, workload.d_model, workload.dtype)
    norm = _norm("norm_head", workload, plan, tokens)
    # Two passes over the logits in the model's type and two over their softmax in f32; backward
    # reads the softmax and writes the gradient of the logits.
    loss = OpCall("loss", "move", ((2 * workload.width + 8) * seen * vocab,), workload.dtype)
    back = OpCall("loss", "move", ((workload.width + 4) * seen * vocab,), workload.dtype)
    return PassOps(
        (*norm.forward, *head.forward, loss), (back, *head.backward, *norm.backward), head.weights
    )


def update_ops(local_parameters: float, workload: Workload) -> tuple[OpCall, ...]:
    """List the optimiser's pass over the parameters that a device updates."""
    if workload.mode != "train" or local_parameters <= 0:
        return ()
    return (OpCall("update", "move", (round(UPDATE_BYTES * local_parameters),), workload.dtype),)


def _product(name: str, m: int, n: int, k: int, dtype: str) -> PassOps:
    """``(m, k) × (k, n)`` with the two products of its backward pass."""
    return PassOps(
        (OpCall(name, "linear", (m, n, k), dtype),),
        (OpCall(f"{name}_dx", "linear", (m, k, n), dtype),),
        (OpCall(f"{name}_dw", "linear", (n, k, m), dtype),),
    )


def _norm(name: str, workload: Workload, plan: Plan, tokens: int) -> PassOps:
    # Sequence parallelism splits norms and residuals along the tokens (Korthikanti et al.).
    rows = -(-tokens // plan.sequence_parallel)
    call = OpCall(name, workload.norm, (rows, workload.d_model), workload.dtype)
    back = OpCall(f"{name}_dx", workload.norm, call.shape, workload.dtype, scale=NORM_BACKWARD)
    return PassOps((call,), (back,), selective=(call,))


def _residual(name: str, workload: Workload, plan: Plan, tokens: int) -> OpCall:
    rows = -(-tokens // plan.sequence_parallel)
    return OpCall(name, "add", (rows, workload.d_model), workload.dtype)


def _attention(workload: Workload, plan: Plan) -> PassOps:
    tokens, d, dtype = micro_tokens(workload, plan), workload.d_model, workload.dtype
    heads, dim = workload.heads // plan.tp, workload.head
    # With more tensor-parallel ranks than key-value heads these are replicated, one on each rank.
    groups = max(1, workload.groups // plan.tp)
    norm = _norm("norm1", workload, plan, tokens)
    qkv = _product("qkv", tokens, (heads + 2 * groups) * dim, d, dtype)
    out = _product("out", tokens, d, heads * dim, dtype)
    length = workload.seq // plan.cp
    shape = (tokens // length, heads, groups, dim, length, length, int(workload.causal))
    # With the sequence cut so that all ranks see as many pairs, each of the cp blocks that a rank
    # meets has as many visible pairs as its own (causal), or all of them.
    core = OpCall("attention", "attention", shape, dtype, scale=float(plan.cp))
    back = OpCall("attention_dx", "attention", shape, dtype, plan.cp * ATTENTION_BACKWARD)
    # Queries and keys are rotated, values are not; backward rotates the other way at equal cost.
    rope = OpCall("rope", "rope", (tokens, (heads + groups) * dim), dtype)
    turn = (rope,) if workload.rope else ()
    add = _residual("add1", workload, plan, tokens)
    return PassOps(
        (*norm.forward, *qkv.forward, *turn, core, *out.forward, add),
        (*out.backward, back, *turn, *qkv.backward, *norm.backward),
        (*out.weights, *qkv.weights),
        norm.selective,
    )


def _feed_forward(workload: Workload, plan: Plan) -> PassOps:
    tokens, d, dtype = micro_tokens(workload, plan), workload.d_model, workload.dtype
    norm, add = _norm("norm2", workload, plan, tokens), _residual("add2", workload, plan, tokens)
    if workload.experts:
        return _experts(workload, plan, norm, add)
    inner = workload.d_ff // plan.tp
    # Gate and up projection run as one product, as inference and training frameworks fuse them.
    wide = inner * (workload.matrices - 1)
    up = _product("up", tokens, wide, d, dtype)
    down = _product("down", tokens, d, inner, dtype)
    name = "silu_and_mul" if workload.gated else "gelu"
    act = OpCall("activation", name, (tokens, wide), dtype)
    back = OpCall("activation_dx", name, (tokens, wide), dtype, ACTIVATION_BACKWARD)
    return PassOps(
        (*norm.forward, *up.forward, act, *down.forward, add),
        (*down.backward, back, *up.backward, *norm.backward),
        (*down.weights, *up.weights),
        (*norm.selective, act),
    )


def _experts(workload: Workload, plan: Plan, norm: PassOps, add: OpCall) -> PassOps:
    tokens, dtype = micro_tokens(workload, plan), workload.dtype
    router = _product("router", tokens, workload.experts, workload.d_model, dtype)
    # The operator takes the tokens of its whole expert-parallel group and divides by ``ep`` itself;
    # routing is assumed to be balanced.
    shape = (
        tokens * plan.ep,
        workload.d_model,
        workload.d_ff,
        workload.top_k,
        workload.experts,
        plan.tp,
        plan.ep,
    )
    # The operator has the three matrices of gated experts; plain ones have two.
    scale = 1.0 if workload.gated else 2.0 / 3.0
    experts = OpCall("experts", "moe", shape, dtype, scale)
    # Half of the backward pass makes gradients of weights.
    back = OpCall("experts_dx", "moe", shape, dtype, scale * EXPERTS_BACKWARD / 2)
    weights = OpCall("experts_dw", "moe", shape, dtype, scale * EXPERTS_BACKWARD / 2)
    return PassOps(
        (*norm.forward, *router.forward, experts, add),
        (back, *router.backward, *norm.backward),
        (weights, *router.weights),
        norm.selective,
    )
