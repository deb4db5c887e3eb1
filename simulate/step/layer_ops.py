"""Operators of one device: those of a layer, of embedding and head, and of the optimiser.

Shapes are those of one rank and one micro-batch. Backward passes: a product has two of the same
size (for its input and its weights); fused attention has five products where the forward pass has
two (Dao, FlashAttention-2, ICLR 2024); norms and activations move at least half as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...features.cost.formats import FORMATS
from ...features.operators.op import QUANTIZED, Op
from ...features.operators.physics import fitted
from .plan import Plan
from .workload import WRITTEN_OUT, Workload

# Ratio of backward to forward time, for operators whose measured tables contain only forward
# kernels.
#: Five products instead of two, at a rate a sixth lower: 2.5 / (5/6), as fused kernels in Triton
#: take on H100 with heads of up to 128 (2.7 to 3.1 times the forward pass: ``vjp`` rows of the
#: kernel pack's ``tpu`` table; kernels written for Hopper take 3.2 to 3.7).
ATTENTION_BACKWARD = 3.0
#: Memory-bound: input and gradient read, one gradient written, against one read and one write.
NORM_BACKWARD = 1.5
#: Gated activation: gate, product and gradient read, two gradients written, against three tensors
#: in the forward pass. Also used for GELU, whose ratio is 3/2.
ACTIVATION_BACKWARD = 5.0 / 3.0
#: Each grouped product has two of its size, for inputs and for weights.
EXPERTS_BACKWARD = 2.0
#: Bytes of optimiser traffic per parameter, Adam in f32: gradient, master weight and two moments
#: read (16), the last three written (12). Narrower parameters are written in addition.
_UPDATE_BYTES = 28


@dataclass(frozen=True)
class PassOps:
    """Operators of a part of a model.

    Attributes:
        forward: Operators of the forward pass, in order.
        backward: Operators of the backward pass, in order, without ``weights``.
        weights: Operators that only compute weight gradients, which zero-bubble schedules defer.
        selective: Operators that ``recompute=selective`` repeats.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...] = ()
    weights: tuple[Op, ...] = ()
    selective: tuple[Op, ...] = ()


def micro_tokens(workload: Workload, plan: Plan) -> int:
    """Tokens of a micro-batch on one device."""
    sequences = workload.batch // plan.batch_ranks // max(1, plan.microbatches)
    return sequences * workload.seq // plan.cp


def layer_ops(workload: Workload, plan: Plan) -> PassOps:
    """Operators of one layer on one device, for one micro-batch.

    Args:
        workload: Workload of this kind of layer (:func:`~.workload.layer_kinds`).
        plan: Resolved plan.
    """
    return _joined([_attention(workload, plan), _feed_forward(workload, plan)])


def _joined(parts: Sequence[PassOps]) -> PassOps:
    """Parts that run one after the other."""
    return PassOps(
        forward=tuple(c for p in parts for c in p.forward),
        backward=tuple(c for p in reversed(parts) for c in p.backward),
        weights=tuple(c for p in reversed(parts) for c in p.weights),
        selective=tuple(c for p in parts for c in p.selective),
    )


def embedding_ops(workload: Workload, plan: Plan) -> PassOps:
    """Token embedding: rows gathered, their gradients added in f32."""
    tokens = micro_tokens(workload, plan)
    size = tokens * workload.d_model
    # Learned positions are read once more and added in the same pass.
    forward = Op(
        "move",
        ((2 + workload.positions) * workload.width * size,),
        workload.dtype,
        name="embedding",
    )
    backward = Op("move", ((workload.width + 8) * size,), workload.dtype, name="embedding")
    return PassOps((forward,), () if workload.lora_rank else (backward,))


