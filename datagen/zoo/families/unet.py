"""Diffusion U-Net (Ho et al. 2020): predicts the noise in an image at a time step."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from .encoders import SelfAttention
from .parts import Input, Model, Precision, Settings, filled, require, tokens

# As in Ho et al.; only the range of an argument depends on it.
STEPS = 1000
"""Diffusion time steps."""


def time_embedding(steps: jax.Array, dim: int) -> jax.Array:
    """Sinusoidal embedding (batch, dim) of integer time steps (batch,), dim even."""
    half = dim // 2
    # The position encoding of transformers (Vaswani et al. 2017), with time for position.
    frequency = jnp.exp(-jnp.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / half)
    angle = steps.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _groups(channels: int) -> int:
    """The largest of 32, 16, … 1 that divides the channels."""
    return next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0)


class ResBlock(nn.Module):
    """Two 3x3 convolutions with group norm; the time embedding enters between them."""

    channels: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """(batch, height, width, any) to (batch, height, width, channels)."""
        p = self.p
        y = p.conv(self.channels, 3)(nn.silu(p.group_norm(_groups(x.shape[-1]))(x)))
        y = y + p.dense(self.channels)(nn.silu(time))[:, None, None, :]
        y = p.conv(self.channels, 3)(nn.silu(p.group_norm(_groups(self.channels))(y)))
        if x.shape[-1] != self.channels:
            x = p.conv(self.channels, 1)(x)
        return x + y


class AttentionBlock(nn.Module):
    """Self-attention over all pixels."""

    heads: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels) to the same shape."""
        batch, height, width, channels = x.shape
        y = self.p.group_norm(_groups(channels))(x).reshape(batch, height * width, channels)
        return x + SelfAttention(self.heads, self.p)(y).reshape(x.shape)


class UNet(nn.Module):
    """Down path, middle with attention, up path with skip connections."""

    channels: int
    levels: int
    blocks: int
    attention_levels: int
    heads: int
    image_channels: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, steps: jax.Array, train: bool) -> jax.Array:
        """Predicted noise, of the shape of the images (batch, height, width, channels)."""
        p = self.p
        time = time_embedding(steps, self.channels).astype(p.compute)
        time = p.dense(4 * self.channels)(nn.silu(p.dense(4 * self.channels)(time)))
        x = p.conv(self.channels, 3)(x)
        skips = [x]
        for level in range(self.levels):
            for _ in range(self.blocks):
                x = self._block(x, time, level)
                skips.append(x)
            if level < self.levels - 1:
                x = p.conv(x.shape[-1], 3, 2)(x)
                skips.append(x)
        x = ResBlock(x.shape[-1], p)(x, time)
        x = AttentionBlock(self.heads, p)(x)
        x = ResBlock(x.shape[-1], p)(x, time)
        for level in reversed(range(self.levels)):
            # One more than on the way down: the strided convolution left a skip as well.
            for _ in range(self.blocks + 1):
                x = self._block(jnp.concatenate([x, skips.pop()], axis=-1), time, level)
            if level > 0:
                batch, height, width, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
                x = p.conv(channels, 3)(x)
        x = nn.silu(p.group_norm(_groups(x.shape[-1]))(x))
        return p.conv(self.image_channels, 3)(x)

    def _block(self, x: jax.Array, time: jax.Array, level: int) -> jax.Array:
        """A residual block of a level, with attention in the lowest resolutions."""
        # Channels double per level, up to four times.
        x = ResBlock(self.channels * min(1 << level, 4), self.p)(x, time)
        if level >= self.levels - self.attention_levels:
            x = AttentionBlock(self.heads, self.p)(x)
        return x


def _loss(noise: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.mean(jnp.square(noise.astype(jnp.float32) - batch["noise"]))


def model(s: Settings) -> Model:
    """The model for the settings."""
    image, channels, levels = s["image"], s["channels"], s["levels"]
    factor = 1 << (levels - 1)
    require(
        image % factor == 0,
        f"image={image} cannot be halved {levels - 1} times",
        f"use a multiple of {factor}",
    )
    require(channels % 2 == 0, f"channels={channels} is odd", "use an even number")
    require(
        channels % s["heads"] == 0,
        f"channels={channels} is not a multiple of heads={s['heads']}",
        "choose heads that divide channels",
    )
    images = Input((s["batch"], image, image, s["image_channels"]))
    inputs = {"image": images, "steps": tokens((s["batch"],), STEPS)}
    return Model(filled(UNet, s), inputs, {"noise": images}, _loss, clip_norm=1.0)
