"""Programs of one device, spread over several."""

import re
from math import prod

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import CompilerError, PlanError, ProgramError
from opcast.datagen.partition.program import (
    partition_annotated,
    partition_program,
    sharding_text,
)
from opcast.features.ir.mlir.shardings import gathered_at_use
from opcast.features.ir.platforms import Platform
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.install import find_compiler
from opcast.features.lowering.xla_collectives import optimise_collectives
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.space import Plan

MESH = {"dp": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A train step of two layers without biases, its weights donated."""

    def loss(weights, x, y):
        hidden = jnp.tanh(x @ weights[0])
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    def train(weights, x, y):
        grads = jax.grad(loss)(weights, x, y)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    f32 = jnp.float32
    weights = [jax.ShapeDtypeStruct((256, 512), f32), jax.ShapeDtypeStruct((512, 64), f32)]
    x, y = jax.ShapeDtypeStruct((128, 256), f32), jax.ShapeDtypeStruct((128, 64), f32)
    path = tmp_path_factory.mktemp("program") / "step.mlir"
    path.write_text(jax.jit(train, donate_argnums=0).lower(weights, x, y).as_text())
    return path


@pytest.mark.parametrize(
    ("cut", "rank", "text"),
    [
        ((), 2, "{replicated}"),
        ((("dp", "fsdp"),), 2, "{devices=[8,1]<=[8]}"),
        ((None, "fsdp"), 2, "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        (("dp",), 1, "{devices=[2,4]<=[8] last_tile_dim_replicate}"),
    ],
)
def test_shardings_as_xla_writes_them(cut, rank, text):
    assert sharding_text(cut, rank, MESH) == text


def test_xla_reads_every_sharding():
    # It drops those that are not in its own form, and partitions otherwise.
    from jaxlib import _jax

    mesh = {"a": 2, "b": 3, "c": 4}
    for cut in (("a",), ("c",), (("a", "b"),), (("c", "a"), "b"), ("b", "a"), (None, ("b", "c"))):
        text = sharding_text(cut, 2, mesh)
        hlo = _jax.mlir.mlir_module_to_xla_computation(
            f"""module attributes {{mhlo.num_partitions = 24 : i32}} {{
              func.func public @main(%x: tensor<48x48xf32>) -> tensor<48x48xf32> {{
                %0 = stablehlo.custom_call @Sharding(%x) {{mhlo.sharding = "{text}"}}
                  : (tensor<48x48xf32>) -> tensor<48x48xf32>
                return %0 : tensor<48x48xf32>
              }}
            }}"""
        ).as_hlo_text()
        assert f"sharding={text}" in hlo


def test_what_cannot_be_partitioned(step, tmp_path):
    with pytest.raises(PlanError, match="by their names"):
        partition_program(step, "tp=2", tmp_path / "x")
    with pytest.raises(PlanError, match="no argument 9"):
        partition_program(step, "dp=4", tmp_path / "x", batch=[9])
    with pytest.raises(PlanError, match="cannot be cut into 3"):
        partition_program(step, "dp=3", tmp_path / "x", batch=[2, 3])
    # 3 does not divide the batch of 128, which is found by donation: nothing is missing in the
    # program.
    with pytest.raises(PlanError, match="no argument has a batch that 3 devices") as refused:
        partition_program(step, "fsdp=3", tmp_path / "x")
    assert "128 rows" in str(refused.value)
    plain = tmp_path / "plain.mlir"
    plain.write_text(jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).as_text())
    with pytest.raises(ProgramError, match="which of its arguments"):
        partition_program(plain, "dp=4", tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "fsdp=4"])
def test_gradients_are_reduced_over_all_devices(step, tmp_path, mesh):
    found = read_program(partition_program(step, mesh, tmp_path / "step.mlir").path).program
    assert found.num_partitions == 4
    parameters = [op.type.shape for op in found.entry_computation.parameters]
    kept = [(256, 512), (512, 64)] if mesh == "dp=4" else [(256, 128), (128, 64)]
    assert parameters == [*kept, (32, 256), (32, 64)]
    weights = 4 * (256 * 512 + 512 * 64)
    reduced = 0
    for op in optimise_collectives(found).entry_computation.ops:
        if op.opcode in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            assert op.attrs["replica_groups"] == ((0, 1, 2, 3),)
            reduced += op.result_bytes * (op.opcode == "all-reduce")
    if mesh == "dp=4":
        assert reduced == weights


def collectives(program):
    """Opcode and shape of every collective, those of loops' bodies too."""
    ops = [op for c in program.computations.values() for op in c.ops]
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return [(op.opcode, op.type.shape) for op in ops if op.opcode in names]


@pytest.mark.slow
def test_fsdp_gathers_parameters_where_they_are_used(step, tmp_path):
    done = partition_program(step, "fsdp=4", tmp_path / "step.mlir")
    found = collectives(read_program(done.path).program)
    # Each weight is gathered once for both passes, and its gradient (which may lie transposed)
    # reduced; no activation moves, although those (128 rows) are smaller than the weights.
    assert sorted((name, *sorted(shape)) for name, shape in found) == [
        ("all-gather", 64, 512), ("all-gather", 256, 512),
        ("all-reduce", 64, 512), ("all-reduce", 256, 512),
    ]  # fmt: skip
    assert read_program(done.path).program.aliases == ((0, 0), (1, 1))
    assert done.parameter_bytes == 4 * (256 * 512 + 512 * 64)
    assert done.moved_bytes == 2 * done.parameter_bytes and not done.note


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    """A train step with a key, dropout, and four layers in a loop."""

    def loss(weights, key, x):
        def layer(h, own):
            w, n = own
            h = jnp.tanh(h @ w.astype(jnp.bfloat16))
            return h * jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, h.shape), None

        out, _ = jax.lax.scan(layer, x, (weights, jnp.arange(4)))
        return jnp.mean(out.astype(jnp.float32))

    def train(weights, key, x):
        return weights - 0.1 * jax.grad(loss)(weights, key, x)

    args = (
        jax.ShapeDtypeStruct((4, 256, 256), jnp.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
    )
    path = tmp_path_factory.mktemp("program") / "scanned.mlir"
    traced = jax.jit(train, donate_argnums=0).trace(*args)
    path.write_text(traced.lower(lowering_platforms=("cuda",)).as_text())
    return path


@pytest.mark.slow
def test_a_step_with_a_key_is_partitioned_and_compiles(scanned, tmp_path):
    done = partition_program(scanned, "fsdp=2", tmp_path / "step.mlir")
    text = done.path.read_text()
    assert "mhlo.copy" not in text
    found = read_program(done.path)
    # The key is not cut, although two devices would divide it.
    assert [op.type.shape for op in found.program.entry_computation.parameters][1:] == [
        (2,), (32, 256),
    ]  # fmt: skip
    # One layer at a time, in the type of its product.
    gathers = [shape for name, shape in collectives(found.program) if name == "all-gather"]
    assert gathers and all(prod(shape) == 256 * 256 for shape in gathers)
    if not (compiler := compiler_of("gpu")):
        pytest.skip("the compiler of NVIDIA GPUs is not installed")
    assert compiler
    lowered = lower(found, "xla", device="h100-sxm")
    assert any(k.kind == "collective" for k in lowered.kernels)


def compiler_of(platform):
    try:
        return find_compiler(platform)
    except CompilerError:
        return None


@pytest.mark.slow
def test_collectives_that_move_activations_are_said(tmp_path):
    def train(weights, x):
        def loss(w):
            return jnp.mean(((x @ x.T) @ (x @ w)) ** 2)

        return weights - jax.grad(loss)(weights)

    f32 = jnp.float32
    args = jax.ShapeDtypeStruct((64, 8), f32), jax.ShapeDtypeStruct((4096, 64), f32)
    path = tmp_path / "step.mlir"
    path.write_text(jax.jit(train, donate_argnums=0).lower(*args).as_text())
    done = partition_program(path, "fsdp=4", tmp_path / "out.mlir")
    assert done.parameter_bytes == 4 * 64 * 8
    assert re.search(r"collectives move .* times the parameters .*activations.*4096", done.note)


def test_weights_of_layers_in_a_loop_are_parameters():
    def train(weights, x):
        def layer(h, own):
            return jnp.tanh(h @ own["w"].astype(jnp.bfloat16) + own["b"]), None

        def loss(weights):
            out, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
            return jnp.mean(out.astype(jnp.float32))

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weights = {
        "w": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32),
        "b": jax.ShapeDtypeStruct((4, 64), jnp.bfloat16),
    }
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    lowered = jax.jit(train, donate_argnums=0).lower(weights, x)
    assert gathered_at_use(read_program(lowered).module, [0, 1])[1] == {0, 1}


