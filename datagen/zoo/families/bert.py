"""BERT encoder (Devlin et al. 2019) with its masked-language-model head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import FeedForward, SelfAttention, check_heads
from .parts import Model, Precision, Settings, class_loss, precision, require, tokens

EPSILON = 1e-12
"""Epsilon of BERT's layer norms."""


class Block(nn.Module):
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
        for _ in range(self.layers):
            x = Block(self.heads, self.hidden, self.dropout, p)(x, mask, train)
        # Only masked positions reach the vocabulary, as in the reference implementation.
        x = jnp.take_along_axis(x, masked[:, :, None], axis=1)
        x = p.layer_norm(EPSILON)(nn.gelu(p.dense(self.dim)(x), approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (self.vocab,), p.params)
        return table.attend(x) + bias.astype(x.dtype)


def model(s: Settings) -> Model:
    """The model for the settings."""
    check_heads(s["dim"], s["heads"])
    batch, seq, masked = s["batch"], s["seq"], s["masked"]
    require(seq <= s["max_positions"], f"seq={seq} is beyond max_positions", "raise max_positions")
    require(s["dropout"] < 1, "dropout must be under 1", "use dropout=0.1")
    module = Bert(
        s["layers"],
        s["dim"],
        s["heads"],
        s["hidden"],
        s["vocab"],
        s["max_positions"],
        s["dropout"],
        precision(s),
    )
    return Model(
        module,
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
