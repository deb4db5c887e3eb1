"""Whole steps in plain JAX, for hosts without the zoo's packages: a Llama and a ResNet.

Weights are arguments, and layers are unrolled as in most compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ...common.errors import ProfileError
from ...common.types import JsonMapping
from .jax_ops import convolve, cross_entropy, rms_norm, rope

if TYPE_CHECKING:
    import jax

#: Weights by name.
Tree: TypeAlias = dict[str, "jax.Array"]
#: Blocks of the stages of ResNets with bottlenecks, by depth (He et al., 2016, table 1).
_STAGES = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    import jax

    make: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
    return make(shape, dtype)


def _structs(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: _struct(shape, dtype) for name, shape in shapes.items()}


def _step(loss: Callable[..., jax.Array], train: bool) -> Callable[..., object]:
    """A forward pass, or a step with AdamW, whose state is in f32."""
    import jax
    import jax.numpy as jnp

    if not train:
        return loss

    def update(w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        wide = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * wide, 0.95 * v + 0.05 * wide * wide
        return (w - 3e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype), m, v

    def step(
        weights: Tree, means: Tree, squares: Tree, *batch: jax.Array
    ) -> tuple[Tree | jax.Array, ...]:
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        new = {n: update(w, grads[n], means[n], squares[n]) for n, w in weights.items()}
        return *({n: own[i] for n, own in new.items()} for i in range(3)), value

    return step


def _arguments(
    weights: Mapping[str, jax.ShapeDtypeStruct], batch: Sequence[jax.ShapeDtypeStruct], train: bool
) -> tuple[object, ...]:
    if not train:
        return (weights, *batch)
    state = {n: _struct(w.shape, "float32") for n, w in weights.items()}
    return (weights, state, dict(state), *batch)


def llama(spec: JsonMapping) -> tuple[Callable[..., object], tuple[object, ...]]:
    """A Llama: prefill and loss (``forward``), ``train``, or one token of a ``decode``.

    Args:
        spec: ``layers``, ``width``, ``heads``, ``kv_heads``, ``ffn``, ``vocabulary``, ``batch``,
            ``length``, ``dtype`` and ``mode``.
    """
    import jax
    import jax.numpy as jnp

    width, heads, kv, ffn = (spec[n] for n in ("width", "heads", "kv_heads", "ffn"))
    head, batch, length = width // heads, spec["batch"], spec["length"]
    decode, train = spec["mode"] == "decode", spec["mode"] == "train"
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec["vocabulary"], width), "norm": (width,)}
    for i in range(spec["layers"]):
        shapes |= {
            f"{i}.qkv": (width, (heads + 2 * kv) * head),
            f"{i}.out": (heads * head, width),
            f"{i}.up": (width, 2 * ffn),
            f"{i}.down": (ffn, width),
            f"{i}.norm1": (width,),
            f"{i}.norm2": (width,),
        }

    norm = partial(rms_norm, epsilon=1e-5)

    def rotate(x: jax.Array, at: jax.Array) -> jax.Array:
        rates = 500000.0 ** (-jnp.arange(0, head, 2) / head)
        return rope(x, (at[:, None] * rates)[None, :, None, :])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, masked: bool) -> jax.Array:
        q = q.reshape(*q.shape[:2], kv, heads // kv, head)
        s = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) / math.sqrt(head)
        if masked:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
        p = jax.nn.softmax(s).astype(v.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", p, v).reshape(*q.shape[:2], heads * head)

    def logits(
        w: Tree, tokens: jax.Array, cache: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        x = w["embed"][tokens]
        at = jnp.arange(x.shape[1]) + (length - 1 if decode else 0)
        kept = []
        for i in range(spec["layers"]):
            qkv = norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"]
            q, k, v = jnp.split(qkv, (heads * head, (heads + kv) * head), axis=-1)
            q = rotate(q.reshape(*q.shape[:2], heads, head), at)
            k = rotate(k.reshape(*k.shape[:2], kv, head), at)
            v = v.reshape(*v.shape[:2], kv, head)
            if decode:
                k, v = (
                    jax.lax.dynamic_update_slice(old, new, (0, length - 1, 0, 0))
                    for old, new in zip(cache[2 * i : 2 * i + 2], (k, v), strict=True)
                )
                kept += [k, v]
            x = x + attend(q, k, v, not decode) @ w[f"{i}.out"]
            up, gate = jnp.split(norm(x, w[f"{i}.norm2"]) @ w[f"{i}.up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ w[f"{i}.down"]
        return norm(x, w["norm"]) @ w["embed"].T, kept

    def loss(w: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(logits(w, tokens, [])[0], targets)

    def one(w: Tree, tokens: jax.Array, cache: list[jax.Array]) -> tuple[object, ...]:
        found, kept = logits(w, tokens, cache)
        return found.argmax(-1), kept

    weights = _structs(shapes, spec["dtype"])
    tokens = _struct((batch, 1 if decode else length), "int32")
    if decode:
        cache = _struct((batch, length, kv, head), spec["dtype"])
        return one, (weights, tokens, [cache] * (2 * spec["layers"]))
    return _step(loss, train), _arguments(weights, [tokens, tokens], train)


def resnet(spec: JsonMapping) -> tuple[Callable[..., object], tuple[object, ...]]:
    """A ResNet with bottlenecks, channels last: ``forward`` with batch statistics, or ``train``.

    Args:
        spec: ``depth`` (26, 50 or 101), ``width`` of the stem, ``image``, ``batch``, ``dtype`` and
            ``mode``.
    """
    import jax
    import jax.numpy as jnp

    shapes: dict[str, tuple[int, ...]] = {}
    width = spec["width"]

    def conv_shape(name: str, kernel: int, cin: int, cout: int) -> None:
        shapes[name] = (kernel, kernel, cin, cout)
        shapes[f"{name}.scale"] = shapes[f"{name}.shift"] = (cout,)

    blocks: list[tuple[str, int]] = []
    conv_shape("stem", 7, 3, width)
    cin = width
    for stage, count in enumerate(_STAGES[spec["depth"]]):
        inner = width * 2**stage
        for block in range(count):
            name = f"{stage}.{block}"
            blocks.append((name, 2 if stage and not block else 1))
            conv_shape(f"{name}.a", 1, cin, inner)
            conv_shape(f"{name}.b", 3, inner, inner)
            conv_shape(f"{name}.c", 1, inner, 4 * inner)
            if not block:
                conv_shape(f"{name}.skip", 1, cin, 4 * inner)
            cin = 4 * inner
    shapes["head"] = (cin, 1000)

    def conv(w: Tree, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        y = convolve(x, w[name], stride)
        f = y.astype(jnp.float32)
        mean = f.mean((0, 1, 2))
        centred = f - mean
        scale = jax.lax.rsqrt((centred * centred).mean((0, 1, 2)) + 1e-5)
        out: jax.Array = (centred * scale).astype(y.dtype) * w[f"{name}.scale"] + w[f"{name}.shift"]
        return out

    def loss(w: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(conv(w, "stem", images, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for name, stride in blocks:
            y = jax.nn.relu(conv(w, f"{name}.a", x))
            y = conv(w, f"{name}.c", jax.nn.relu(conv(w, f"{name}.b", y, stride)))
            skip = conv(w, f"{name}.skip", x, stride) if f"{name}.skip" in w else x
            x = jax.nn.relu(y + skip)
        return cross_entropy(x.mean((1, 2)) @ w["head"], labels)

    train = spec["mode"] == "train"
    images = _struct((spec["batch"], spec["image"], spec["image"], 3), spec["dtype"])
    labels = _struct((spec["batch"],), "int32")
    weights = _structs(shapes, spec["dtype"])
    return _step(loss, train), _arguments(weights, [images, labels], train)


_MODELS = {"llama": llama, "resnet": resnet}


def model(name: str, spec: JsonMapping) -> tuple[Callable[..., object], tuple[object, ...]]:
    """A step's function and the types of its arguments.

    Raises:
        ProfileError: There is no such model.
    """
    if name not in _MODELS:
        raise ProfileError(f"no model {name!r}", hint=f"known: {', '.join(_MODELS)}")
    return _MODELS[name](spec)
