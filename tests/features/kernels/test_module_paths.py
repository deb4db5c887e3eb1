"""Modules and pass of kernels, from names that JAX and flax give to ops."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from opcast.features.ir.reader import read_program
from opcast.features.kernels.provenance import ModulePath, ModulePaths, parse_scopes
from opcast.features.lowering.lower import lower


@pytest.mark.parametrize(
    ("name", "modules", "phase"),
    [
        ("jit(step)/jvp(Net)/Block_0/attention/dot_general", "Net Block_0 attention", "forward"),
        ("jit(step)/transpose(jvp(Llama))/Block_0/mul", "Llama Block_0", "backward"),
        ("jit(step)/transpose(jvp(vmap(Net)))/bqd,bkd->bqk/dot_general", "Net", "backward"),
        ("jit(step)/transpose(jvp(Net))/rematted_computation/Block_1/add", "Net Block_1",
         "recomputed"),
        ("jit(f)/Net/while/body/Dense_0/jit(silu)/logistic", "Net Dense_0", ""),
        ("jit(f)/jvp()/add", "", "forward"),
        ("jit(f)/mul", "", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_names_of_ops(name, modules, phase):
    assert parse_scopes(name) == ModulePath(tuple(modules.split()), phase)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sum(nn.silu(nn.Dense(8, name="up")(x)))


@pytest.mark.parametrize("lowering", ["op", "xla"])
def test_kernels_of_a_gradient_find_their_module(lowering):
    net, x = Net(), jnp.ones((4, 16))
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    source = read_program(jax.jit(jax.grad(net.apply)).lower(variables, x))
    kernels = lower(source, lowering, cache=False).kernels
    places = ModulePaths(source)
    dots = {places.of(k) for k in kernels if k.opcode == "dot"}
    if lowering == "op":
        assert dots == {
            ModulePath(("Net", "up"), "forward"), ModulePath(("Net", "up"), "backward")
        }  # fmt: skip
    assert {places.of(k).modules[:1] for k in kernels} <= {("Net",), ()}
    assert any(places.of(k).phase == "backward" for k in kernels)


def test_optimised_hlo_names_modules_in_its_metadata():
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    name = 'metadata={op_name="jit(f)/Net/up/dot_general"}'
    text = f"""HloModule m, is_scheduled=true

ENTRY main {{
  a = f32[16,16] parameter(0)
  ROOT t = f32[16,16] dot(a, a), {dims}, {name}
}}
"""
    source = read_program(text)
    (kernel,) = lower(source, "xla", cache=False).kernels
    assert ModulePaths(source).of(kernel) == ModulePath(("Net", "up"), "")


WIDTH, LAYERS, TOKENS = 16, 3, 8


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(WIDTH, name="up")(x))), None


def stacked(layer):
    scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True},
                      length=LAYERS, in_axes=nn.broadcast)  # fmt: skip

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sum(scanned(name="layers")(x, None)[0] ** 2)

    net, x = Stack(), jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    return net, jax.eval_shape(net.init, jax.random.key(0), x), x


def product_flops(function, *args):
    """FLOPs of matrix products by pass, in units of one product of the layers."""
    source = read_program(jax.jit(function).lower(*args))
    places, found = ModulePaths(source), {}
    for kernel in lower(source, "op", cache=False).kernels:
        if kernel.opcode == "dot":
            phase = places.of(kernel).phase
            unit = 2 * TOKENS * WIDTH * WIDTH * LAYERS
            found[phase] = found.get(phase, 0) + kernel.flops * kernel.multiplicity / unit
    return found, {places.of(k).modules for k in lower(source, "op", cache=False).kernels}


def test_scanned_layers_of_flax_are_told_apart_by_pass():
    net, params, x = stacked(Layer)
    found, modules = product_flops(jax.value_and_grad(net.apply, argnums=(0, 1)), params, x)
    # Two products a layer, and the gradients by both of their operands.
    assert found == {"forward": 2, "backward": 4}
    assert ("Stack", "layers", "up") in modules
    net, params, x = stacked(nn.remat(Layer, prevent_cse=False))
    found, modules = product_flops(jax.value_and_grad(net.apply, argnums=(0, 1)), params, x)
    # Nothing needs the layer's last product again.
    assert found == {"forward": 2, "recomputed": 1, "backward": 4}


@pytest.mark.parametrize("remat", [False, True])
def test_loops_without_modules_and_gradients_within_loops(remat):
    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0])

    def accumulated(w, xs):
        def micro(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(w, x)), None

        return jax.lax.scan(micro, jnp.zeros_like(w), xs)[0]

    w = jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    expected = {"forward": 2, "backward": 4} | ({"recomputed": 1} if remat else {})
    assert product_flops(jax.value_and_grad(loss), w, x)[0] == expected
    micros = jax.ShapeDtypeStruct((5, TOKENS, WIDTH), jnp.float32)
    found = product_flops(accumulated, w, micros)[0]
    assert found == {phase: 5 * count for phase, count in expected.items()}


def test_a_function_of_several_modules_is_in_what_they_share():
    @jax.jit
    def block(w, x):
        with jax.named_scope("up"):
            return jnp.tanh(x @ w)

    def model(w, x):
        with jax.named_scope("net"):
            for name in ("first", "second"):
                with jax.named_scope(name):
                    x = block(w, x)
            return x

    w = jnp.ones((WIDTH, WIDTH))
    _, modules = product_flops(model, w, w)
    assert modules == {("net", "up")}
