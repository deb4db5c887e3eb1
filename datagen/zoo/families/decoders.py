"""Decoders like Llama, whole sequences or a step with a cache, and a state-space language model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import (
    MASKED,
    Input,
    Model,
    Precision,
    Settings,
    check_heads,
    filled,
    language_model,
    precision,
    require,
    tokens,
)

Cache = dict[str, jax.Array] | None
"""Keys and values (batch, cache, kv_heads, d) of one layer."""

Pair = tuple[jax.Array, jax.Array]
"""Decay and increment of a first-order recurrence."""


def attend_grouped(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """Grouped-query attention (Ainslie et al. 2023): query heads share a key-value head.

    Args:
        query: (batch, q, heads, d).
        key: (batch, k, kv_heads, d), with kv_heads a divisor of heads.
        value: (batch, k, kv_heads, d).
        mask: Broadcastable to (batch, kv_heads, group, q, k).

    Returns:
        (batch, q, heads, d).
    """
    batch, length, heads, size = query.shape
    # Keys and values are not repeated: the group is a dimension of the product.
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], size)
    scores = jnp.einsum("bqngd,bknd->bngqk", grouped, key) * size**-0.5
    scores = jnp.where(mask, scores.astype(jnp.float32), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = jnp.einsum("bngqk,bknd->bqngd", weights, value)
    return out.reshape(query.shape)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) in the rotate-half layout.

    Args:
        x: (batch, length, heads, d), d even.
        positions: (length,) integers.
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # Angles in f32: at long positions bf16 could not separate neighbours.
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


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
    p: Precision
    scan_layers: bool = False
    remat: bool = False
    greedy: bool = False

    @nn.compact
    def __call__(
        self,
        ids: jax.Array,
        position: jax.Array | None = None,
        caches: list[Cache] | None = None,
        *,
        train: bool,
    ) -> jax.Array | tuple[jax.Array, list[Cache]]:
        """Logits (batch, length, vocab) of ids (batch, length).

        With ``caches`` of all layers, ids (batch, 1) are those at ``position``: the result is the
        next tokens (batch, 1) if ``greedy``, else logits, and the new caches.
        """
        x = self.p.embed(self.vocab, self.dim)(ids)
        positions = jnp.arange(ids.shape[1]) if position is None else position
        block: Any = nn.remat(Block) if self.remat else Block
        sizes = (self.heads, self.kv_heads, self.hidden, self.p)
        updated: list[Cache] = []
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
            for own in caches or [None] * self.layers:
                at = positions if positions.ndim else positions[None]
                x, own = block(*sizes)(x, at, own)
                updated.append(own)
        logits = self.p.dense(self.vocab, bias=False, name="head")(RMSNorm(self.p)(x))
        if caches is None:
            return logits
        return jnp.argmax(logits, axis=-1).astype(jnp.int32) if self.greedy else logits, updated


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
    return language_model(filled(Llama, s), s, weight_decay=0.1)


def model_llama_decode(s: Settings) -> Model:
    """One decoding step."""
    check_decoder(s)
    shape = (s["batch"], s["cache"], s["kv_heads"], s["dim"] // s["heads"])
    # Caches are drawn like activations: a step's time does not depend on their values.
    cached = Input(shape, precision(s).compute)
    inputs = {
        "ids": tokens((s["batch"], 1), s["vocab"]),
        "position": Input((), jnp.int32, s["cache"], split=False),
        "caches": [{"key": cached, "value": cached}] * s["layers"],
    }
    return Model(filled(Llama, s), inputs, state="caches")


def selective_scan(
    x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """The recurrence ``h = exp(delta a) h + delta b x``, ``y = c h`` along the length.

    Args:
        x: (batch, length, channels).
        delta: Step sizes (batch, length, channels).
        a: Negative decay rates (channels, state).
        b: (batch, length, state).
        c: (batch, length, state).

    Returns:
        (batch, length, channels).
    """
    decay = jnp.exp(delta[..., None] * a)
    increment = (delta * x)[..., None] * b[:, :, None, :]

    # Composition of two affine maps h -> a h + b, which is associative (Blelloch, 1990).
    def combine(left: Pair, right: Pair) -> Pair:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, hidden = jax.lax.associative_scan(combine, (decay, increment), axis=1)
    return jnp.einsum("blcn,bln->blc", hidden, c)


class Mixer(nn.Module):
    """Gated projection, causal depthwise convolution, selective scan in f32."""

    expand: int
    state: int
    conv: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, dim) to the same shape."""
        p, dim = self.p, x.shape[-1]
        # Step sizes have a low-rank projection of dim / 16, Mamba's default.
        inner, rank = self.expand * dim, max(1, dim // 16)
        y, gate = jnp.split(p.dense(2 * inner, bias=False)(x), 2, axis=-1)
        y = nn.silu(
            p.conv(inner, (self.conv,), rank=1, feature_group_count=inner, padding="CAUSAL")(y)
        )
        low, b, c = jnp.split(
            p.dense(rank + 2 * self.state, bias=False)(y).astype(jnp.float32),
            [rank, rank + self.state],
            axis=-1,
        )
        ones = nn.initializers.ones
        bias = self.param("dt_bias", ones, (inner,), jnp.float32)
        rates = self.param("a_log", ones, (inner, self.state), jnp.float32)
        skip = self.param("skip", ones, (inner,), jnp.float32)
        # Softplus keeps steps positive, the exponential keeps rates negative: the scan decays.
        delta = jax.nn.softplus(nn.Dense(inner, use_bias=False)(low) + bias)
        wide = y.astype(jnp.float32)
        out = selective_scan(wide, delta, -jnp.exp(rates), b, c) + skip * wide
        return p.dense(dim, bias=False)(out.astype(y.dtype) * nn.silu(gate))


class SSM(nn.Module):
    """Embedding, residual mixers, tied vocabulary projection."""

    layers: int
    dim: int
    expand: int
    state: int
    conv: int
    vocab: int
    p: Precision

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, length, vocab) of ids (batch, length)."""
        table = self.p.embed(self.vocab, self.dim)
        x = table(ids)
        for _ in range(self.layers):
            x = x + Mixer(self.expand, self.state, self.conv, self.p)(RMSNorm(self.p)(x))
        return table.attend(RMSNorm(self.p)(x))


def model_ssm(s: Settings) -> Model:
    """The state-space model for the settings."""
    return language_model(filled(SSM, s), s, weight_decay=0.1)
