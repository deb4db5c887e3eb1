"""Full training steps of exported modules: forward, loss, backward and optimiser update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import optax

from ....common.errors import ProgramError
from ..jax_function import FunctionCall
from .export import Exported, export, jax_dtype
from .program import RULES, Loss, TorchProgram, check_loss
from .translate import Forward

if TYPE_CHECKING:
    import torch

#: Tensors by name.
_Named: TypeAlias = dict[str, jax.Array]
#: Inputs of a step: the module's, and the labels of the loss.
_Inputs: TypeAlias = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
#: Outputs of a module.
_Outputs: TypeAlias = tuple[object, ...]

_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3, weight_decay=1e-2),
    "adam": lambda: optax.adam(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
}
assert tuple(_OPTIMIZERS) == RULES


class Translated:
    """A PyTorch program in JAX.

    Args:
        program: The program.

    Raises:
        ProgramError: It cannot be exported, or an operator has no translation.
    """

    def __init__(self, program: TorchProgram) -> None:
        self._program = program
        self.forward = Forward(export(program))

    def call(self) -> FunctionCall:
        """Return the function with its abstract arguments, a new one on each call.

        JAX caches traces by function, but attention has to be traced anew for each platform.

        Raises:
            ProgramError: The outputs do not include a loss to train with.
        """
        program = self._program
        return _step(self.forward, program) if program.train else _inference(self.forward)


def _key(forward: Forward) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((2,), jnp.uint32),) if forward.random else ()


def _wrapped(key: tuple[jax.Array, ...]) -> jax.Array | None:
    return jax.random.wrap_key_data(key[0], impl="threefry2x32") if key else None


def _inference(forward: Forward) -> FunctionCall:
    def run(
        parameters: _Named, state: _Named, inputs: tuple[jax.Array, ...], *key: jax.Array
    ) -> tuple[_Outputs, _Named]:
        return forward(parameters, state, inputs, _wrapped(key))

    arguments = (forward.parameters, forward.state, forward.inputs, *_key(forward))
    run.__name__ = "forward"
    # Buffers that change, such as KV caches, change in place.
    return FunctionCall(jax.jit(run, donate_argnums=1), arguments, {}, forward.exported.name)


def _step(forward: Forward, program: TorchProgram) -> FunctionCall:
    if not forward.trained:
        raise ProgramError(
            "no parameter takes a gradient",
            where=forward.exported.name,
            hint="set requires_grad before the export, or predict the forward pass (no --train)",
        )
    optimizer = _OPTIMIZERS[program.train.partition("-")[0]]()
    loss, more = _loss(forward, program.loss)
    names = set(forward.trained)

    def step(
        trained: _Named,
        kept: _Named,
        optimizer_state: optax.OptState,
        state: _Named,
        inputs: _Inputs,
        *key: jax.Array,
    ) -> tuple[jax.Array, _Named, optax.OptState, _Named]:
        own, labels = inputs

        def objective(weights: _Named) -> tuple[jax.Array, _Named]:
            outputs, moved = forward({**kept, **weights}, state, own, _wrapped(key))
            return loss(outputs, labels), moved

        (value, moved), gradients = jax.value_and_grad(objective, has_aux=True)(trained)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, trained)
            return value, optax.apply_updates(trained, updates), optimizer_state, moved

    trained = {n: t for n, t in forward.parameters.items() if n in names}
    kept = {n: t for n, t in forward.parameters.items() if n not in names}
    initial = jax.eval_shape(optimizer.init, trained)
    arguments = (trained, kept, initial, forward.state, (forward.inputs, more), *_key(forward))
    return FunctionCall(
        jax.jit(step, donate_argnums=(0, 2, 3)), arguments, {}, forward.exported.name
    )


def output_types(forward: Forward) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes and types of a module's tensor outputs."""
    values = [node.meta["val"] for node in output_nodes(forward) if "val" in node.meta]
    where = forward.exported.name
    return tuple(
        jax.ShapeDtypeStruct(tuple(v.shape), jax_dtype(v.dtype, where))
        for v in values
        if hasattr(v, "dtype")
    )


def output_nodes(forward: Forward) -> list[torch.fx.Node]:
    """Return the nodes of the graph that are the user's outputs."""
    found = next(n for n in forward.graph.graph.nodes if n.op == "output").args[0]
    kinds = forward.graph.graph_signature.output_specs
    pairs = zip(found, kinds, strict=True)
    return [n for n, s in pairs if s.kind.name == "USER_OUTPUT" and hasattr(n, "meta")]


def _loss(
    forward: Forward, loss: Loss
) -> tuple[
    Callable[[_Outputs, tuple[jax.Array, ...]], jax.Array], tuple[jax.ShapeDtypeStruct, ...]
]:
    """Return the loss as a function of outputs and labels, and the labels' shapes."""
    outputs = output_types(forward)
    first = outputs[0] if outputs else None
    where = forward.exported.name
    check_loss(loss, outputs[:1], where)
    if loss is None:
        return lambda found, _: _tensors(found)[0].reshape(()).astype(jnp.float32), ()
    if loss == "sum":
        return _sum, ()
    # A label per output position; classes are the last dimension, as in language models.
    if loss == "cross_entropy":
        assert first is not None
        labels = jax.ShapeDtypeStruct(first.shape[:-1], jnp.int32)
        return _cross_entropy, (labels,)
    assert callable(loss), loss
    translated = Forward(_exported_loss(forward, loss))
    if translated.parameters or translated.random:
        raise ProgramError(
            "the loss has parameters or draws random numbers",
            where=where,
            hint="make it part of the module, which then returns its loss",
        )

    def by_user(found: _Outputs, _: object) -> jax.Array:
        values, _moved = translated({}, {}, tuple(_tensors(found)))
        return _tensors(values)[0].reshape(()).astype(jnp.float32)

    return by_user, ()


def _tensors(outputs: _Outputs) -> list[jax.Array]:
    return [x for x in outputs if isinstance(x, jax.Array)]


def _sum(outputs: _Outputs, _: object) -> jax.Array:
    floats = [x for x in _tensors(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.sum(x.astype(jnp.float32)) for x in floats]).sum()


def _cross_entropy(outputs: _Outputs, labels: tuple[jax.Array, ...]) -> jax.Array:
    logits = _tensors(outputs)[0].astype(jnp.float32)
    with jax.named_scope("cross_entropy"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[0]).mean()


def _exported_loss(forward: Forward, loss: Callable[..., object]) -> Exported:
    """Export a user's loss on the shapes of the module's outputs.

    Raises:
        ProgramError: PyTorch cannot export it.
    """
    import torch

    class Objective(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *outputs: torch.Tensor) -> object:
            tree = torch.utils._pytree.tree_unflatten(list(outputs), spec)
            return loss(tree)

    spec = forward.graph.call_spec.out_spec
    values = [node.meta["val"] for node in output_nodes(forward)]
    examples = tuple(torch.zeros(tuple(v.shape), dtype=v.dtype) for v in values)
    return export(TorchProgram(Objective(), examples))
