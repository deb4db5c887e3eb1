import jax
import jax.numpy as jnp
import pytest

import opcast

MODEL_DEVICE = "cpu-amd-epyc-2c"


@pytest.fixture(scope="session")
def predictor():
    return opcast.load()


@pytest.fixture(scope="session")
def device(predictor):
    """A device that the shipped model knows, whatever machine the tests run on."""
    return predictor.model.devices[MODEL_DEVICE]


@pytest.fixture(scope="session")
def step():
    """A small train step as a lowered JAX function."""

    def loss(weights, x, y):
        hidden = jax.nn.gelu(x @ weights[0])
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    def train(weights, x, y):
        grads = jax.grad(loss)(weights, x, y)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    f32 = jnp.float32
    weights = [jax.ShapeDtypeStruct((256, 512), f32), jax.ShapeDtypeStruct((512, 16), f32)]
    x, y = jax.ShapeDtypeStruct((128, 256), f32), jax.ShapeDtypeStruct((128, 16), f32)
    return jax.jit(train).lower(weights, x, y)


@pytest.fixture(scope="session")
def step_file(step, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "step.mlir"
    path.write_text(step.as_text())
    return path
