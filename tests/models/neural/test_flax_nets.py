"""The networks in Flax by themselves: weights, messages, compiled functions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from opcast.models.neural.base import Bound
from opcast.models.neural.flax_nets import (
    FlaxGraphNet,
    Perceptron,
    _mean_over,
    compiled,
    example_batch,
    from_arrays,
    initial_weights,
    shapes,
    to_arrays,
)

BOUND = Bound.fit(np.array([-1.0, 0.5, 3.0]))
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def test_nodes_take_the_mean_over_their_edges_and_zero_without() -> None:
    # 0 → 2, 1 → 2, 2 → 1: node 2 takes the mean of 0 and 1, node 1 takes 2, node 0 nothing.
    mean = _mean_over(jnp.array([0, 1, 2]), jnp.array([2, 2, 1]), 3)
    values = jnp.array([[1.0], [3.0], [10.0]])
    assert mean(values).tolist() == [[0.0], [10.0], [2.0]]


def test_untrained_networks_answer_the_median_of_the_target() -> None:
    network = Perceptron(hidden=8, layers=2)
    ratio = compiled(network, 0.1, 0.0).ratio(initial_weights(network, 0, X), X, BOUND.to_array())
    np.testing.assert_allclose(ratio, 0.5, atol=1e-6)  # the last layer starts at zero


def test_weights_depend_on_the_seed_alone() -> None:
    network = Perceptron(hidden=8, layers=1)
    first, same, other = (to_arrays(initial_weights(network, s, X)) for s in (0, 0, 1))
    for name, array in first.items():
        np.testing.assert_array_equal(array, same[name])
    assert not np.array_equal(first["dense_0/kernel"], other["dense_0/kernel"])


def test_arrays_of_a_graph_network_have_the_declared_shapes_and_come_back() -> None:
    network, batch = FlaxGraphNet(hidden=8, rounds=2, head=8, layers=1), example_batch(3, 5)
    weights = initial_weights(network, 0, batch)
    arrays = to_arrays(weights)
    assert {name: array.shape for name, array in arrays.items()} == shapes(network, batch)
    again = to_arrays(from_arrays(arrays))
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())


def test_a_step_lowers_the_loss_and_padding_has_no_weight() -> None:
    network, bound = Perceptron(hidden=8, layers=1), BOUND.to_array()
    functions = compiled(network, 0.1, 0.0)
    y, weight = X[:, 0] * 0.3 + 0.5, np.ones(16, np.float32)
    state = functions.init(0, X)
    before = float(np.abs(functions.ratio(state.weights, X, bound) - y).mean())
    moved = state
    for _ in range(20):
        moved = functions.step(moved, X, y, weight, 1e-2, bound)
    assert float(np.abs(functions.ratio(moved.weights, X, bound) - y).mean()) < before
    weight[8:] = 0
    wild = np.where(weight > 0, y, 1e3).astype(np.float32)
    padded = functions.step(state, X, wild, weight, 1e-2, bound)
    tame = functions.step(state, X, np.where(weight > 0, y, 0.0), weight, 1e-2, bound)
    for name, array in to_arrays(padded.weights).items():
        np.testing.assert_allclose(array, to_arrays(tame.weights)[name], atol=1e-6)
