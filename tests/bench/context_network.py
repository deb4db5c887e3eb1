"""A message-passing network beside the trees that correct kernels for their place in a program.

Kernels are nodes, dependencies are edges; a node sees the mean of its producers, of its users, and
its neighbours in the schedule. The loss is that of the trees. Everything is cross-validated with
whole families held out, on the training part of ``unseen_family``::

    python tests/bench/context_network.py

prints the family error of the plain sum, of the trees, and of networks with 0, 1 and 2 rounds of
messages. It takes several minutes. The network is not part of the package: messages do harm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from opcast.features.dataset import Dataset
from opcast.models.program.context_choice import (
    SUM,
    context_figures,
    context_programs,
    held_out_shifts,
)
from opcast.models.program.context_trees import BEND_KERNEL, BEND_SUM, MAX_SHIFT, ContextProgram
from opcast.models.training.train import estimator_factory
from opcast.models.training_data.crossfit import fit_and_calibrate
from opcast.models.training_data.prepared import ProgramSample, prepare
from opcast.models.training_data.splits import balanced_folds, make_split
from opcast.workflows.reports.accuracy import COMMITTED

WIDTH, STEPS, RATE, DROPOUT, FOLDS = 32, 150, 5e-3, 0.1, 5


class Network(nn.Module):
    """Corrections of all kernels at once, shape ``(n,)``."""

    rounds: int

    @nn.compact
    def __call__(
        self, values: jax.Array, edges: jax.Array, beside: jax.Array, *, train: bool
    ) -> jax.Array:
        """Standardised features ``(n, f)``, edges ``(2, m)``, kernels before and after ``(2, n)``.

        Returns:
            Logs of the factors.
        """
        node = nn.relu(nn.Dense(WIDTH)(values))
        for _ in range(self.rounds):
            seen = [node, _mean(node, edges), _mean(node, edges[::-1]), *(node[b] for b in beside)]
            node = nn.LayerNorm()(node + nn.relu(nn.Dense(WIDTH)(jnp.concatenate(seen, axis=-1))))
        node = nn.Dropout(DROPOUT, deterministic=not train)(node)
        shift = nn.Dense(1, kernel_init=nn.initializers.zeros)(node)[:, 0]
        return jnp.clip(shift, -MAX_SHIFT, MAX_SHIFT)


def _mean(node: jax.Array, edges: jax.Array) -> jax.Array:
    total = jax.ops.segment_sum(node[edges[0]], edges[1], len(node))
    count = jax.ops.segment_sum(jnp.ones(edges.shape[1]), edges[1], len(node))
    return total / jnp.maximum(count, 1.0)[:, None]


def network_shifts(
    programs: Sequence[ContextProgram], samples: Sequence[ProgramSample], rounds: int
) -> list[np.ndarray]:
    """Held-out corrections of every program, as :func:`held_out_shifts` gives those of trees."""
    sizes = [len(p.predicted_s) for p in programs]
    starts = np.cumsum([0, *sizes])
    where = np.repeat(np.arange(len(programs)), sizes)
    edges, beside = _edges(samples, starts)
    fold = balanced_folds(np.array([p.group for p in programs], object), FOLDS)
    values = np.concatenate([p.features for p in programs])
    labelled = np.concatenate([p.labelled for p in programs])
    label = np.concatenate([p.label_s for p in programs])
    times = np.concatenate([p.predicted_s * p.executions for p in programs])
    ratio = np.where(labelled, np.log(label / np.concatenate([p.predicted_s for p in programs])), 0)
    hashes = np.concatenate([p.hashes for p in programs])
    known = np.array([p.sum_is_known for p in programs])
    spread = values[labelled].std(axis=0) + 1e-6
    values = np.clip((values - values[labelled].mean(axis=0)) / spread, -4, 4)
    found = np.zeros(len(values))
    for number in range(FOLDS):
        held = fold[where] == number
        usable = labelled & ~held & ~np.isin(hashes, hashes[held])
        shift = _fit_predict(
            rounds, values, (edges, beside), (ratio, times, where), usable, known & (fold != number)
        )
        found[held] = shift[held]
    return np.split(found, starts[1:-1])


def _fit_predict(
    rounds: int,
    values: np.ndarray,
    graph: tuple[np.ndarray, np.ndarray],
    target: tuple[np.ndarray, np.ndarray, np.ndarray],
    usable: np.ndarray,
    known: np.ndarray,
) -> np.ndarray:
    ratio, times, where = (jnp.asarray(t) for t in target)
    arrays = (jnp.asarray(values), *(jnp.asarray(g) for g in graph))
    weight, counted = jnp.asarray(usable, float), jnp.asarray(known, float)
    network = Network(rounds)
    params = network.init(jax.random.key(0), *arrays, train=False)
    optimiser = optax.adamw(optax.cosine_decay_schedule(RATE, STEPS), weight_decay=1e-3)
    measured = jax.ops.segment_sum(times * jnp.exp(ratio) * weight, where, len(known))

    def loss(params: optax.Params, key: jax.Array) -> jax.Array:
        shift = network.apply(params, *arrays, train=True, rngs={"dropout": key})
        kernel = optax.huber_loss(shift, ratio, delta=BEND_KERNEL) / BEND_KERNEL
        total = jax.ops.segment_sum(times * jnp.exp(shift) * weight, where, len(known))
        off = jnp.log(jnp.maximum(total, 1e-12) / jnp.maximum(measured, 1e-12))
        program = optax.huber_loss(off, delta=BEND_SUM) / BEND_SUM
        return (kernel * weight).sum() / weight.sum() + (program * counted).sum() / counted.sum()

    @jax.jit
    def step(params: optax.Params, state: optax.OptState, key: jax.Array) -> tuple:
        updates, state = optimiser.update(jax.grad(loss)(params, key), state, params)
        return optax.apply_updates(params, updates), state

    state = optimiser.init(params)
    for key in jax.random.split(jax.random.key(1), STEPS):
        params, state = step(params, state, key)
    return np.asarray(network.apply(params, *arrays, train=False))


def _edges(samples: Sequence[ProgramSample], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dependencies, shape ``(2, m)``, and the kernels before and after each, shape ``(2, n)``."""
    pairs = [
        (start + j, start + i)
        for start, sample in zip(starts.tolist(), samples, strict=False)
        for i, kernel in enumerate(sample.lowered.kernels)
        for j in kernel.operands
        if 0 <= j < i
    ]
    here = np.arange(starts[-1])
    before, after = np.maximum(here - 1, 0), np.minimum(here + 1, starts[-1] - 1)
    before[starts[:-1]], after[starts[1:] - 1] = starts[:-1], starts[1:] - 1
    return np.array(pairs, np.int32).T, np.stack([before, after]).astype(np.int32)


def main() -> None:
    """Print one line a candidate."""
    data = prepare(Dataset.load(COMMITTED))
    parts = make_split(data.frame, "unseen_family", inside=data.inside)
    rows = np.sort(np.concatenate([parts.train, parts.validation]))
    estimator = estimator_factory("xgboost", 0, 1, {})()
    crossed = fit_and_calibrate(estimator, data, rows, "unseen_family")
    samples = [p for p in data.programs if p.row in crossed.program_kernels]
    programs = context_programs(data, crossed, samples)
    candidates = {SUM: [np.zeros(len(p.predicted_s)) for p in programs]}
    candidates["trees"] = held_out_shifts(programs)
    for rounds in (0, 1, 2):
        candidates[f"network, {rounds} rounds"] = network_shifts(programs, samples, rounds)
    for name, shifts in candidates.items():
        found = context_figures(samples, programs, shifts)[1]
        figures = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
        sys.stdout.write(f"{name}: {figures}\n")


if __name__ == "__main__":
    main()
