"""Programs of which ``check_machine.py`` compares predicted and measured times on this machine.

Ten of the zoo, and five written here by other means than the zoo's: other layers, loops, transforms
and optimisers, so that neither their kernels nor their composition follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: Family and settings of the ten; each takes between one and some hundred milliseconds.
ZOO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet", {"depth": 18, "width": 32, "image": 64, "batch": 8, "mode": "train"}),
    (
        "llama",
        {"layers": 3, "dim": 256, "heads": 8, "kv_heads": 4, "hidden": 704, "seq": 128, "batch": 2},
    ),
    ("lstm", {"batch": 16, "mode": "forward"}),
    ("gnn", {"nodes": 4096, "edges": 32768, "dim": 96, "layers": 2, "mode": "train"}),
    ("vit", {"layers": 6, "dim": 256, "heads": 4, "hidden": 1024, "image": 96, "batch": 4}),
    (
        "unet",
        {"image": 32, "channels": 48, "levels": 3, "blocks": 1, "attention_levels": 1, "batch": 2},
    ),
    (
        "moe",
        {"layers": 2, "dim": 192, "heads": 4, "kv_heads": 2, "hidden": 384, "seq": 128,
         "vocab": 6144, "experts": 8},
    ),
    ("ssm", {"layers": 2, "dim": 192, "seq": 128, "state": 16, "vocab": 6144}),
    ("efficientnet", {"size": "b0", "image": 96, "batch": 2}),
    ("mlp", {"batch": 384, "width": 768, "layers": 5, "mode": "train"}),
)  # fmt: skip

Program = tuple[Callable[..., object], tuple[object, ...]]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def cnn_train() -> Program:
    """Train a plain CNN with momentum: 5x5 and 3x3 convolutions, average pools, dropout mask."""
    shapes = {"c1": (5, 5, 3, 32), "c2": (3, 3, 32, 64), "c3": (3, 3, 64, 96), "d": (1536, 10)}

    def loss(w: Any, x: Any, y: Any, keep: Any) -> Any:
        for name in ("c1", "c2", "c3"):
            x = lax.conv_general_dilated(
                x, w[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = lax.reduce_window(jax.nn.relu(x), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = x / 4
        x = x.reshape(x.shape[0], -1) * keep
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w["d"]) * y, axis=-1))

    def step(w: Any, m: Any, x: Any, y: Any, keep: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x, y, keep)
        m = jax.tree.map(lambda a, g: 0.9 * a + g, m, grad)
        return jax.tree.map(lambda a, b: a - 0.01 * b, w, m), m, value

    w = {name: _array(*shape) for name, shape in shapes.items()}
    return step, (w, w, _array(24, 32, 32, 3), _array(24, 10), _array(24, 1536))


def gru_loop() -> Program:
    """Run a GRU over 96 steps in a ``fori_loop`` that reads and updates slices of one array."""

    def run(x: Any, wx: Any, wh: Any, h: Any) -> Any:
        def body(t: Any, state: Any) -> Any:
            h, out = state
            z, r, n = jnp.split(lax.dynamic_index_in_dim(x, t, keepdims=False) @ wx, 3, axis=-1)
            hz, hr, hn = jnp.split(h @ wh, 3, axis=-1)
            z = jax.nn.sigmoid(z + hz)
            h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
            return h, lax.dynamic_update_index_in_dim(out, h, t, 0)

        return lax.fori_loop(0, x.shape[0], body, (h, jnp.zeros((*x.shape[:2], h.shape[-1]))))

    return run, (_array(96, 24, 160), _array(160, 960), _array(320, 960), _array(24, 320))


def spectral_mix() -> Program:
    """Mix tokens by a 2-D FFT, then a depthwise convolution and a pointwise product."""

    def mix(x: Any, kernel: Any, w1: Any, w2: Any) -> Any:
        for _ in range(3):
            y = x + jnp.fft.fft2(x, axes=(1, 2)).real.astype(jnp.float32) / 181.0
            y = lax.conv_general_dilated(
                y, kernel, (1,), "SAME", feature_group_count=y.shape[-1],
                dimension_numbers=("NWC", "WIO", "NWC"),
            )  # fmt: skip
            x = x + jax.nn.gelu(y @ w1) @ w2
        return jnp.sort(x.mean(axis=1), axis=-1)

    return mix, (_array(4, 256, 128), _array(7, 1, 128), _array(128, 512), _array(512, 128))


def edge_train() -> Program:
    """Train messages on edges: gather both ends, scatter the maximum and the sum to nodes."""
    nodes, edges, dim = 3000, 24000, 64

    def loss(w: Any, x: Any, source: Any, target: Any, y: Any) -> Any:
        for own in w:
            message = jax.nn.relu(jnp.concatenate([x[source], x[target]], axis=1) @ own["m"])
            total = jnp.zeros((nodes, dim)).at[target].add(message)
            top = jnp.full((nodes, dim), 0.0).at[target].max(message)
            x = jnp.tanh(jnp.concatenate([x, total, top], axis=1) @ own["u"])
        return jnp.mean((x.sum(axis=1) - y) ** 2)

    def step(w: Any, x: Any, source: Any, target: Any, y: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x, source, target, y)
        return jax.tree.map(lambda a, g: a - 1e-3 * jnp.sign(g), w, grad), value

    w = [{"m": _array(2 * dim, dim), "u": _array(3 * dim, dim)} for _ in range(2)]
    ends = _array(edges, dtype=jnp.int32)
    return step, (w, _array(nodes, dim), ends, ends, _array(nodes))


def attention_adam() -> Program:
    """Train one attention block with relative positions, clipping and Adam."""
    dim, heads, seq = 192, 6, 160
    shapes = {"qkv": (dim, 3 * dim), "o": (dim, dim), "a": (dim, 640), "b": (640, dim)}

    def norm(x: Any) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)

    def loss(w: Any, x: Any, bias: Any, y: Any) -> Any:
        q, k, v = jnp.split((norm(x) @ w["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        score = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5.7 + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score), v).reshape(x.shape)
        x = x + mixed @ w["o"]
        x = x + jax.nn.silu(norm(x) @ w["a"]) @ w["b"]
        return jnp.mean((x - y) ** 2)

    def step(w: Any, m: Any, v: Any, x: Any, bias: Any, y: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x, bias, y)
        size = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grad)))
        grad = jax.tree.map(lambda g: g / jnp.maximum(size, 1.0), grad)
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grad)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g**2, v, grad)
        new = jax.tree.map(lambda a, b, c: a - 1e-3 * b / (jnp.sqrt(c) + 1e-8), w, m, v)
        return new, m, v, value

    w = {name: _array(*shape) for name, shape in shapes.items()}
    x = _array(6, seq, dim)
    return step, (w, w, w, x, _array(heads, seq, seq), x)


#: Programs that are not of the zoo, by name.
OWN: dict[str, Callable[[], Program]] = {
    "own_cnn_train": cnn_train,
    "own_gru_loop": gru_loop,
    "own_spectral_mix": spectral_mix,
    "own_edge_train": edge_train,
    "own_attention_adam": attention_adam,
}


def write_programs(folder: Path) -> list[Path]:
    """Write all programs as StableHLO, those of the zoo first; returns their paths."""
    from opcast.datagen.zoo import export
    from opcast.predict.api import save

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for family, sizes in ZOO:
        paths.append(folder / f"{family}.mlir")
        if not paths[-1].is_file():
            export(family, sizes, paths[-1])
    for name, make in OWN.items():
        paths.append(folder / f"{name}.mlir")
        if not paths[-1].is_file():
            function, arguments = make()
            save(function, *arguments, path=paths[-1])
    return paths
