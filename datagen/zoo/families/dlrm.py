"""Deep-learning recommendation model (Naumov et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .parts import Input, Model, Precision, Settings, precision, tokens


class DLRM(nn.Module):
    """Embedding bags, bottom MLP, dot products of all pairs, top MLP."""

    tables: int
    rows: int
    dim: int
    bottom: int
    top: int
    p: Precision

    @nn.compact
    def __call__(self, dense: jax.Array, ids: jax.Array, train: bool) -> jax.Array:
        """Click logits (batch,) of dense (batch, any) and ids (batch, tables, lookups)."""
        p = self.p
        x = dense
        for width in (self.bottom, self.bottom // 2 or 1, self.dim):
            x = nn.relu(p.dense(width)(x))
        vectors = [x]
        for table in range(self.tables):
            looked_up = p.embed(self.rows, self.dim)(ids[:, table])
            vectors.append(jnp.sum(looked_up, axis=1))
        stacked = jnp.stack(vectors, axis=1)
        products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
        # Each pair once, without a vector's product with itself.
        rows, columns = np.tril_indices(self.tables + 1, -1)
        x = jnp.concatenate([x, products[:, rows, columns]], axis=-1)
        for width in (self.top, self.top // 2 or 1):
            x = nn.relu(p.dense(width)(x))
        return p.dense(1)(x)[:, 0]


def _loss(logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(wide, batch["clicks"]))


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch = s["batch"]
    module = DLRM(s["tables"], s["rows"], s["dim"], s["bottom"], s["top"], precision(s))
    inputs = {
        "dense": Input((batch, s["dense"])),
        "ids": tokens((batch, s["tables"], s["lookups"]), s["rows"]),
    }
    return Model(module, inputs, {"clicks": Input((batch,), jnp.float32, 2)}, _loss)
