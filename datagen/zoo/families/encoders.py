"""Encoders: a vision transformer (Dosovitskiy et al. 2021), and BERT (Devlin et al. 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import (
    MASKED,
    Model,
    Precision,
    Settings,
    check_heads,
    class_loss,
    filled,
    image_classifier,
    require,
    tokens,
)

EPSILON = 1e-12
"""Epsilon of BERT's layer norms."""


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


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    heads: int
    hidden: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, dim) to the same shape."""
        x = x + SelfAttention(self.heads, self.p)(self.p.layer_norm()(x))
        return x + FeedForward(self.hidden, self.p)(self.p.layer_norm()(x))


class ViT(nn.Module):
    """Patches, class token, learned positions, blocks, head on the class token."""

    layers: int
    dim: int
    heads: int
    hidden: int
    patch: int
    classes: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width, 3)."""
        p = self.p
        # A window as wide as its stride: the linear projection of each patch.
        x = p.conv(self.dim, self.patch, self.patch, padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, self.dim)
        init = nn.initializers.normal(0.02)
        token = self.param("token", init, (1, 1, self.dim), p.params).astype(x.dtype)
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("position", init, (1, *x.shape[1:]), p.params).astype(x.dtype)
        for _ in range(self.layers):
            x = Block(self.heads, self.hidden, p)(x)
        return p.dense(self.classes)(p.layer_norm()(x)[:, 0])


class PostNormBlock(nn.Module):
    """Post-norm attention and feed-forward with dropout."""

    heads: int
    hidden: int
    dropout: float
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """(batch, length, dim) to the same shape."""
        p = self.p
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = p.layer_norm(EPSILON)(x + drop(SelfAttention(self.heads, p)(x, mask)))
        y = FeedForward(self.hidden, p, approximate=False)(x)
        out: jax.Array = p.layer_norm(EPSILON)(x + drop(y))
        return out


class Bert(nn.Module):
    """Embeddings, encoder, prediction of the tokens at given positions with tied weights."""

    layers: int
    dim: int
    heads: int
    hidden: int
    vocab: int
    max_positions: int
    dropout: float
    p: Precision

    @nn.compact
    def __call__(
        self, ids: jax.Array, segments: jax.Array, valid: jax.Array, masked: jax.Array, train: bool
    ) -> jax.Array:
        """Logits (batch, masked, vocab) from (batch, length) ids, segments and validity."""
        p, length = self.p, ids.shape[1]
        table = p.embed(self.vocab, self.dim, name="words")
        x = table(ids) + p.embed(2, self.dim, name="segments")(segments)
        x = x + p.embed(self.max_positions, self.dim, name="positions")(jnp.arange(length))
        x = nn.Dropout(self.dropout, deterministic=not train)(p.layer_norm(EPSILON)(x))
        # One mask per sequence, broadcast over heads and queries.
        mask = (valid > 0)[:, None, None, :]
        for layer in range(self.layers):
            block = PostNormBlock(self.heads, self.hidden, self.dropout, p, name=f"Block_{layer}")
            x = block(x, mask, train)
        # Only masked positions reach the vocabulary, as in the reference implementation.
        x = jnp.take_along_axis(x, masked[:, :, None], axis=1)
        x = p.layer_norm(EPSILON)(nn.gelu(p.dense(self.dim)(x), approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (self.vocab,), p.params)
        return table.attend(x) + bias.astype(x.dtype)


def model_vit(s: Settings) -> Model:
    """ViT for the settings."""
    check_heads(s["dim"], s["heads"])
    require(
        s["image"] % s["patch"] == 0,
        f"image={s['image']} is not a multiple of patch={s['patch']}",
        "choose a patch that divides image",
    )
    return image_classifier(filled(ViT, s), s, clip_norm=1.0, weight_decay=0.1)


def model_bert(s: Settings) -> Model:
    """BERT for the settings."""
    check_heads(s["dim"], s["heads"])
    batch, seq, masked = s["batch"], s["seq"], s["masked"]
    require(seq <= s["max_positions"], f"seq={seq} is beyond max_positions", "raise max_positions")
    require(s["dropout"] < 1, "dropout must be under 1", "use dropout=0.1")
    return Model(
        filled(Bert, s),
        {
            "ids": tokens((batch, seq), s["vocab"]),
            "segments": tokens((batch, seq), 2),
            "valid": tokens((batch, seq), 2),
            "masked": tokens((batch, masked), seq),
        },
        {"labels": tokens((batch, masked), s["vocab"])},
        class_loss,
        dropout=s["dropout"] > 0,
        # Clipping and decay of BERT's own optimiser.
        clip_norm=1.0,
        weight_decay=0.01,
    )
