"""Audio classifier over raw samples: strided stem as in wav2vec 2.0, then dilated residuals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, class_loss, precision, tokens


class DilatedBlock(nn.Module):
    """Gated dilated convolution with residual (van den Oord et al. 2016)."""

    dilation: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, channels) to the same shape."""
        p, channels = self.p, x.shape[-1]
        y = p.conv(2 * channels, 3, rank=1, kernel_dilation=(self.dilation,))(p.layer_norm()(x))
        value, gate = jnp.split(y, 2, axis=-1)
        return x + p.conv(channels, 1, rank=1)(nn.tanh(value) * nn.sigmoid(gate))


class AudioNet(nn.Module):
    """Stem that shortens the length, dilated blocks, mean over time, classifier."""

    channels: int
    stem_layers: int
    blocks: int
    classes: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, classes) of samples (batch, length)."""
        p = self.p
        # Windows and strides of wav2vec 2.0's feature encoder (Baevski et al. 2020): 10/5, 3/2 …
        x = p.conv(self.channels, 10, 5, rank=1)(x[:, :, None])
        for _ in range(self.stem_layers - 1):
            x = p.conv(self.channels, 3, 2, rank=1, bias=False)(nn.gelu(p.layer_norm()(x)))
        for block in range(self.blocks):
            # Dilations 1, 2, 4, 8, again and again, as in WaveNet's stacks.
            x = DilatedBlock(1 << block % 4, p)(x)
        return p.dense(self.classes)(jnp.mean(nn.gelu(p.layer_norm()(x)), axis=1))


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, classes = s["batch"], s["classes"]
    module = AudioNet(s["channels"], s["stem_layers"], s["blocks"], classes, precision(s))
    return Model(
        module,
        {"samples": Input((batch, s["samples"]))},
        {"labels": tokens((batch,), classes)},
        class_loss,
    )
