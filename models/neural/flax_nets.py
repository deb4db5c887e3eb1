"""The networks in Flax, with compiled functions shared by all estimators of equal size.

Imported only to train or evaluate a network, since importing Flax takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from ...features.table.kernel_graph import OPCODES
from .base import CLIP_NORM, Bound, NetworkParams
from .batches import GraphBatch, TableBatch

Array = jax.Array | np.ndarray
#: Inputs of a network: rows of a table, or a batch of graphs.
Inputs = Array | GraphBatch
Weights = Any  # nested mappings of arrays, which JAX calls a PyTree
#: Decay rates of Adam's moments: the defaults of Kingma and Ba (ICLR 2015).
_ADAM = {"b1": 0.9, "b2": 0.999}
#: Layer whose weights start at zero, so that training starts from the median of the target.
_OUT = "out"


class Perceptron(nn.Module):
    """Dense layers with SiLU between them and a single output.

    Attributes:
        hidden: Width of the hidden layers.
        layers: Number of hidden layers.
    """

    hidden: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Raw output, shape ``(rows,)``, for ``x`` of shape ``(rows, c)``."""
        for number in range(self.layers):
            x = nn.silu(nn.Dense(self.hidden, name=f"dense_{number}")(x))
        return nn.Dense(1, name=_OUT)(x)[:, 0]


class FlaxGraphNet(nn.Module):
    """Message passing over the kernels' graphs, then a perceptron.

    A node starts from its opcode's embedding and its features. In every round it takes the mean
    over its producers and the mean over its users, each through separate weights (GraphSAGE:
    Hamilton et al., NeurIPS 2017, in both directions), and adds the result to its state. Mean and
    maximum over the nodes describe the graph; the perceptron takes them with ``x``.

    Attributes:
        hidden: Width of a node.
        rounds: Rounds of message passing.
        head: Width of the perceptron.
        layers: Hidden layers of the perceptron.
    """

    hidden: int
    rounds: int
    head: int
    layers: int

    @nn.compact
    def __call__(self, batch: GraphBatch) -> jax.Array:
        """Raw output, shape ``(rows,)``."""
        # One more graph than rows: the last one has all padding.
        nodes, graphs = len(batch.opcode), len(batch.graph_of_row) + 1
        embedded = nn.Embed(len(OPCODES), self.hidden, name="opcode")(batch.opcode)
        h = nn.silu(embedded + nn.Dense(self.hidden, name="node")(batch.features))
        from_producers = _mean_over(batch.source, batch.target, nodes)
        from_users = _mean_over(batch.target, batch.source, nodes)
        for number in range(self.rounds):
            own = nn.Dense(self.hidden, use_bias=False, name=f"own_{number}")(h)
            producers = nn.Dense(self.hidden, name=f"producers_{number}")(from_producers(h))
            users = nn.Dense(self.hidden, use_bias=False, name=f"users_{number}")(from_users(h))
            h = h + nn.silu(own + producers + users)
        size = jax.ops.segment_sum(jnp.ones(nodes), batch.graph, graphs)[:, None]
        mean = jax.ops.segment_sum(h, batch.graph, graphs) / jnp.maximum(size, 1)
        # The maximum over no nodes is minus infinity: padding graphs use zero instead.
        most = jnp.where(size > 0, jax.ops.segment_max(h, batch.graph, graphs), 0)
        # The mean reflects the mix of ops, the maximum the presence of a rare one.
        pooled = jnp.concatenate([mean, most], axis=1)[batch.graph_of_row]
        seen = jnp.concatenate([pooled, batch.x], axis=1)
        return Perceptron(self.head, self.layers, name="head")(seen)


def _mean_over(source: Array, target: Array, nodes: int) -> Callable[[jax.Array], jax.Array]:
    """Make a function from node states to the mean over each node's sources, zero without any."""
    # Nodes without such edges have degree 0: the guard makes their mean zero.
    degree = jax.ops.segment_sum(jnp.ones(len(target)), target, nodes)
    share = (1 / jnp.maximum(degree, 1))[:, None]
    return lambda h: jax.ops.segment_sum(h[source], target, nodes) * share


class State(NamedTuple):
    """Weights and the state of the optimizer."""

    weights: Weights
    optimiser: optax.OptState


class CompiledNetwork(NamedTuple):
    """Functions of one network, compiled once per input shape.

    Attributes:
        init: From a seed and an example input to a :class:`State`.
        step: One batch: from state, input, targets, row weights, learning rate and bound to a
            state.
        ratio: From weights, input and bound to log-ratios.
    """

    init: Callable[[int, Inputs], State]
    step: Callable[..., State]
    ratio: Callable[..., jax.Array]