# Sequences, positions, heads of queries, heads of keys, size of a head.
ATTENTION = (8, 128, 4, 2, 64)


@pytest.fixture(scope="module")
def attention():
    """A train step with cuDNN's attention of grouped queries, in a loop over two layers."""
    batch, length, heads, groups, size = ATTENTION
    width = heads * size

    def layer(x, own):
        q = (x @ own["q"]).reshape(*x.shape[:2], heads, size)
        k = (x @ own["k"]).reshape(*x.shape[:2], groups, size)
        a = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return x + a.reshape(x.shape) @ own["o"], None

    def train(weights, x):
        def loss(weights):
            out, _ = jax.lax.scan(layer, x, weights)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    bf16 = jnp.bfloat16
    columns = {"q": width, "k": groups * size, "o": width}
    weights = {n: jax.ShapeDtypeStruct((2, width, c), bf16) for n, c in columns.items()}
    x = jax.ShapeDtypeStruct((batch, length, width), bf16)
    step = jax.jit(train, donate_argnums=0)
    return read_program(step, weights, x, platform=Platform("cuda", 90))


def calls(program):
    """Target, shapes of operands, and stated shape of the scores of each call of attention."""
    return [
        (
            op.attrs["target"],
            [c.ops[k].type.shape for k in op.operands],
            op.config("cudnn_fmha_backend_config", "intermediate_tensor_shape")["dimensions"],
        )
        for c in program.computations.values()
        for op in c.ops
        if "fmha" in str(op.attrs.get("target", ""))
    ]


