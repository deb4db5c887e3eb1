"""Multi-layer perceptron: dense, layer norm, activation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, class_loss, precision, tokens, value_loss


class MLP(nn.Module):
    """``layers`` hidden layers of ``width``: (batch, features) to (batch, outputs)."""

    width: int
    layers: int
    outputs: int
    activation: str
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Logits or values for each row."""
        # The catalogue's choices are names in flax.
        act = getattr(nn, self.activation)
        for _ in range(self.layers):
            x = act(self.p.layer_norm()(self.p.dense(self.width)(x)))
        return self.p.dense(self.outputs)(x)


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, outputs = s["batch"], s["outputs"]
    module = MLP(s["width"], s["layers"], outputs, s["activation"], precision(s))
    inputs = {"x": Input((batch, s["features"]))}
    if s["target"] == "value":
        values = {"values": Input((batch, outputs), jnp.float32)}
        return Model(module, inputs, values, value_loss)
    return Model(module, inputs, {"labels": tokens((batch,), outputs)}, class_loss)
