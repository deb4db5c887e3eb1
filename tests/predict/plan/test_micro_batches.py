"""Steps in micro-batches: the same results, and the work and memory of a traced ``lax.scan``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.platforms import Platform
from opcast.features.ir.reader import read_program
from opcast.features.kernels.memory import peak_memory
from opcast.features.lowering.fused.lower import lower_fused
from opcast.predict.devices import cluster_device
from opcast.predict.plan.code import code_of
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.space import Change, Plan
from opcast.simulate.clusters.catalogue import find_cluster

from ...support.cases import later
from ...support.costs import program_cost

WIDTH, ROWS, LENGTH, WORDS, PARTS = 32, 16, 8, 50, 4


def block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss_of(params, batch):
    """A model with a table at both ends, so that its gradient is a sum of two."""
    x = params["table"][batch["ids"]].astype(jnp.bfloat16).astype(jnp.float32)
    for p in params["layers"]:
        x = block(p, x)
    x = x[:, 1:] - x.mean(-1, keepdims=True)[:, 1:]
    scores = jax.nn.log_softmax(x @ params["table"].T)
    chosen = jnp.take_along_axis(scores, batch["labels"][:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def updated(params, moments, grads):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / (1.0 + norm), grads)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def step(params, moments, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return *updated(params, moments, grads), loss


def step_in_parts(params, moments, batch):
    """The same by hand: what people write."""
    parts = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // PARTS, PARTS, *x.shape[1:]).swapaxes(0, 1), batch
    )

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, part)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(add, zeros, parts)
    grads = jax.tree.map(lambda g: g / PARTS, grads)
    return *updated(params, moments, grads), loss / PARTS


def arguments(rows=ROWS, width=WIDTH):
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32) / 4

    layer = {"up": draw(width, 2 * width), "down": draw(2 * width, width)}
    params = {"table": draw(WORDS, width), "layers": [layer, layer]}
    ids = rng.integers(0, WORDS, size=(2, rows, LENGTH)).astype(np.int32)
    return params, jax.tree.map(np.zeros_like, params), {"ids": ids[0], "labels": ids[1]}


def planned(function=step, args=None, donate=(0, 1)):
    return read_planned(jax.jit(function, donate_argnums=donate).lower(*(args or arguments())))


def run(program):
    executable = compile_module(program.source.module, 1, 1)
    return execute(executable, jax.tree.leaves(arguments()), 1)


@pytest.mark.parametrize(
    "change",
    [
        later(Change(0, 2)),
        later(Change(0, PARTS)),
        later(Change(0, 8)),
        Change(2, PARTS),
        later(Change(2)),
    ],
)
def test_results_are_the_same(change):
    program = planned()
    changed = program.changed(change)
    for one, other in zip(run(program), run(changed), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    # It stays a program of the same arguments, and its plans are those of a smaller batch.
    assert [a.role for a in changed.arguments] == [a.role for a in program.arguments]
    assert [a.name for a in changed.arguments] == [a.name for a in program.arguments]
    (batch,) = changed.space.batch
    assert changed.space.class_sizes[batch] == ROWS // change.micro
    assert program.changed(change) is changed


def dropped(params, position, key, x):
    """Random masks, a weight for each row and a learned position, by keys of both kinds."""

    def loss(params, position):
        y = (x + position) @ params
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.7, y.shape)
        y = jnp.where(kept, y / 0.7, 0.0)
        y = y + 0.1 * jax.random.normal(
            jax.random.fold_in(jax.random.wrap_key_data(key), 3), y.shape
        )
        rows = jnp.arange(x.shape[0], dtype=jnp.bfloat16).astype(jnp.float32)
        return jnp.mean(y * y * (1.0 + rows[:, None, None]))

    grads = jax.grad(loss, argnums=(0, 1))(params, position)
    return params - 1e-4 * grads[0], position - 1e-4 * grads[1]


def test_random_numbers_of_rows_stay_the_same():
    rng = np.random.default_rng(2)
    # More rows than bfloat16 counts one by one.
    rows = 600
    args = (
        rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        rng.normal(size=(1, LENGTH, WIDTH)).astype(np.float32),
        np.array([7, 11], np.uint32),
        rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32),
    )
    program = planned(dropped, args, donate=(0, 1))
    assert [a.role for a in program.arguments] == ["parameter", "parameter", "other", "batch"]
    # The code says what becomes of the key.
    plan = Plan((("data", 2),), change=Change(0, 2))
    assert "# key: no part of the batch" in code_of(program.changed(plan.change), plan)
    made = {
        parts: execute(
            compile_module(program.changed(Change(0, parts)).source.module, 1, 1), list(args), 1
        )
        for parts in (1, 6)
    }
    for one, other in zip(made[1], made[6], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_work_and_memory_are_those_of_a_scan():
    args = arguments(rows=256, width=64)
    own = planned(args=args).changed(Change(0, PARTS)).source.program
    scan = planned(step_in_parts, args).source.program
    assert program_cost(own).flops == pytest.approx(program_cost(scan).flops, rel=0.01)
    assert peak_memory(own) == pytest.approx(peak_memory(scan), rel=0.05)
    assert peak_memory(own) < 0.5 * peak_memory(planned(args=args).source.program)


def test_kernels_of_the_batch_run_once_for_each_part():
    program = planned(args=arguments(rows=256, width=64)).changed(Change(0, PARTS))
    device = cluster_device(find_cluster("h100-sxm-x4"))
    kernels = [k for k in lower_fused(program.source, device).kernels if k.kind == "gemm"]
    # Two layers: two products forward, four backward; the table's three.
    assert {k.multiplicity for k in kernels} == {PARTS}
    assert len(kernels) == 15


def test_gradients_are_hidden_and_not_waited_for():
    from opcast.predict.api import loaded

    program = planned().changed(Change(0, PARTS))
    sheet = program.sheet(find_cluster("h100-sxm-x4"), loaded("roofline"))
    found = sheet.events(Plan((("data", 4),)))
    assert {event.kind for event in found} == {"all_reduce"}
    assert all(event.hidden for event in found)
    # Once behind the loop: the tables' two gradients, of two layers two each, and the loss.
    table, layer = 4 * WORDS * WIDTH, 2 * 4 * WIDTH * 2 * WIDTH
    assert sum(e.size * n for e, n in found.items()) == 2 * table + 2 * layer + 4
    scattered = sheet.events(Plan((("fsdp", 4),)))
    inside = sum(e.size * n for e, n in scattered.items() if e.kind == "reduce_scatter")
    assert inside == PARTS * (2 * table + 2 * layer + 4)


def normalised(params, x):
    def loss(params):
        y = x @ params
        return jnp.mean(((y - y.mean(0)) / (1.0 + y.var(0))) ** 2)

    return params - jax.grad(loss)(params)


def told(params, x):
    def loss(params):
        return jnp.mean((x @ params) ** 2)

    return params - jax.grad(loss)(params), x @ params


def largest(params, x):
    return params - jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params), jnp.max(x @ params)


def numbered(params, x):
    def drawn(n, sums):
        return sums + jax.random.uniform(jax.random.fold_in(jax.random.key(0), n), sums.shape)

    def loss(params):
        y = x @ params
        return jnp.mean(y * jax.lax.fori_loop(0, 3, drawn, jnp.zeros(y.shape)))

    return params - jax.grad(loss)(params)


def drawn(params, x):
    def loss(params):
        state = jnp.arange(4, dtype=jnp.uint32)
        return jnp.mean((x @ params) * jax.lax.rng_bit_generator(state, x.shape)[1])

    return params - jax.grad(loss)(params)


def looped(params, x):
    def loss(params):
        return jnp.mean(jax.lax.scan(lambda y, p: (jnp.tanh(y @ p), None), x, params)[0] ** 2)

    return params - jax.grad(loss)(params)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (normalised, "rows of the batch depend on each other at .*:"),
        (told, "results of the step have the batch"),
        (largest, "reduce at .* is not a sum over the batch"),
        (numbered, "iota at .* mixes rows of the batch"),
        (drawn, "rng-bit-generator at .* mixes rows of the batch"),
        (looped, "accumulates gradients itself"),
    ],
)
def test_what_is_another_program_in_parts_is_refused(function, reason):
    shape = (3, WIDTH, WIDTH) if function is looped else (WIDTH, WIDTH)
    args = (np.zeros(shape, np.float32), np.zeros((ROWS, WIDTH), np.float32))
    with pytest.raises(PlanError, match=reason):
        planned(function, args, donate=0).changed(Change(0, 2))


def test_parts_must_divide_the_batch_and_layers_must_be_there():
    with pytest.raises(PlanError, match="3 micro-batches do not divide a batch of 16"):
        planned().changed(Change(0, 3))
    with pytest.raises(PlanError, match="16 micro-batches of 16 rows leave nothing to shard"):
        planned().changed(Change(0, 16))
    with pytest.raises(PlanError, match="9 layers cannot be rematerialised: 2 equal layers"):
        planned().changed(Change(9))


def test_the_code_does_the_same():
    program = planned().changed(Change(2, PARTS))
    text = code_of(program, Plan((("data", 2),), change=program.change))
    assert "each of the first 2 equal layers, starting at" in text
    names: dict[str, object] = {}
    # The part below the mesh, which would need several devices.
    exec("import jax\n" + text[text.index("def in_micro_batches") :], names)
    params, _, batch = arguments()
    loss, grads = names["in_micro_batches"](jax.value_and_grad(loss_of), params, batch)
    whole, wanted = jax.value_and_grad(loss_of)(params, batch)
    np.testing.assert_allclose(loss / PARTS, whole, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one / PARTS, other, rtol=1e-4, atol=1e-7)


def attention_step():
    """A layer with cuDNN's attention: batch 8, 128 positions, 4 heads of 64."""
    shape, bf16 = (8, 128, 4, 64), jnp.bfloat16

    def train(weights, x):
        def loss(weights):
            q = (x @ weights["q"]).reshape(shape)
            a = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
            return jnp.mean((a.reshape(x.shape) @ weights["o"]).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weights = {name: jax.ShapeDtypeStruct((256, 256), bf16) for name in ("q", "o")}
    x = jax.ShapeDtypeStruct((8, 128, 256), bf16)
    step = jax.jit(train, donate_argnums=0)
    return read_program(step, weights, x, platform=Platform("cuda", 90))


def test_a_librarys_attention_takes_a_part_of_the_batch():
    program = read_planned(attention_step()).changed(Change(0, 4)).source.program
    calls = [
        ([c.ops[k].type.shape for k in op.operands], op.config("cudnn_fmha_backend_config"))
        for c in program.computations.values()
        for op in c.ops
        if "fmha" in str(op.attrs.get("target", ""))
    ]
    own = (2, 128, 4, 64)
    assert [shapes for shapes, _ in calls] == [[own] * 3, [*[own] * 3, (2, 4, 128), own, own]]
    stated = [config["intermediate_tensor_shape"]["dimensions"] for _, config in calls]
    assert [[int(n) for n in own] for own in stated] == [[2, 4, 128, 128]] * 2


def test_random_weights_of_a_librarys_attention_are_not_drawn_again():
    text = str(attention_step().module).replace("dropout_rate\\22: 0.0", "dropout_rate\\22: 0.1")
    assert "0.1" in text
    with pytest.raises(PlanError, match=r"custom-call .* may mix rows"):
        read_planned(text).changed(Change(0, 4))
