"""Llama-like decoder: a whole sequence at once, or one step with a key-value cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import attend_grouped, check_heads, rotate
from .parts import Input, Model, Precision, Settings, class_loss, precision, require, tokens

Cache = dict[str, jax.Array] | None
"""Keys and values (batch, cache, kv_heads, d) of one layer."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in f32 over the last axis (Zhang and Sennrich 2019)."""

    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) to the same shape."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.p.params)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    heads: int
    kv_heads: int
    p: Precision

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache = None
    ) -> tuple[jax.Array, Cache]:
        """(batch, length, dim) at ``positions`` to the same shape, and the updated cache."""
        batch, length, dim = x.shape
        size = dim // self.heads
        # No biases, as in Llama.
        dense = self.p.dense
        query = dense(dim, bias=False, name="query")(x)
        key = dense(self.kv_heads * size, bias=False, name="key")(x)
        value = dense(self.kv_heads * size, bias=False, name="value")(x)
        query = rotate(query.reshape(batch, length, self.heads, size), positions)
        key = rotate(key.reshape(batch, length, self.kv_heads, size), positions)
        value = value.reshape(batch, length, self.kv_heads, size)
        if cache is not None:
            # All sequences are at the same position: one slice is updated, in place if donated.
            start = (0, positions[0], 0, 0)
            key = jax.lax.dynamic_update_slice(cache["key"], key, start)
            value = jax.lax.dynamic_update_slice(cache["value"], value, start)
            cache = {"key": key, "value": value}
        # Also hides the part of a cache that is not filled yet.
        mask = jnp.arange(key.shape[1])[None, :] <= positions[:, None]
        out = attend_grouped(query, key, value, mask).reshape(batch, length, dim)
        return dense(dim, bias=False, name="out")(out), cache


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020)."""

    hidden: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) to the same shape."""
        gate = self.p.dense(self.hidden, bias=False, name="gate")(x)
        up = self.p.dense(self.hidden, bias=False, name="up")(x)
        return self.p.dense(x.shape[-1], bias=False, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and gated feed-forward."""

    heads: int
    kv_heads: int
    hidden: int
    p: Precision

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache = None
    ) -> tuple[jax.Array, Cache]:
        """(batch, length, dim) to the same shape, and the updated cache."""
        attention = Attention(self.heads, self.kv_heads, self.p, name="attention")
        y, cache = attention(RMSNorm(self.p, name="norm1")(x), positions, cache)
        x = x + y
        return x + SwiGLU(self.hidden, self.p)(RMSNorm(self.p, name="norm2")(x)), cache


class Llama(nn.Module):
    """Token embedding, blocks, norm, untied vocabulary projection."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    scan_layers: bool
    remat: bool
    p: Precision

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, length, vocab) of ids (batch, length)."""
        x = self.p.embed(self.vocab, self.dim)(ids)
        positions = jnp.arange(ids.shape[1])
        block: Any = nn.remat(Block) if self.remat else Block
        sizes = (self.heads, self.kv_heads, self.hidden, self.p)
        # One traced layer in a loop, as large models are written to keep compile time constant.
        if self.scan_layers:
            scan = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )
            x, _ = scan(*sizes, name="stacked")(x, positions)
        else:
            for _ in range(self.layers):
                x, _ = block(*sizes)(x, positions)
        return self.p.dense(self.vocab, bias=False, name="head")(RMSNorm(self.p)(x))


class LlamaStep(nn.Module):
    """The next token of every sequence from the last one and the caches of all layers."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    greedy: bool
    p: Precision

    @nn.compact
    def __call__(
        self, ids: jax.Array, position: jax.Array, caches: list[Cache], train: bool
    ) -> tuple[jax.Array, list[Cache]]:
        """Tokens (batch, 1) or logits (batch, 1, vocab) of ids (batch, 1), and new caches."""
        x = self.p.embed(self.vocab, self.dim)(ids)
        updated = []
        for cache in caches:
            block = Block(self.heads, self.kv_heads, self.hidden, self.p)
            x, cache = block(x, position[None], cache)
            updated.append(cache)
        logits = self.p.dense(self.vocab, bias=False, name="head")(RMSNorm(self.p)(x))
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), updated
        return logits, updated


def check_decoder(s: Settings) -> None:
    """Raise OpcastError unless the head counts fit the width and one another."""
    dim, heads, kv_heads = s["dim"], s["heads"], s["kv_heads"]
    check_heads(dim, heads)
    require(dim // heads % 2 == 0, "rotary positions need an even head size", "halve the heads")
    require(
        heads % kv_heads == 0,
        f"heads={heads} is not a multiple of kv_heads={kv_heads}",
        "choose kv_heads that divide heads",
    )


def model_llama(s: Settings) -> Model:
    """The decoder over whole sequences."""
    check_decoder(s)
    module = Llama(
        s["layers"],
        s["dim"],
        s["heads"],
        s["kv_heads"],
        s["hidden"],
        s["vocab"],
        s["scan_layers"],
        s["remat"],
        precision(s),
    )
    ids = tokens((s["batch"], s["seq"]), s["vocab"])
    return Model(module, {"ids": ids}, {"labels": ids}, class_loss, clip_norm=1.0, weight_decay=0.1)


def model_llama_decode(s: Settings) -> Model:
    """One decoding step."""
    check_decoder(s)
    p = precision(s)
    module = LlamaStep(
        s["layers"], s["dim"], s["heads"], s["kv_heads"], s["hidden"], s["vocab"], s["greedy"], p
    )
    shape = (s["batch"], s["cache"], s["kv_heads"], s["dim"] // s["heads"])
    # Caches are drawn like activations: a step's time does not depend on their values.
    layer = {"key": Input(shape, p.compute), "value": Input(shape, p.compute)}
    inputs = {
        "ids": tokens((s["batch"], 1), s["vocab"]),
        "position": Input((), jnp.int32, s["cache"], split=False),
        "caches": [layer] * s["layers"],
    }
    return Model(module, inputs, state="caches")