@cache
def compiled(network: nn.Module, delta: float, weight_decay: float) -> CompiledNetwork:
    """Compiled functions of a network for a loss smoothed at ``delta``.

    Cached by their arguments, so that folds and estimators of equal size share compiled code.
    """
    # AdamW (Loshchilov and Hutter, ICLR 2019); the learning rate is applied in `step`.
    optimiser = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(**_ADAM),
        optax.add_decayed_weights(weight_decay),
    )

    # The bound is an argument, not a constant of the function: each fold has a different one, and
    # would be compiled separately.
    def ratio(weights: Weights, inputs: Inputs, bound: np.ndarray) -> jax.Array:
        raw = network.apply(weights, inputs)
        return jnp.asarray(Bound(*(bound[i] for i in range(4)))(raw, jax.nn.sigmoid))

    def loss(
        weights: Weights, inputs: Inputs, y: Array, weight: Array, bound: np.ndarray
    ) -> jax.Array:
        residual = ratio(weights, inputs, bound) - y
        return jnp.sum(weight * jnp.sqrt(residual**2 + delta**2)) / jnp.sum(weight)

    def step(
        state: State, inputs: Inputs, y: Array, weight: Array, rate: Array, bound: np.ndarray
    ) -> State:
        gradient = jax.grad(loss)(state.weights, inputs, y, weight, bound)
        update, known = optimiser.update(gradient, state.optimiser, state.weights)
        moved = jax.tree.map(lambda w, u: w - rate * u, state.weights, update)
        return State(moved, known)

    def init(seed: int, example: Inputs) -> State:
        weights = initial_weights(network, seed, example)
        return State(weights, optimiser.init(weights))

    return CompiledNetwork(init, jax.jit(step), jax.jit(ratio))


def initial_weights(network: nn.Module, seed: int, example: Inputs) -> Weights:
    """Normal weights with variance 1 / inputs of the unit (LeCun et al., 1998); zero biases.

    Drawn by NumPy: compiling Flax's initializers takes longer than training a small network.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(network, example).items():
        layer, kind = name.split("/")[-2:]
        # Flax stores an embedding as (entries, width): its output is one row, unlike a dense
        # layer's.
        inputs = shape[1] if kind == "embedding" else shape[0]
        scale = 0.0 if kind == "bias" or layer == _OUT else inputs**-0.5
        arrays[name] = (scale * rng.normal(size=shape)).astype(np.float32)
    return from_arrays(arrays)


def shapes(network: nn.Module, example: Inputs) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, by the names of :func:`to_arrays`."""
    variables = jax.eval_shape(network.init, jax.random.key(0), example)
    return {name: leaf.shape for name, leaf in flatten_dict(variables["params"], sep="/").items()}


def to_arrays(weights: Weights) -> dict[str, np.ndarray]:
    """Weights as plain arrays by name."""
    flat = flatten_dict(weights["params"], sep="/")
    return {name: np.asarray(leaf, np.float32) for name, leaf in flat.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Weights:
    """Restore weights from the arrays of :func:`to_arrays`."""
    return {"params": unflatten_dict(dict(arrays), sep="/")}


class FlaxNetwork:
    """Layers in Flax with their weights and optimizer: a :class:`.base.Network`.

    Args:
        layers: The network.
        example: An example input, which determines the shapes of the weights.
        params: Parameters of the training.
        bound: Bounds of the log-ratios.
        weights: Result of :meth:`arrays`, to predict with; ``None`` draws new ones to train.
    """

    def __init__(
        self,
        layers: nn.Module,
        example: Inputs,
        params: NetworkParams,
        bound: Bound,
        weights: Mapping[str, np.ndarray] | None,
    ) -> None:
        self._functions = compiled(layers, params.delta, params.weight_decay)
        self._bound = bound.to_array()
        self._state = (
            self._functions.init(params.seed, example)
            if weights is None
            else State(from_arrays(weights), optax.EmptyState())
        )

    def step(self, batch: TableBatch | GraphBatch, rate: np.float32) -> None:
        """Train on one batch."""
        self._state = self._functions.step(
            self._state, _inputs(batch), batch.y, batch.weight, rate, self._bound
        )

    def ratio(self, batch: TableBatch | GraphBatch) -> np.ndarray:
        """Log-ratios of the batch's rows, shape ``(rows,)``."""
        return np.asarray(self._functions.ratio(self._state.weights, _inputs(batch), self._bound))

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        return to_arrays(self._state.weights)


def _inputs(batch: TableBatch | GraphBatch) -> Inputs:
    return batch if isinstance(batch, GraphBatch) else batch.x


def example_batch(columns: int, node_columns: int) -> GraphBatch:
    """A batch of zeros that determines the shapes of weights."""
    ids, row = np.zeros(8, np.int32), np.zeros(8, np.float32)
    nodes, x = np.zeros((8, node_columns), np.float32), np.zeros((8, columns), np.float32)
    return GraphBatch(ids, nodes, ids, ids, ids, ids, x, row, row)
