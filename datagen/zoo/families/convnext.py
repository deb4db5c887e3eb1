"""ConvNeXt (Liu et al. 2022): patch stem, depthwise 7x7 blocks, layer norm and layer scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, class_loss, precision, require, tokens

SIZES = {
    "atto": ((2, 2, 6, 2), 40),
    "femto": ((2, 2, 6, 2), 48),
    "pico": ((2, 2, 6, 2), 64),
    "nano": ((2, 2, 8, 2), 80),
    "tiny": ((3, 3, 9, 3), 96),
    "small": ((3, 3, 27, 3), 96),
    "base": ((3, 3, 27, 3), 128),
}
"""Blocks in each stage and channels of the first one (Liu et al. 2022; small ones from timm)."""


class Block(nn.Module):
    """Depthwise 7x7, layer norm, fourfold inverted bottleneck, layer scale, residual."""

    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels) to the same shape."""
        p, dim = self.p, x.shape[-1]
        y = p.conv(dim, 7, feature_group_count=dim)(x)
        # A 1x1 convolution written as a dense layer over channels, as in the reference.
        y = nn.gelu(p.dense(4 * dim)(p.layer_norm()(y)))
        y = p.dense(dim)(y)
        scale = self.param("layer_scale", nn.initializers.constant(1e-6), (dim,), p.params)
        return x + scale.astype(y.dtype) * y


class ConvNeXt(nn.Module):
    """Four stages with strided convolutions between them."""

    blocks: tuple[int, ...]
    dim: int
    classes: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width, 3)."""
        p = self.p
        x = p.layer_norm()(p.conv(self.dim, 4, 4, padding="VALID")(x))
        for stage, blocks in enumerate(self.blocks):
            if stage > 0:
                x = p.conv(self.dim << stage, 2, 2, padding="VALID")(p.layer_norm()(x))
            for _ in range(blocks):
                x = Block(p)(x)
        x = p.layer_norm()(jnp.mean(x, axis=(1, 2)))
        return p.dense(self.classes)(x)


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, image, classes = s["batch"], s["image"], s["classes"]
    require(image >= 32, f"an image of {image} vanishes in four stages", "use image of 32 or more")
    blocks, dim = SIZES[s["size"]]
    return Model(
        ConvNeXt(blocks, dim, classes, precision(s)),
        {"image": Input((batch, image, image, 3))},
        {"labels": tokens((batch,), classes)},
        class_loss,
        weight_decay=0.05,
    )
