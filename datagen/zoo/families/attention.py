"""Transformer pieces that several families share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Precision, require

MASKED = -3.0e38
"""Score of a hidden key: near the least f32, so that fully hidden rows stay finite."""


def check_heads(dim: int, heads: int) -> None:
    """Raise OpcastError unless ``heads`` divides ``dim``."""
    require(
        dim % heads == 0,
        f"dim={dim} is not a multiple of heads={heads}",
        "choose heads that divide dim",
    )


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Scaled dot-product attention with the softmax in f32.

    Args:
        query: (batch, q, heads, d).
        key: (batch, k, heads, d).
        value: (batch, k, heads, d).
        mask: Broadcastable to (batch, heads, q, k); False hides a key.

    Returns:
        (batch, q, heads, d).
    """
    # Scaled by 1/sqrt(d) (Vaswani et al., NeurIPS 2017); f32, since a bf16 softmax loses accuracy.
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    scores = scores.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


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


def rotate(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) in the rotate-half layout.

    Args:
        x: (batch, length, heads, d), d even.
        positions: (length,) integers.
        base: Wavelength base.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # Angles in f32: at long positions bf16 could not separate neighbours.
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases, as in BERT and ViT."""

    heads: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """(batch, length, dim) to the same shape."""
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        query, key, value = (
            self.p.dense(dim, name=name)(x).reshape(shape) for name in ("query", "key", "value")
        )
        out = attend(query, key, value, mask).reshape(batch, length, dim)
        return self.p.dense(dim, name="out")(out)


class FeedForward(nn.Module):
    """Dense, GELU, dense."""

    hidden: int
    p: Precision
    approximate: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) to the same shape."""
        y = nn.gelu(self.p.dense(self.hidden)(x), approximate=self.approximate)
        return self.p.dense(x.shape[-1])(y)
