"""Graph network for node classification: gathers along edges, segment sums at receivers.

Convolutions after Kipf and Welling (2017), Veličković et al. (2018) and Gilmer et al. (2017).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import check_heads
from .parts import Input, Model, Precision, Settings, class_loss, precision, require, tokens


class Convolution(nn.Module):
    """One round of messages: (nodes, any) to (nodes, dim).

    "gcn" averages linear messages, "gat" weighs them by attention over each receiver's edges,
    "mpnn" passes sender and receiver through an MLP and sums.
    """

    kind: str
    dim: int
    heads: int
    p: Precision

    @nn.compact
    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """New node features from ``senders`` and ``receivers`` (edges,)."""
        p, nodes = self.p, x.shape[0]
        if self.kind == "gat":
            return p.dense(self.dim)(x) + self._attention(x, senders, receivers)
        if self.kind == "mpnn":
            pair = jnp.concatenate([x[senders], x[receivers]], axis=-1)
            message = p.dense(self.dim)(nn.relu(p.dense(self.dim)(pair)))
            total = jax.ops.segment_sum(message, receivers, nodes)
            return p.dense(self.dim)(jnp.concatenate([x, total], axis=-1))
        message = p.dense(self.dim, bias=False)(x)[senders]
        # Nodes without edges have a degree of 0: no division by it.
        ones = jnp.ones(senders.shape, x.dtype)
        degree = jnp.maximum(jax.ops.segment_sum(ones, receivers, nodes), 1)
        total = jax.ops.segment_sum(message, receivers, nodes)
        return p.dense(self.dim)(x) + total / degree[:, None]

    def _attention(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """Multi-head attention of each receiver over its senders (Brody et al. 2022)."""
        p, nodes, size = self.p, x.shape[0], self.dim // self.heads
        sent = p.dense(self.dim)(x).reshape(nodes, self.heads, size)[senders]
        received = p.dense(self.dim)(x).reshape(nodes, self.heads, size)[receivers]
        scores = p.dense(1, bias=False)(nn.leaky_relu(sent + received, 0.2)).astype(jnp.float32)
        # A softmax over the edges of each receiver; its maximum is subtracted against overflow and
        # needs no gradient.
        highest = jax.ops.segment_max(scores, receivers, nodes)
        weights = jnp.exp(scores - jax.lax.stop_gradient(highest)[receivers])
        total = jax.ops.segment_sum(weights, receivers, nodes)
        # Guards the division where all weights underflow.
        weights = (weights / (total[receivers] + 1e-9)).astype(x.dtype)
        out = jax.ops.segment_sum(weights * sent, receivers, nodes)
        return out.reshape(nodes, self.dim)


class GNN(nn.Module):
    """Rounds of messages with residuals and layer norm, then a classifier of nodes."""

    kind: str
    layers: int
    dim: int
    heads: int
    classes: int
    p: Precision

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array, train: bool
    ) -> jax.Array:
        """Logits (graphs, nodes, classes) of a batch of graphs with equal sizes."""
        graphs, nodes, features = x.shape
        # Graphs are joined into one with disjoint components, as batching libraries do.
        offset = (jnp.arange(graphs, dtype=senders.dtype) * nodes)[:, None]
        ends = (senders + offset).reshape(-1), (receivers + offset).reshape(-1)
        h = self.p.dense(self.dim)(x.reshape(graphs * nodes, features))
        for _ in range(self.layers):
            message = Convolution(self.kind, self.dim, self.heads, self.p)(h, *ends)
            h = h + nn.relu(self.p.layer_norm()(message))
        return self.p.dense(self.classes)(h).reshape(graphs, nodes, self.classes)


def model(s: Settings) -> Model:
    """The model for the settings."""
    batch, nodes, edges = s["batch"], s["nodes"], s["edges"]
    if s["conv"] == "gat":
        check_heads(s["dim"], s["heads"])
    require(batch * nodes < 2**31, "there are more nodes than int32 can count", "lower nodes")
    module = GNN(s["conv"], s["layers"], s["dim"], s["heads"], s["classes"], precision(s))
    ends = tokens((batch, edges), nodes)
    inputs = {"x": Input((batch, nodes, s["features"])), "senders": ends, "receivers": ends}
    return Model(module, inputs, {"labels": tokens((batch, nodes), s["classes"])}, class_loss)
