"""Selective state-space language model (Gu and Dao 2023) with a parallel associative scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .llama import RMSNorm
from .parts import Model, Precision, Settings, class_loss, precision, tokens

Pair = tuple[jax.Array, jax.Array]
"""Decay and increment of a first-order recurrence."""


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


def model(s: Settings) -> Model:
    """The model for the settings."""
    module = SSM(
        s["layers"], s["dim"], s["expand"], s["state"], s["conv"], s["vocab"], precision(s)
    )
    ids = tokens((s["batch"], s["seq"]), s["vocab"])
    return Model(module, {"ids": ids}, {"labels": ids}, class_loss, clip_norm=1.0, weight_decay=0.1)