def head_ops(workload: Workload, plan: Plan) -> PassOps:
    """Last norm, vocabulary projection and cross-entropy (softmax in f32)."""
    tokens = micro_tokens(workload, plan)
    # Masked-language models project only the masked positions.
    seen = max(1, round(tokens * workload.head_share))
    # Rounded up: vocabularies are padded to a multiple of the tensor-parallel degree.
    vocab = -(-workload.vocab // plan.tp)
    head = _product("head", seen, vocab, workload.d_model, workload.dtype)
    norm = _norm("norm_head", workload, plan, tokens)
    # Two passes over the logits in the model's dtype and two over their softmax in f32; the
    # backward pass reads the softmax and writes the gradient of the logits.
    loss = Op("move", ((2 * workload.width + 8) * seen * vocab,), workload.dtype, name="loss")
    back = Op("move", ((workload.width + 4) * seen * vocab,), workload.dtype, name="loss")
    return _trained(
        workload,
        PassOps(
            (*norm.forward, *head.forward, loss),
            (back, *head.backward, *norm.backward),
            head.weights,
        ),
    )


def update_ops(local_parameters: float, workload: Workload) -> tuple[Op, ...]:
    """The optimiser's pass over the parameters that a device updates."""
    if workload.mode != "train" or local_parameters <= 0:
        return ()
    moved = _UPDATE_BYTES + (workload.width if workload.dtype != "f32" else 0)
    return (Op("move", (round(moved * local_parameters),), workload.dtype, name="update"),)


def _product(name: str, m: int, n: int, k: int, dtype: str, variant: str = "") -> PassOps:
    """Product ``(m, k) × (k, n)`` with the two products of its backward pass."""
    return PassOps(
        (Op("linear", (m, n, k), dtype, variant=variant, name=name),),
        (Op("linear", (m, k, n), dtype, variant=variant, name=f"{name}_dx"),),
        (Op("linear", (n, k, m), dtype, variant=variant, name=f"{name}_dw"),),
    )


def _trained(workload: Workload, ops: PassOps) -> PassOps:
    """Operators of a part without adapters, whose weights are frozen where others have them."""
    return replace(ops, weights=()) if workload.lora_rank else ops


def _linear(
    name: str, workload: Workload, m: int, n: int, k: int, *, adapted: bool = True
) -> PassOps:
    """A linear layer: its product and, if it has one, its adapter.

    The adapter is a product down to its rank and one up from it, whose result is added to the
    layer's; the backward pass adds both gradients of the layer's input.

    Args:
        name: Name of the product.
        workload: Model.
        m: Tokens.
        n: Outputs.
        k: Inputs.
        adapted: Whether it is among the layers that have adapters.
    """
    own = _trained(workload, _quantized(name, workload, m, n, k))
    if not (workload.lora_rank and adapted):
        return own
    dtype, rank = workload.dtype, workload.lora_rank
    down = _product(f"{name}_lora_a", m, rank, k, dtype)
    up = _product(f"{name}_lora_b", m, n, rank, dtype)
    adapter = _joined([down, up])
    add = Op("add", (m, n), dtype, name=f"{name}_lora")
    back = Op("add", (m, k), dtype, name=f"{name}_lora_dx")
    return PassOps(
        (*own.forward, *adapter.forward, add),
        (*adapter.backward, *own.backward, back),
        adapter.weights,
    )


def _quantized(name: str, workload: Workload, m: int, n: int, k: int) -> PassOps:
    """A product of the layers, with the passes that quantise its operands.

    Each of input, weight and incoming gradient is read once in ``dtype`` and written twice, plain
    and transposed, since 8-bit products take both operands along the summed dimension (Transformer
    Engine's documentation of FP8). Frozen weights are quantised once, before the first step.
    """
    if workload.product_dtype == workload.dtype:
        return _product(name, m, n, k, workload.dtype)
    product = _product(name, m, n, k, workload.product_dtype, QUANTIZED)
    width = workload.width + 2.0 * FORMATS[workload.product_dtype].element_bytes
    values = m * k + (0 if workload.lora_rank else n * k)
    ahead = Op("move", (round(width * values),), workload.dtype, name=f"{name}_quantize")
    back = Op("move", (round(width * m * n),), workload.dtype, name=f"{name}_dquantize")
    return PassOps((ahead, *product.forward), (back, *product.backward), product.weights)


def _norm(name: str, workload: Workload, plan: Plan, tokens: int) -> PassOps:
    # Sequence parallelism splits norms and residuals along the tokens (Korthikanti et al.).
    rows = -(-tokens // plan.sequence_parallel)
    call = Op(workload.norm, (rows, workload.d_model), workload.dtype, name=name)
    back = Op(workload.norm, call.shape, workload.dtype, scale=NORM_BACKWARD, name=f"{name}_dx")
    return PassOps((call,), (back,), selective=(call,))


def _residual(name: str, workload: Workload, plan: Plan, tokens: int) -> Op:
    rows = -(-tokens // plan.sequence_parallel)
    return Op("add", (rows, workload.d_model), workload.dtype, name=name)


def _attention(workload: Workload, plan: Plan) -> PassOps:
    tokens, d, dtype = micro_tokens(workload, plan), workload.d_model, workload.dtype
    heads, dim = workload.heads // plan.tp, workload.head
    # With more tensor-parallel ranks than key-value heads these are replicated, one on each rank.
    groups = max(1, workload.groups // plan.tp)
    norm = _norm("norm1", workload, plan, tokens)
    if workload.kv_lora:
        qkv, groups, dim = _latent(workload, plan, tokens), heads, dim + workload.rope_dim
    else:
        qkv = _linear("qkv", workload, tokens, (heads + 2 * groups) * dim, d)
    out = _linear("out", workload, tokens, d, heads * workload.value)
    length = workload.seq // plan.cp
    # Values as wide as keys: ``part`` below accounts for narrower ones.
    shape = (tokens // length, heads, groups, dim, dim, length, length, int(workload.causal))
    # The sequence is split so that all ranks see equally many pairs: each of the cp blocks that a
    # rank meets has as many visible pairs as its own (causal), or all of them. A window, or
    # values narrower than queries, reduce the time of attention in proportion.
    part = (dim + workload.value) / (2.0 * dim)
    if workload.window:
        part *= workload.visible_pairs() / replace(workload, window=0).visible_pairs()
    core = _core(workload, shape, plan.cp * part)
    # Queries and keys are rotated, values are not; the backward rotation has the same cost.
    rope = Op("rope", (tokens, (heads + groups) * dim), dtype, name="rope")
    turn = (rope,) if workload.rope else ()
    add = _residual("add1", workload, plan, tokens)
    return PassOps(
        (*norm.forward, *qkv.forward, *turn, *core.forward, *out.forward, add),
        (*out.backward, *core.backward, *turn, *qkv.backward, *norm.backward),
        (*out.weights, *qkv.weights),
        (*norm.selective, *core.selective),
    )


def _core(workload: Workload, shape: tuple[int, ...], scale: float) -> PassOps:
    """Attention itself: fused, or with its scores in memory.

    Written out, one product makes the scores of all pairs, including masked ones; scaling, mask and
    softmax run in one kernel and dropout in another, before the second product. The backward pass
    has four products (Korthikanti et al., MLSys 2023, section 4.1, counts what is kept: two bytes,
    one byte of mask and two bytes for each score).
    """
    dtype, name = workload.dtype, workload.attention
    if name not in WRITTEN_OUT:
        core = Op("attention", shape, dtype, scale, name, name="attention")
        back = Op("attention", shape, dtype, scale * ATTENTION_BACKWARD, name, name="attention_dx")
        return PassOps((core,), (back,))
    batch, heads, _, dim, _, length, keys, _ = shape
    rows = batch * heads * length
    scores = _product("scores", rows, keys, dim, dtype)
    values = _product("values", rows, dim, keys, dtype)
    width = workload.width
    # XLA's softmax kernels read long rows again, as in compiled programs.
    again = 1.0 + (fitted("passes").long_rows if name == "naive" else 0.0)
    ahead = round((4 * width + 1) * rows * keys * scale * again)
    behind = round((5 * width + 1) * rows * keys * scale * again)
    softmax = Op("move", (ahead,), dtype, name="softmax")
    back = Op("move", (behind,), dtype, name="softmax_dx")
    forward = (*scores.forward, softmax, *values.forward)
    behind_products = (*values.backward, *values.weights, *scores.backward, *scores.weights)
    return PassOps(forward, (*behind_products, back), selective=forward)


def _latent(workload: Workload, plan: Plan, tokens: int) -> PassOps:
    """Queries, keys and values of multi-head latent attention (DeepSeek-V2, 2024, section 2.1).

    The down-projections are not split by ``tp``: every rank computes all compressed keys.
    """
    w, heads = workload, workload.heads // plan.tp
    query = heads * (w.head + w.rope_dim)
    parts = []
    if w.q_lora:
        parts.append(_linear("q_down", w, tokens, w.q_lora, w.d_model))
        parts.append(_linear("q_up", w, tokens, query, w.q_lora))
    else:
        parts.append(_linear("q", w, tokens, query, w.d_model))
    parts.append(_linear("kv_down", w, tokens, w.kv_lora + w.rope_dim, w.d_model))
    parts.append(_linear("kv_up", w, tokens, heads * (w.head + w.value), w.kv_lora))
    return _joined(parts)


def _feed_forward(workload: Workload, plan: Plan) -> PassOps:
    tokens = micro_tokens(workload, plan)
    norm, add = _norm("norm2", workload, plan, tokens), _residual("add2", workload, plan, tokens)
    if workload.experts:
        return _experts(workload, plan, norm, add)
    dense = _dense(workload, plan, tokens, workload.d_ff)
    return PassOps(
        (*norm.forward, *dense.forward, add),
        (*dense.backward, *norm.backward),
        dense.weights,
        (*norm.selective, *dense.selective),
    )


def _dense(workload: Workload, plan: Plan, tokens: int, width: int) -> PassOps:
    """A dense feed-forward of a given width, or the shared experts of a layer."""
    d, dtype = workload.d_model, workload.dtype
    inner = width // plan.tp
    # Gate and up projection run as one product, as inference and training frameworks fuse them.
    wide = inner * (workload.matrices - 1)
    adapted = workload.adapts_feed_forward
    up = _linear("up", workload, tokens, wide, d, adapted=adapted)
    down = _linear("down", workload, tokens, d, inner, adapted=adapted)
    name = "silu_and_mul" if workload.gated else "gelu"
    act = Op(name, (tokens, wide), dtype, name="activation")
    back = Op(name, (tokens, wide), dtype, ACTIVATION_BACKWARD, name="activation_dx")
    return PassOps(
        (*up.forward, act, *down.forward),
        (*down.backward, back, *up.backward),
        (*down.weights, *up.weights),
        (act,),
    )


def _experts(workload: Workload, plan: Plan, norm: PassOps, add: Op) -> PassOps:
    tokens, dtype = micro_tokens(workload, plan), workload.product_dtype
    router = _product("router", tokens, workload.experts, workload.d_model, workload.dtype)
    shared = PassOps((), ())
    if workload.shared_experts:
        shared = _dense(workload, plan, tokens, workload.shared_experts * workload.d_ff)
    # Tokens arriving at a rank for its experts: as many copies as it sends out. Posed as a layer
    # with only these experts, the query stays within the measured sizes.
    own = workload.experts // plan.ep
    chosen = min(workload.top_k, own)
    arrived = round(tokens * workload.top_k / chosen)
    shape = (arrived, workload.d_model, workload.d_ff, chosen, own, plan.tp, 1)
    # The operator has the three matrices of gated experts; plain ones have two.
    scale = 1.0 if workload.gated else 2.0 / 3.0
    variant = QUANTIZED if dtype != workload.dtype else ""
    experts = Op("moe", shape, dtype, scale, variant, name="experts")
    # Half of the backward pass computes weight gradients.
    back = Op("moe", shape, dtype, scale * EXPERTS_BACKWARD / 2, variant, name="experts_dx")
    weights = Op("moe", shape, dtype, scale * EXPERTS_BACKWARD / 2, variant, name="experts_dw")
    # Training frameworks sort the copies by expert, and back, in separate passes with a read and
    # a write each (Megatron-LM's token dispatcher).
    sorting = round(4.0 * workload.width * arrived * chosen * workload.d_model)
    cast: tuple[Op, ...] = (Op("move", (sorting,), workload.dtype, name="permute"),)
    if variant:
        # Inputs of both products, as for dense products; there are as many gradients.
        width = workload.width + 2.0 * FORMATS[dtype].element_bytes
        moved = width * arrived * chosen * (workload.d_model + workload.d_ff / plan.tp)
        cast += (Op("move", (round(moved),), workload.dtype, name="experts_quantize"),)
    whole = PassOps(
        (*norm.forward, *router.forward, *cast, experts, *shared.forward, add),
        (*shared.backward, *cast, back, *router.backward, *norm.backward),
        (*shared.weights, weights, *router.weights),
        (*norm.selective, *shared.selective),
    )
    return _trained(workload, whole)
