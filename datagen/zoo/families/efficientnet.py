"""EfficientNet (Tan and Le 2019): inverted bottlenecks, depthwise convolutions, squeeze-excite."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, class_loss, precision, tokens

SCALES = {
    "mini": (0.5, 0.25),
    "b0": (1.0, 1.0),
    "b1": (1.0, 1.1),
    "b2": (1.1, 1.2),
    "b3": (1.2, 1.4),
    "b4": (1.4, 1.8),
}
"""Width and depth multipliers (Tan and Le 2019); "mini" has one block in each stage."""
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Expansion, channels, repeats, stride and kernel size of each stage of b0."""


def scaled_channels(channels: int, width: float) -> int:
    """Scale channels by width, rounded to a multiple of 8 and by no more than a tenth down."""
    # ``round_filters`` of the reference implementation.
    rounded = max(8, int(channels * width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels * width else rounded


class Block(nn.Module):
    """Expand, depthwise convolution, squeeze-excite, project; residual where shapes agree."""

    expand: int
    out: int
    stride: int
    kernel: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, height, width, channels) to the block's stride and channels."""
        p, inputs = self.p, x.shape[-1]
        hidden = inputs * self.expand
        y: jax.Array = x
        if self.expand > 1:
            y = nn.silu(p.batch_norm(train)(p.conv(hidden, 1, bias=False)(y)))
        y = p.conv(hidden, self.kernel, self.stride, bias=False, feature_group_count=hidden)(y)
        y = nn.silu(p.batch_norm(train)(y))
        gate = jnp.mean(y, axis=(1, 2), keepdims=True)
        # A quarter of the block's input channels, not of the expanded ones.
        gate = nn.silu(p.conv(max(1, inputs // 4), 1)(gate))
        y = y * nn.sigmoid(p.conv(hidden, 1)(gate))
        y = p.batch_norm(train)(p.conv(self.out, 1, bias=False)(y))
        if x.shape == y.shape:
            y = y + x
        return y


class EfficientNet(nn.Module):
    """Stem, seven stages, head."""

    width: float
    depth: float
    classes: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width, 3)."""
        p = self.p
        stem = scaled_channels(32, self.width)
        x = nn.silu(p.batch_norm(train)(p.conv(stem, 3, 2, bias=False)(x)))
        for expand, channels, repeats, stride, kernel in STAGES:
            out = scaled_channels(channels, self.width)
            for index in range(math.ceil(repeats * self.depth)):
                x = Block(expand, out, stride if index == 0 else 1, kernel, p)(x, train)
        head = scaled_channels(1280, self.width)
        x = nn.silu(p.batch_norm(train)(p.conv(head, 1, bias=False)(x)))
        return p.dense(self.classes)(jnp.mean(x, axis=(1, 2)))


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, image, classes = s["batch"], s["image"], s["classes"]
    return Model(
        EfficientNet(*SCALES[s["size"]], classes, precision(s)),
        {"image": Input((batch, image, image, 3))},
        {"labels": tokens((batch,), classes)},
        class_loss,
    )
