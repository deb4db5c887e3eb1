"""Families of a few layers: perceptron, recurrent, graph and audio networks, a recommender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .parts import (
    Input,
    Model,
    Precision,
    Settings,
    check_heads,
    class_loss,
    filled,
    language_model,
    require,
    tokens,
    value_loss,
)


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


def model_mlp(s: Settings) -> Model:
    """The perceptron for the settings."""
    batch, outputs = s["batch"], s["outputs"]
    inputs = {"x": Input((batch, s["features"]))}
    if s["target"] == "value":
        return Model(filled(MLP, s), inputs, {"values": Input((batch, outputs))}, value_loss)
    return Model(filled(MLP, s), inputs, {"labels": tokens((batch,), outputs)}, class_loss)


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


def model_lstm(s: Settings) -> Model:
    """The recurrent model for the settings."""
    return language_model(filled(RecurrentLM, s), s, clip_norm=0.25)


class Convolution(nn.Module):
    """One round of messages along edges: (nodes, any) to (nodes, dim).

    After Kipf and Welling (2017), Veličković et al. (2018) and Gilmer et al. (2017):

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

    conv: str
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
            message = Convolution(self.conv, self.dim, self.heads, self.p)(h, *ends)
            h = h + nn.relu(self.p.layer_norm()(message))
        return self.p.dense(self.classes)(h).reshape(graphs, nodes, self.classes)


def model_gnn(s: Settings) -> Model:
    """The graph network for the settings."""
    batch, nodes, edges = s["batch"], s["nodes"], s["edges"]
    if s["conv"] == "gat":
        check_heads(s["dim"], s["heads"])
    require(batch * nodes < 2**31, "there are more nodes than int32 can count", "lower nodes")
    ends = tokens((batch, edges), nodes)
    inputs = {"x": Input((batch, nodes, s["features"])), "senders": ends, "receivers": ends}
    labels = tokens((batch, nodes), s["classes"])
    return Model(filled(GNN, s), inputs, {"labels": labels}, class_loss)


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


def _click_loss(logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(wide, batch["clicks"]))


def model_dlrm(s: Settings) -> Model:
    """The recommender for the settings."""
    batch = s["batch"]
    inputs = {
        "dense": Input((batch, s["dense"])),
        "ids": tokens((batch, s["tables"], s["lookups"]), s["rows"]),
    }
    clicks = Input((batch,), jnp.float32, 2)
    return Model(filled(DLRM, s), inputs, {"clicks": clicks}, _click_loss)


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


def model_convnet_1d(s: Settings) -> Model:
    """The audio classifier for the settings."""
    inputs = {"samples": Input((s["batch"], s["samples"]))}
    labels = tokens((s["batch"],), s["classes"])
    return Model(filled(AudioNet, s), inputs, {"labels": labels}, class_loss)
