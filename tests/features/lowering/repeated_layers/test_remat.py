"""Layers that are computed again: the same as what ``jax.checkpoint`` around each of them makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.datagen.zoo.registry import build
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.mlir.bindings import parse_module, walk_ops, write_bytecode
from opcast.features.ir.mlir.shardings import inline_calls
from opcast.features.ir.reader import read_program
from opcast.features.kernels.memory import peak_memory
from opcast.features.lowering.lower import lower
from opcast.features.lowering.repeated_layers.lower import find_repeats
from opcast.features.lowering.repeated_layers.mlir_excise import main_function, read_table
from opcast.features.lowering.repeated_layers.remat import layers_of, rematerialised
from opcast.features.lowering.target_compiler.install import find_compiler

from ....support.costs import program_cost

WIDTH, BATCH, LAYERS = 32, 256, 3


def block(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def step(layer, params, x):
    def loss(params):
        y = x
        for p in params:
            y = layer(p, y)
        return jnp.mean(y * y)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(layers=LAYERS):
    rng = np.random.default_rng(0)
    made = [
        {
            "up": rng.normal(size=(WIDTH, 4 * WIDTH)).astype(np.float32) / 8,
            "down": rng.normal(size=(4 * WIDTH, WIDTH)).astype(np.float32) / 8,
        }
        for _ in range(layers)
    ]
    return made, rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


def module_of(layer=block, layers=LAYERS):
    lowered = jax.jit(lambda p, x: step(layer, p, x)).lower(*arguments(layers))
    return inline_calls(parse_module(lowered.as_text(debug_info=True)))


def flops_and_memory(module):
    program = read_program(write_bytecode(module)).program
    return program_cost(program).flops, peak_memory(program)


def test_the_layers_of_the_forward_pass_are_found():
    layers = layers_of(module_of())
    assert layers.count == LAYERS
    # The input of the first product is what lies between layers: it is no value of the inside.
    # What gelu's derivative and the gradients of the weights read is: at least its input and
    # its result, of 4 bytes an element.
    assert layers.saved_bytes >= 2 * 4 * BATCH * 4 * WIDTH


@pytest.mark.parametrize("count", [1, LAYERS])
def test_results_are_the_same(count):
    module = module_of()
    again = rematerialised(module, layers_of(module), count)
    assert again.operation.verify()
    assert sum(op.name == "stablehlo.optimization_barrier" for op in walk_ops(again)) == count
    flat = jax.tree.leaves(arguments())
    for one, other in zip(
        execute(compile_module(module, 1, 1), flat, 1),
        execute(compile_module(again, 1, 1), flat, 1),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_work_and_memory_are_those_of_checkpointed_layers():
    module = module_of()
    flops, memory = flops_and_memory(rematerialised(module, layers_of(module), LAYERS))
    traced_flops, traced = flops_and_memory(module_of(jax.checkpoint(block)))
    # JAX does not compute the last product of a layer again, whose result only goes on; nor do we.
    assert flops == pytest.approx(traced_flops, rel=0.01)
    assert memory == pytest.approx(traced, rel=0.01)
    plain_flops, plain = flops_and_memory(module)
    assert flops > 1.1 * plain_flops and memory < plain


def test_half_of_the_layers_save_half_as_much():
    module = module_of(layers=8)
    layers = layers_of(module)
    plain = flops_and_memory(module)
    half = flops_and_memory(rematerialised(module, layers, 4))
    whole = flops_and_memory(rematerialised(module, layers, 8))
    assert half[0] - plain[0] == pytest.approx((whole[0] - plain[0]) / 2, rel=0.01)
    assert whole[1] < half[1] < plain[1]


def test_programs_without_a_backward_pass_have_no_such_layers():
    def forward(params, x):
        for p in params:
            x = block(p, x)
        return x

    text = jax.jit(forward).lower(*arguments()).as_text()
    assert layers_of(inline_calls(parse_module(text))) is None


def test_an_optimiser_is_no_forward_pass():
    def update(params, moments, grads):
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, moments, grads)
        return jax.tree.map(lambda p, m: p - jnp.sqrt(m), params, moments), moments

    params, _ = arguments()
    text = jax.jit(update).lower(params, params, params).as_text()
    assert layers_of(inline_calls(parse_module(text))) is None


SIZES = {"layers": 3, "dim": 256, "heads": 4, "batch": 8, "dtype": "bf16", "mode": "train"}
LLAMA = {"kv_heads": 2, "hidden": 512, "seq": 256, "vocab": 1000}


def test_a_decoder_of_the_zoo():
    module = inline_calls(parse_module(build("llama", **SIZES, **LLAMA).mlir(platform="cuda")))
    layers = layers_of(module)
    assert layers.count == 3
    own = flops_and_memory(rematerialised(module, layers, 3))
    traced = build("llama", **SIZES, **LLAMA, remat=True).mlir(platform="cuda")
    flops, memory = flops_and_memory(inline_calls(parse_module(traced)))
    assert own[0] == pytest.approx(flops, rel=0.01)
    assert own[1] == pytest.approx(memory, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_compiler("gpu") is None, reason="the compiler for GPUs is not installed")
def test_the_compiler_takes_it_as_checkpointed_layers():
    device = find_device("h100-sxm")
    module = inline_calls(parse_module(build("llama", **SIZES, **LLAMA).mlir(platform="cuda")))
    again = rematerialised(module, layers_of(module), 3)
    traced = build("llama", **SIZES, **LLAMA, remat=True).mlir(platform="cuda")
    programs = [read_program(p) for p in (write_bytecode(again), traced)]
    own, other = (lower(program, device=device) for program in programs)
    assert own.peak_memory_bytes == pytest.approx(other.peak_memory_bytes, rel=0.03)
    flops = [sum(k.flops * k.multiplicity for k in made.kernels) for made in (own, other)]
    assert flops[0] == pytest.approx(flops[1], rel=0.03)


def test_layers_with_keys_of_their_own_are_found_and_stay_equal():
    """What is folded into the layers' keys differs; those computed again are equal to compilers."""
    layers = 8

    def model(params, key, x):
        for number, p in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
            x = x + jnp.where(kept, jnp.tanh(x @ p["up"]) @ p["down"], 0.0)
        return jnp.mean(x * x)

    def train(params, key, x):
        grads = jax.grad(model)(params, jax.random.wrap_key_data(key), x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, x = arguments(layers)[0], jnp.zeros((64, 32))
    lowered = jax.jit(train, donate_argnums=0).trace(params, jnp.zeros(2, jnp.uint32), x)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    module = inline_calls(parse_module(text))
    found = layers_of(module)
    assert found is not None and found.count == layers
    changed = rematerialised(module, found, layers)  # which holds its ops
    repeats = find_repeats(read_table(main_function(changed)))
    assert repeats is not None and repeats.layers == layers
