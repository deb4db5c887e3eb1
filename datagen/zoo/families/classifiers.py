"""Convolutional image classifiers.

ResNet v1.5, with its stride in the 3x3 convolution (He et al. 2015 and 2016), ConvNeXt (Liu et al.
2022) and EfficientNet (Tan and Le 2019).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Model, Precision, Settings, block_names, filled, image_classifier, require

max_pool: Any = nn.max_pool  # without annotations in flax
EFFICIENTNET_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Expansion, channels, repeats, stride and kernel size of each stage of b0."""


class ResNetBlock(nn.Module):
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

    blocks: tuple[int, ...]
    bottleneck: bool
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
        names = block_names()
        for stage, blocks in enumerate(self.blocks):
            for place in range(blocks):
                width, stride = self.width << stage, 2 if stage > 0 and place == 0 else 1
                block = ResNetBlock(width, stride, self.bottleneck, p, name=next(names))
                x = block(x, train)
        x = jnp.mean(x, axis=(1, 2))
        return p.dense(self.classes)(x)


def model_resnet(s: Settings) -> Model:
    """ResNet for the settings."""
    return image_classifier(filled(ResNet, s), s)


class ConvNeXtBlock(nn.Module):
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
    """Patch stem, four stages with strided convolutions between them."""

    blocks: tuple[int, ...]
    dim: int
    classes: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width, 3)."""
        p = self.p
        x = p.layer_norm()(p.conv(self.dim, 4, 4, padding="VALID")(x))
        names = block_names()
        for stage, blocks in enumerate(self.blocks):
            if stage > 0:
                x = p.conv(self.dim << stage, 2, 2, padding="VALID")(p.layer_norm()(x))
            for _ in range(blocks):
                x = ConvNeXtBlock(p, name=next(names))(x)
        x = p.layer_norm()(jnp.mean(x, axis=(1, 2)))
        return p.dense(self.classes)(x)


def model_convnext(s: Settings) -> Model:
    """ConvNeXt for the settings."""
    image = s["image"]
    require(image >= 32, f"an image of {image} vanishes in four stages", "use image of 32 or more")
    return image_classifier(filled(ConvNeXt, s), s, weight_decay=0.05)


def scaled_channels(channels: int, width: float) -> int:
    """Scale channels by width, rounded to a multiple of 8 and by no more than a tenth down."""
    # ``round_filters`` of the reference implementation.
    rounded = max(8, int(channels * width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels * width else rounded


class InvertedBottleneck(nn.Module):
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
        names = block_names()
        for expand, channels, repeats, first_stride, kernel in EFFICIENTNET_STAGES:
            out = scaled_channels(channels, self.width)
            for place in range(math.ceil(repeats * self.depth)):
                stride = first_stride if place == 0 else 1
                x = InvertedBottleneck(expand, out, stride, kernel, p, name=next(names))(x, train)
        head = scaled_channels(1280, self.width)
        x = nn.silu(p.batch_norm(train)(p.conv(head, 1, bias=False)(x)))
        return p.dense(self.classes)(jnp.mean(x, axis=(1, 2)))


def model_efficientnet(s: Settings) -> Model:
    """EfficientNet for the settings."""
    return image_classifier(filled(EfficientNet, s), s)
