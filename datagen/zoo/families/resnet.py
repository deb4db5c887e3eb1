"""ResNet v1.5 (stride in the 3x3 convolution), depths 18 to 200."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, class_loss, precision, tokens

STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Blocks in each stage by depth (He et al. 2015 and 2016); from 50 on they are bottlenecks."""

max_pool: Any = nn.max_pool  # without annotations in flax


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 and a fourfold wider 1x1."""

    width: int
    stride: int
    bottleneck: bool
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """(batch, height, width, channels) to the same with the block's stride and channels."""
        p, width, stride = self.p, self.width, self.stride
        out = 4 * width if self.bottleneck else width
        shortcut = x
        if self.bottleneck:
            x = nn.relu(p.batch_norm(train)(p.conv(width, 1, bias=False)(x)))
            x = nn.relu(p.batch_norm(train)(p.conv(width, 3, stride, bias=False)(x)))
            x = p.batch_norm(train)(p.conv(out, 1, bias=False)(x))
        else:
            x = nn.relu(p.batch_norm(train)(p.conv(width, 3, stride, bias=False)(x)))
            x = p.batch_norm(train)(p.conv(out, 3, bias=False)(x))
        # Projection shortcuts only where shapes differ (option B of He et al.).
        if shortcut.shape != x.shape:
            shortcut = p.batch_norm(train)(p.conv(out, 1, stride, bias=False)(shortcut))
        return nn.relu(x + shortcut)


class ResNet(nn.Module):
    """Stem, four stages of blocks, global average pool, classifier."""

    depth: int
    width: int
    classes: int
    stem: str
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width, 3)."""
        p = self.p
        if self.stem == "imagenet":
            x = p.conv(self.width, 7, 2, bias=False)(x)
            x = nn.relu(p.batch_norm(train)(x))
            x = max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        else:
            # The stem for ImageNet would leave only 8 x 8 pixels of an image of 32 x 32.
            x = nn.relu(p.batch_norm(train)(p.conv(self.width, 3, bias=False)(x)))
        for stage, blocks in enumerate(STAGES[self.depth]):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Block(self.width << stage, stride, self.depth >= 50, p)(x, train)
        x = jnp.mean(x, axis=(1, 2))
        return p.dense(self.classes)(x)


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, image, classes = s["batch"], s["image"], s["classes"]
    return Model(
        ResNet(s["depth"], s["width"], classes, s["stem"], precision(s)),
        {"image": Input((batch, image, image, 3))},
        {"labels": tokens((batch,), classes)},
        class_loss,
    )
