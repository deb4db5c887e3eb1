"""Vision transformer (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import FeedForward, SelfAttention, check_heads
from .parts import Input, Model, Precision, Settings, class_loss, precision, require, tokens


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


def model(s: Settings) -> Model:
    """The model for the settings."""
    check_heads(s["dim"], s["heads"])
    batch, image, patch, classes = s["batch"], s["image"], s["patch"], s["classes"]
    require(
        image % patch == 0,
        f"image={image} is not a multiple of patch={patch}",
        "choose a patch that divides image",
    )
    return Model(
        ViT(s["layers"], s["dim"], s["heads"], s["hidden"], patch, classes, precision(s)),
        {"image": Input((batch, image, image, 3))},
        {"labels": tokens((batch,), classes)},
        class_loss,
        clip_norm=1.0,
        weight_decay=0.1,
    )