def test_cudnn_attention_is_cut_along_the_batch(attention, tmp_path):
    done = partition_program(attention, "dp=4", tmp_path / "out.mlir")
    found = read_program(done.path).program
    whole, kept = (2, 128, 4, 64), (2, 128, 2, 64)
    assert {name: shapes for name, shapes, _ in calls(found)} == {
        "__cudnn$fmhaSoftmax": [whole, kept, kept],
        "__cudnn$fmhaSoftmaxBackward": [whole, kept, kept, (2, 4, 128), whole, whole],
    }
    assert all([int(n) for n in stated] == [2, 4, 128, 128] for _, _, stated in calls(found))
    # Gradients alone are reduced: nothing is gathered for the calls.
    assert {name for name, _ in collectives(found)} == {"all-reduce"}
    assert found.aliases == ((0, 0), (1, 1), (2, 2))


def test_a_plan_cuts_cudnn_attention_along_heads(attention):
    planned = read_planned(attention)
    heads = {c for c in planned.space.tensor if planned.space.class_sizes[c] in (2, 4)}
    assert heads
    plan = Plan((("data", 2), ("tensor", 2)), tuple(heads))
    found = read_program(partition_annotated(read_program(planned.annotated(plan)))).program
    whole, kept = (4, 128, 2, 64), (4, 128, 1, 64)
    assert {name: shapes for name, shapes, _ in calls(found)} == {
        "__cudnn$fmhaSoftmax": [whole, kept, kept],
        "__cudnn$fmhaSoftmaxBackward": [whole, kept, kept, (4, 2, 128), whole, whole],
    }
    assert all([int(n) for n in stated] == [4, 2, 128, 128] for _, _, stated in calls(found))
    # No operand or result of a call is gathered; those have four dimensions.
    assert all(len(shape) < 4 for _, shape in collectives(found))
