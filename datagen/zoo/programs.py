"""Turns a model into a forward program or a full training step, on one device or data-parallel."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .families.parts import Input, Model, Settings, parameter, require
from .workload import Draw, PyTree, Workload

# JAX has no annotations for these, and a strict checker rejects calls of such functions.
P: Callable[..., PartitionSpec] = PartitionSpec
Struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
pmean: Callable[..., PyTree] = jax.lax.pmean

Leaf = Input | jax.ShapeDtypeStruct

AXIS = "data"
"""Name of the mesh axis of data parallelism."""


def make_workload(name: str, family: str, settings: Settings, model: Model) -> Workload:
    """The workload of a model in the mode that the settings specify."""
    devices = settings["data_parallel"]
    variables = _abstract_variables(model)
    params = variables.pop("params")
    out_specs: PyTree
    if settings["mode"] == "train":
        tx = _optimizer(settings, model)
        function = _train_step(model, tx, AXIS if devices > 1 else None)
        # Shapes only: states of large models would not fit into memory.
        opt_state = jax.eval_shape(tx.init, params)
        args: tuple[PyTree, ...] = (params, variables, opt_state, _train_batch(model))
        donate: tuple[int, ...] = (0, 1, 2)
        out_specs = (P(), P(), P(), P())
    else:
        function = _forward(model)
        batch = {key: value for key, value in model.inputs.items() if key != model.state}
        state = () if model.state is None else (model.inputs[model.state],)
        args = (params, variables, *state, batch)
        donate = (2,) if state else ()
        out_specs = P(AXIS)
    abstract = jax.tree.map(_abstract, args)
    if devices > 1:
        function, abstract = _parallel(function, devices, args, out_specs)
    return Workload(
        name=name,
        family=family,
        settings=dict(settings),
        function=function,
        abstract_args=abstract,
        donate_argnums=donate,
        n_params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        draws=_draws(args, settings["mode"] == "train"),
    )


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return Struct(leaf.shape, leaf.dtype)


def _abstract_variables(model: Model) -> dict[str, PyTree]:
    """Shapes of all collections of the module, determined without computing any."""
    inputs = [jax.tree.map(_abstract, value) for value in model.inputs.values()]
    key = jax.eval_shape(partial(jax.random.key, 0))
    init = partial(model.module.init, train=False)
    return dict(jax.eval_shape(init, key, *inputs))


def _train_batch(model: Model) -> dict[str, PyTree]:
    batch: dict[str, PyTree] = {**model.inputs, **model.targets}
    if model.dropout:
        batch["dropout_key"] = Input((2,), jnp.uint32, 2**32, split=False)
    return batch


def _optimizer(settings: Settings, model: Model) -> optax.GradientTransformation:
    if settings["optimizer"] == "sgd":
        rule = optax.sgd(0.05, momentum=0.9)
    else:
        rule = optax.adamw(1e-3, weight_decay=model.weight_decay)
    if model.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(model.clip_norm), rule)


def _forward(model: Model) -> Callable[..., PyTree]:
    def forward(params: PyTree, variables: PyTree, *rest: PyTree) -> PyTree:
        *state, batch = rest
        values = {**batch, model.state: state[0]} if state else batch
        inputs = [values[name] for name in model.inputs]
        return model.module.apply({"params": params, **variables}, *inputs, train=False)

    return forward


def _train_step(
    model: Model, tx: optax.GradientTransformation, axis: str | None
) -> Callable[..., PyTree]:
    require(model.loss is not None, "this family cannot be trained", "use mode=forward")

    def train_step(params: PyTree, variables: PyTree, opt_state: PyTree, batch: PyTree) -> PyTree:
        rngs = {}
        if model.dropout:
            key = jax.random.wrap_key_data(batch["dropout_key"])
            # Devices drop different elements: the key is mixed with the device's index.
            rngs["dropout"] = (
                key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
            )

        def objective(params: PyTree) -> tuple[jax.Array, PyTree]:
            out, updated = model.module.apply(
                {"params": params, **variables},
                *(batch[name] for name in model.inputs),
                train=True,
                mutable=list(variables),
                rngs=rngs,
            )
            return model.loss(out, batch), updated  # type: ignore[misc]

        (loss, updated), grads = jax.value_and_grad(objective, has_aux=True)(params)
        # One explicit all-reduce per array; combining them is the compiler's choice.
        if axis is not None:
            loss, updated, grads = pmean((loss, updated, grads), axis)
        steps, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, steps), updated, opt_state, loss

    return train_step


def _parallel(
    function: Callable[..., PyTree], devices: int, args: PyTree, out_specs: PyTree
) -> tuple[Callable[..., PyTree], PyTree]:
    """The function over a mesh of ``devices``, with explicit collectives, and its arguments."""
    mesh = AbstractMesh((devices,), (AXIS,))
    specs = jax.tree.map(_spec, args)
    # Replication is not tracked: otherwise gradients would be summed implicitly.
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
    )

    def sharded(leaf: Leaf, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        if len(spec):
            require(
                leaf.shape[0] % devices == 0,
                f"batch of {leaf.shape[0]} cannot be split over data_parallel={devices}",
                "make the batch a multiple of data_parallel",
            )
        return Struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return mapped, jax.tree.map(sharded, args, specs)


def _spec(leaf: Leaf) -> PartitionSpec:
    return P(AXIS) if isinstance(leaf, Input) and leaf.split else P()


def _draws(args: tuple[PyTree, ...], train: bool) -> tuple[Draw, ...]:
    """Generators of the argument leaves, in flattening order."""
    made: list[Draw] = []
    for position, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            if isinstance(leaf, Input):
                made.append(leaf.draw)
            elif train and position == 2:  # the optimizer's state
                made.append(partial(_zeros, leaf.shape, leaf.dtype))
            else:
                names = "/".join(str(getattr(key, "key", key)) for key in path)
                made.append(partial(_initial, names, leaf.shape, leaf.dtype))
    return tuple(made)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, rng: np.random.Generator) -> np.ndarray:
    del rng  # the same signature as the random ones
    return np.zeros(shape, dtype)


def _initial(
    path: str, shape: tuple[int, ...], dtype: DTypeLike, rng: np.random.Generator
) -> np.ndarray:
    return parameter(path, shape, rng).astype(dtype, copy=False)
