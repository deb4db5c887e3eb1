"""Predictions of functions, as the README has them."""

import json

import jax
import jax.numpy as jnp

import opcast


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer of a network."""
    return jax.nn.softmax(jax.nn.gelu(x @ w))


arguments = (jnp.ones((512, 1024)), jax.ShapeDtypeStruct((1024, 4096), jnp.float32))
devices = ("cpu-amd-epyc-2c", "h100-sxm", "tpu-v5e")
found = {d: opcast.predict(layer, *arguments, device=d, lowering="fused") for d in devices}
kernels = opcast.lower("llama.mlir", "fused", device="h100-sxm").kernels
print(
    json.dumps(
        {
            "predicted": {device: p.to_dict() for device, p in found.items()},
            "kernels": [opcast.latency(kernel, "h100-sxm").latency_us for kernel in kernels],
        }
    )
)
