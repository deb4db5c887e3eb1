"""Writes ``data/<version>/``: programs as the JAX that runs this exports them.

Run it in an environment with that version and ``flatbuffers``: ``python write_exports.py``.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

PLATFORMS = ("cpu", "cuda", "tpu")


def array(*shape: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def train_step(params, x, y):
    def loss(params):
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
        # Another branch for each platform.
        hidden = jax.lax.platform_dependent(hidden, cpu=jnp.sin, tpu=jnp.tanh, default=lambda h: h)
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def scanned(weights, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()


def main() -> None:
    # Source lines name this file without its folder.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    out = Path(__file__).parent / "data" / jax.__version__
    out.mkdir(parents=True, exist_ok=True)
    params = {"w1": array(32, 64), "b1": array(64), "w2": array(64, 8)}
    step = export.export(jax.jit(train_step), platforms=PLATFORMS)
    (out / "step.jax").write_bytes(step(params, array(16, 32), array(16, 8)).serialize())
    q = array(2, 16, 4, 8, dtype=jnp.bfloat16)
    (out / "attention.mlir").write_text(jax.jit(attention).lower(q, q, q).as_text())
    scan = export.export(jax.jit(jax.grad(scanned)), platforms=("cuda",))
    module = scan(array(3, 16, 16), array(4, 16)).mlir_module_serialized
    (out / "scan.mlirbc").write_bytes(module)


if __name__ == "__main__":
    main()
