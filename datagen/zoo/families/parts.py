"""Common parts of families: a model with its inputs and loss, precision, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from ....common.errors import OpcastError
from ..workload import PyTree

Settings = Mapping[str, Any]
"""All parameters of a family, each of the type of its default in the catalog."""

MASKED = -3.0e38
"""Score of a hidden key: near the least f32, so that fully hidden rows stay finite."""

Loss = Callable[[PyTree, Mapping[str, jax.Array]], jax.Array]
"""A scalar from a module's output in training and all arguments by name."""


@dataclass(frozen=True)
class Input:
    """An array argument of a program other than its parameters.

    Attributes:
        shape: Shape over all devices.
        dtype: JAX dtype.
        high: Values are integers in ``[0, high)`` (of any dtype); None for standard normal ones.
        split: Whether data parallelism splits axis 0 over the devices.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike = jnp.float32
    high: int | None = None
    split: bool = True

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Values of this argument."""
        if self.high is None:
            return rng.standard_normal(self.shape, dtype=np.float32).astype(self.dtype)
        return rng.integers(0, self.high, self.shape).astype(self.dtype)


def tokens(shape: tuple[int, ...], high: int) -> Input:
    """Make an input of integer identifiers in ``[0, high)``, as int32."""
    return Input(shape, jnp.int32, high)


@dataclass(frozen=True)
class Model:
    """A flax module with everything needed to make it a program.

    Attributes:
        module: Called as ``module(*inputs, train=...)``.
        inputs: Arguments of the module in order; an entry may be a pytree of ``Input``.
        targets: Further arguments that only the loss uses.
        loss: Training objective; None if the family cannot be trained.
        state: Name of an input that the module returns updated beside its output (a cache); it is
            a separate, donated argument.
        dropout: Whether the module draws from a "dropout" stream in training.
        clip_norm: Global norm to which gradients are clipped, or None.
        weight_decay: Decoupled weight decay of adam.
    """

    module: nn.Module
    inputs: Mapping[str, PyTree]
    targets: Mapping[str, Input] = field(default_factory=dict)
    loss: Loss | None = None
    state: str | None = None
    dropout: bool = False
    clip_norm: float | None = None
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Precision:
    """The dtypes of a model: ``compute`` for activations, ``params`` for stored parameters."""

    compute: DTypeLike
    params: DTypeLike

    def dense(self, features: int, *, bias: bool = True, name: str | None = None) -> nn.Dense:
        """A dense layer in this precision."""
        return nn.Dense(
            features, use_bias=bias, dtype=self.compute, param_dtype=self.params, name=name
        )

    def conv(
        self,
        features: int,
        kernel: int | tuple[int, ...],
        stride: int = 1,
        *,
        rank: int = 2,
        bias: bool = True,
        **options: Any,
    ) -> nn.Conv:
        """A convolution in this precision over ``rank`` spatial dimensions, channels last."""
        size = kernel if isinstance(kernel, tuple) else (kernel,) * rank
        return nn.Conv(
            features,
            size,
            strides=(stride,) * rank,
            use_bias=bias,
            dtype=self.compute,
            param_dtype=self.params,
            **options,
        )

    def embed(self, rows: int, features: int, name: str | None = None) -> nn.Embed:
        """An embedding table in this precision."""
        return nn.Embed(rows, features, dtype=self.compute, param_dtype=self.params, name=name)

    def layer_norm(self, epsilon: float = 1e-6) -> nn.LayerNorm:
        """Layer norm over the last axis."""
        return nn.LayerNorm(epsilon=epsilon, dtype=self.compute, param_dtype=self.params)

    def group_norm(self, groups: int) -> nn.GroupNorm:
        """Group norm with ``groups`` groups of channels."""
        return nn.GroupNorm(groups, dtype=self.compute, param_dtype=self.params)

    def batch_norm(self, train: bool) -> nn.BatchNorm:
        """Batch norm that updates its running statistics in training."""
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.compute,
            # Running statistics in bf16 would lose small updates.
            param_dtype=jnp.float32,
        )


