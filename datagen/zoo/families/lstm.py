"""Recurrent language model: stacked LSTM or GRU layers, each a loop over time."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from .parts import Model, Precision, Settings, class_loss, precision, tokens


class RecurrentLM(nn.Module):
    """Embedding, recurrent layers, vocabulary projection."""

    layers: int
    dim: int
    vocab: int
    cell: str
    p: Precision

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        """Logits (batch, length, vocab) of ids (batch, length)."""
        # The optimised cell joins the products of its four gates into one.
        kind: Any = nn.OptimizedLSTMCell if self.cell == "lstm" else nn.GRUCell
        x = self.p.embed(self.vocab, self.dim)(ids)
        for _ in range(self.layers):
            cell = kind(self.dim, dtype=self.p.compute, param_dtype=self.p.params)
            x = nn.RNN(cell)(x)
        return self.p.dense(self.vocab)(x)


def model(s: Settings) -> Model:
    """The model for the settings."""
    ids = tokens((s["batch"], s["seq"]), s["vocab"])
    module = RecurrentLM(s["layers"], s["dim"], s["vocab"], s["cell"], precision(s))
    return Model(module, {"ids": ids}, {"labels": ids}, class_loss, clip_norm=0.25)
