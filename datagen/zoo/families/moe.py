"""Mixture-of-experts decoder (Switch, GShard, Mixtral) with three ways to dispatch tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from .decoders import Attention, RMSNorm, check_decoder
from .parts import Model, Precision, Settings, cross_entropy, filled, language_model, require


class Experts(nn.Module):
    """Gated feed-forwards applied to (experts, tokens, dim) as batched matrix products."""

    experts: int
    hidden: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(experts, tokens, dim) to the same shape."""
        dim = x.shape[-1]
        # Fan-in without the experts' axis.
        init = nn.initializers.lecun_normal(batch_axis=0)

        def weight(name: str, rows: int, columns: int) -> jax.Array:
            shape = (self.experts, rows, columns)
            return self.param(name, init, shape, self.p.params).astype(self.p.compute)

        gate = jnp.einsum("etd,edf->etf", x, weight("gate", dim, self.hidden))
        up = jnp.einsum("etd,edf->etf", x, weight("up", dim, self.hidden))
        return jnp.einsum("etf,efd->etd", nn.silu(gate) * up, weight("down", self.hidden, dim))


class MoE(nn.Module):
    """Top-k routing to experts; tokens beyond an expert's capacity are dropped."""

    experts: int
    top_k: int
    hidden: int
    capacity_factor: float
    dispatch: str
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(batch, length, dim) to the same shape, and the load-balancing loss."""
        flat = x.reshape(-1, x.shape[-1])
        router = nn.Dense(self.experts, use_bias=False, param_dtype=self.p.params, name="router")
        probabilities = jax.nn.softmax(router(flat.astype(jnp.float32)), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        weights = (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype)
        onehot = jax.nn.one_hot(chosen, self.experts, dtype=jnp.float32)
        # Balance loss of Switch Transformers: experts * sum(fraction routed * mean probability),
        # of the first choice alone.
        balance = self.experts * jnp.sum(
            jnp.mean(onehot[:, 0], axis=0) * jnp.mean(probabilities, axis=0)
        )
        experts = Experts(self.experts, self.hidden, self.p, name="stacked")
        if self.dispatch == "dense":
            everywhere = experts(jnp.broadcast_to(flat, (self.experts, *flat.shape)))
            mix = jnp.einsum("tk,tke->te", weights, onehot.astype(x.dtype))
            out = jnp.einsum("te,etd->td", mix, everywhere)
        else:
            out = self._routed(flat, weights, chosen, onehot, experts)
        return out.reshape(x.shape), balance

    def _routed(
        self,
        flat: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        onehot: jax.Array,
        experts: Experts,
    ) -> jax.Array:
        """Send each token to a slot of its experts, and bring the results back."""
        count, dim = flat.shape
        # Capacities are static, because shapes in XLA are.
        fair = self.capacity_factor * count * self.top_k / self.experts
        capacity = max(1, min(count, math.ceil(fair)))
        # The slot of a choice is the number of earlier choices of the same expert.
        order = onehot.reshape(count * self.top_k, self.experts).astype(jnp.int32)
        taken = (jnp.cumsum(order, axis=0) - order).reshape(onehot.shape)
        slot = jnp.sum(taken * onehot.astype(jnp.int32), axis=-1)
        if self.dispatch == "einsum":
            # one_hot is all zero for a slot beyond the capacity, which drops the token.
            slots = jax.nn.one_hot(slot, capacity, dtype=flat.dtype)
            combine = jnp.einsum("tk,tke,tkc->tec", weights, onehot.astype(flat.dtype), slots)
            routed = jnp.einsum("tec,td->ecd", (combine > 0).astype(flat.dtype), flat)
            return jnp.einsum("tec,ecd->td", combine, experts(routed))
        buffer = jnp.zeros((self.experts, capacity, dim), flat.dtype)
        # Slots beyond the capacity lie outside of the buffer: dropped here, zero on the way back.
        copies = jnp.broadcast_to(flat[:, None, :], (count, self.top_k, dim))
        buffer = buffer.at[chosen, slot].set(copies, mode="drop")
        back = experts(buffer).at[chosen, slot].get(mode="fill", fill_value=0)
        return jnp.einsum("tk,tkd->td", weights, back)


class Block(nn.Module):
    """Pre-norm attention and mixture of experts."""

    heads: int
    kv_heads: int
    moe: Settings
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(batch, length, dim) to the same shape, and the load-balancing loss."""
        y, _ = Attention(self.heads, self.kv_heads, self.p)(RMSNorm(self.p)(x), positions)
        x = x + y
        y, balance = MoE(**self.moe, p=self.p)(RMSNorm(self.p)(x))
        return x + y, balance


class MoEDecoder(nn.Module):
    """Embedding, blocks, vocabulary projection."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    vocab: int
    moe: Settings
    p: Precision

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Logits (batch, length, vocab); in training also the mean load-balancing loss."""
        x = self.p.embed(self.vocab, self.dim)(ids)
        balances = []
        for _ in range(self.layers):
            block = Block(self.heads, self.kv_heads, self.moe, self.p)
            x, balance = block(x, jnp.arange(ids.shape[1]))
            balances.append(balance)
        logits = self.p.dense(self.vocab, bias=False, name="head")(RMSNorm(self.p)(x))
        return (logits, jnp.mean(jnp.stack(balances))) if train else logits


def _loss(out: tuple[jax.Array, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
    logits, balance = out
    # Weight of Switch Transformers.
    return cross_entropy(logits, batch["labels"]) + 0.01 * balance


def model(s: Settings) -> Model:
    """The model for the settings."""
    check_decoder(s)
    require(
        s["top_k"] <= s["experts"],
        f"top_k={s['top_k']} is more than experts={s['experts']}",
        "lower top_k",
    )
    moe = {k: s[k] for k in ("experts", "top_k", "hidden", "capacity_factor", "dispatch")}
    return language_model(filled(MoEDecoder, s, moe=moe), s, _loss, weight_decay=0.1)