def precision(settings: Settings) -> Precision:
    """bf16 keeps f32 master weights in training, and stores bf16 weights for inference."""
    if settings["dtype"] == "f32":
        return Precision(jnp.float32, jnp.float32)
    train = settings["mode"] == "train"
    return Precision(jnp.bfloat16, jnp.float32 if train else jnp.bfloat16)


def filled(module: type[nn.Module], s: Settings, **others: Any) -> nn.Module:
    """Create a module from settings named like its fields, ``others``, and the precision ``p``."""
    known = {own.name: s[own.name] for own in fields(module) if own.name in s}
    return module(**known, **others, p=precision(s))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy in f32; ``logits`` (..., classes), integer ``labels`` (...)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


def class_loss(logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Cross-entropy against the integer target "labels"."""
    return cross_entropy(logits, batch["labels"])


def value_loss(values: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean squared error against the float target "values"."""
    return jnp.mean(jnp.square(values.astype(jnp.float32) - batch["values"]))


def block_names() -> Iterator[str]:
    """Names of a model's blocks in order, whatever the class of its blocks is called."""
    return (f"Block_{number}" for number in count())


def image_classifier(module: nn.Module, s: Settings, **options: Any) -> Model:
    """The model of a module from images (batch, image, image, 3) to logits (batch, classes)."""
    batch, image = s["batch"], s["image"]
    inputs = {"image": Input((batch, image, image, 3))}
    labels = tokens((batch,), s["classes"])
    return Model(module, inputs, {"labels": labels}, class_loss, **options)


def language_model(
    module: nn.Module, s: Settings, loss: Loss = class_loss, clip_norm: float = 1.0, **options: Any
) -> Model:
    """The model of a module from ids (batch, seq) to logits (batch, seq, vocab)."""
    ids = tokens((s["batch"], s["seq"]), s["vocab"])
    return Model(module, {"ids": ids}, {"labels": ids}, loss, clip_norm=clip_norm, **options)


def require(ok: bool, what: str, hint: str) -> None:
    """Raise OpcastError unless ``ok``: settings do not match."""
    if not ok:
        raise OpcastError(what, hint=hint)


def check_heads(dim: int, heads: int) -> None:
    """Raise OpcastError unless ``heads`` divides ``dim``."""
    require(
        dim % heads == 0,
        f"dim={dim} is not a multiple of heads={heads}",
        "choose heads that divide dim",
    )


def parameter(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Initial value of a parameter or running statistic, by its name.

    Kernels are normal with variance 1 / fan-in; names under ``stacked`` have leading axes of
    independent copies (experts, scanned layers), which do not count towards the fan-in.

    Args:
        path: Names from the root to the leaf, joined by "/".
        shape: Its shape.
        rng: Source of the random values.
    """
    # In NumPy and by name rather than by flax's init, which runs the model's forward pass.
    leaf = path.rsplit("/", 1)[-1]
    if leaf in ("scale", "var", "skip"):
        return np.ones(shape, np.float32)
    if leaf in ("bias", "mean"):
        return np.zeros(shape, np.float32)
    # ConvNeXt starts with blocks that are nearly the identity.
    if leaf == "layer_scale":
        return np.full(shape, 1e-6, np.float32)
    # Decay rates 1, 2, 3 … of Mamba's real initialisation (S4D-Real).
    if leaf == "a_log":
        return np.broadcast_to(np.log(np.arange(1, shape[-1] + 1, dtype=np.float32)), shape).copy()
    if leaf == "dt_bias":
        return np.full(shape, -4.6, np.float32)  # softplus(-4.6) = 0.01
    values = rng.standard_normal(shape, dtype=np.float32)
    # The standard deviation of BERT and GPT-2.
    if leaf in ("embedding", "position", "token"):
        return values * np.float32(0.02)
    own = shape[-2:] if "stacked" in path else shape
    return values * np.float32(1.0 / math.sqrt(max(math.prod(own[:-1]), 1)))
