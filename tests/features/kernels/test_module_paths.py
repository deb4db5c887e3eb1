"""Modules and pass of kernels, from names that JAX and flax give to ops."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from opcast.features.ir.reader import read_program
from opcast.features.kernels.module_paths import ModulePath, ModulePaths, parse_scopes
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
