"""Stages of a training step: together they make what the step makes, and do its work once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.datagen.zoo.registry import build
from opcast.features.cost.flops import op_cost
from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.mlir.bindings import parse_module, write_bytecode
from opcast.features.ir.mlir.shardings import inline_calls
from opcast.features.ir.reader import read_program
from opcast.features.lowering.repeated_layers.remat import layers_of, rematerialised
from opcast.features.lowering.repeated_layers.stages import cut_step, stage_module, step_values

from ....support.cases import later

WIDTH, BATCH, LAYERS, WORDS = 16, 32, 4, 48


def step(params, ids, target):
    """Embedding, layers, and a head that shares the embedding; gradients are clipped by norm."""

    def loss(params):
        x = params["embed"][ids]
        for p in params["layers"]:
            x = x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]
        return jnp.mean((x @ params["embed"].T - target) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.01 / norm)
    return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads), value


def arguments():
    rng = np.random.default_rng(0)

    def made(*shape):
        return rng.normal(size=shape).astype(np.float32) / 4

    layers = [
        {"up": made(WIDTH, 4 * WIDTH), "bias": made(4 * WIDTH), "down": made(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    params = {"embed": made(WORDS, WIDTH), "layers": layers}
    return params, rng.integers(0, WORDS, BATCH).astype(np.int32), made(BATCH, WORDS)


def mlp():
    lowered = jax.jit(step).lower(*arguments())
    flat = jax.tree.leaves(arguments())
    return inline_calls(parse_module(lowered.as_text(debug_info=True))), flat, {13, 14}


def llama():
    source = build(
        "llama", dtype="f32", mode="train", layers=4, dim=32, heads=4, kv_heads=2, hidden=64,
        seq=16, batch=4,
    ).mlir(platform="cpu")  # fmt: skip
    module = inline_calls(read_program(source).module)
    rng = np.random.default_rng(0)
    kinds = [value.type for value in main_arguments(module)]
    whole = [str(kind.element_type) == "i32" for kind in kinds]
    batch = {n for n, kind in enumerate(kinds) if whole[n] and len(kind.shape) == 2}
    flat = [
        rng.integers(0, 30, kind.shape).astype(np.int32)
        if is_whole
        # Second moments must not be negative.
        else np.abs(rng.normal(size=kind.shape)).astype(np.float32) / 8
        for kind, is_whole in zip(kinds, whole, strict=True)
    ]
    return module, flat, batch


def run(module, values):
    made = execute(compile_module(module, 1, 1), values, 1)
    return [np.asarray(value) for value in made]


def stages_of(module, batch, count, layers=None):
    layers = layers or layers_of(module)
    held = {n for n, _ in enumerate(main_arguments(module))} - batch
    values, _ = step_values(module, batch, held)
    cut = cut_step(values, layers, count)
    return values, cut, [stage_module(module, own) for own in cut.stages]


def main_arguments(module):
    (main,) = [op for op in module.body.operations if "main" in str(op.attributes["sym_name"])]
    return main.regions[0].blocks[0].arguments


def run_stages(values, cut, programs, flat):
    """Run stages there and back until all that they exchange is known: nothing before is read."""
    compiled = [compile_module(module, 1, 1) for module in programs]
    known, results = {}, {}
    forward = list(range(len(programs)))
    # Forward, backward, and twice for sums over all gradients.
    for stage in [*forward, *reversed(forward)] * 3:
        own = cut.stages[stage]
        kinds = [main_arguments(programs[stage])[len(own.arguments) + n].type
                 for n in range(len(own.incoming))]  # fmt: skip
        given = [
            known[read] if read in known else np.zeros(kind.shape, dtype_of(kind))
            for read, kind in zip(own.incoming, kinds, strict=True)
        ]
        out = execute(compiled[stage], [*(flat[n] for n in own.arguments), *given], 1)
        made = [np.asarray(value) for value in out]
        results.update(zip(own.results, made, strict=False))
        known.update({values.returned[n]: results[n] for n in own.results})
        known.update(zip(own.outgoing, made[len(own.results) :], strict=True))
    return [results[n] for n in range(len(results))]


def dtype_of(kind):
    return {"f32": np.float32, "i32": np.int32, "i1": np.bool_}[str(kind.element_type)]


@pytest.mark.parametrize(
    ("made", "count", "again"),
    [
        (mlp, 2, 0),
        (mlp, 3, LAYERS),
        later(llama, 2, 0),
        later(llama, 4, 2),
    ],
)
def test_stages_make_what_the_step_makes(made, count, again):
    module, flat, batch = made()
    layers = layers_of(module)
    module = rematerialised(module, layers, again) if again else module
    values, cut, programs = stages_of(module, batch, count, layers)
    found, whole = run_stages(values, cut, programs, flat), run(module, flat)
    assert len(found) == len(whole)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [mlp, llama])
def test_products_are_done_once(made):
    module, _, batch = made()

    def flops(own):
        program = read_program(write_bytecode(own)).program
        entry = program.entry_computation
        return sum(op_cost(op, entry, program).flops for op in entry.ops if op.opcode == "dot")

    _, _, programs = stages_of(module, batch, 2)
    assert sum(map(flops, programs)) == flops(module) > 0


def test_what_is_sent_between_stages():
    """The residual stream and its gradient, the shared embedding's gradient, and single numbers."""
    module, _, batch = mlp()
    values, cut, _ = stages_of(module, batch, LAYERS)
    assert cut.layers == (0, 1, 2, 3)
    stream = 4 * BATCH * WIDTH
    sent = {
        pair: [values.nbytes[op][n] for op, n in reads if values.ranks[op][n]]
        for pair, reads in cut.sends().items()
    }
    table = 4 * WORDS * WIDTH
    assert {pair: own for pair, own in sent.items() if own} == {
        (0, 1): [stream],
        (1, 2): [stream],
        (2, 3): [stream],
        (3, 2): [stream],
        (2, 1): [stream],
        (1, 0): [stream],
        (3, 0): [table],
    }
    # Parameters lie where their layers are; the embedding at both ends, updated at the first.
    assert [len(own.arguments) for own in cut.stages] == [1 + 3 + 1, 3, 3, 3 + 1 + 1]
    assert [len(own.results) for own in cut.stages] == [1 + 3, 3, 3, 3 + 1]


def test_equal_stages_are_equal_programs():
    module, _, batch = llama()
    _, _, programs = stages_of(module, batch, 4)
    texts = [str(own.operation.get_asm(enable_debug_info=False)) for own in programs]
    assert texts[1] == texts[2] != texts[0]


def test_more_stages_than_layers():
    module, _, batch = mlp()
    with pytest.raises(ValueError, match="4 equal layers cannot be cut into 5 stages"):
        stages_of(module, batch, 5)
