"""Programs of one device, spread over several."""

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import PlanError, ProgramError
from opcast.datagen.partition.program import partition_program, sharding_text
from opcast.features.ir.reader import read_program
from opcast.features.lowering.xla_collectives import optimise_collectives

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
        ((("dp", "fsdp"),), 2, "{devices=[8,1]<=[2,4]}"),
        ((None, "fsdp"), 2, "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        (("dp",), 1, "{devices=[2,4]<=[2,4] last_tile_dim_replicate}"),
    ],
)
def test_shardings_as_xla_writes_them(cut, rank, text):
    assert sharding_text(cut, rank, MESH) == text


def test_what_cannot_be_partitioned(step, tmp_path):
    with pytest.raises(PlanError, match="by their names"):
        partition_program(step, "tp=2", tmp_path / "x")
    with pytest.raises(PlanError, match="no argument 9"):
        partition_program(step, "dp=4", tmp_path / "x", batch=[9])
    with pytest.raises(PlanError, match="cannot be cut into 3"):
        partition_program(step, "dp=3", tmp_path / "x", batch=[2, 3])
    plain = tmp_path / "plain.mlir"
    plain.write_text(jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).as_text())
    with pytest.raises(ProgramError, match="which of its arguments"):
        partition_program(plain, "dp=4", tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "fsdp=4"])
def test_gradients_are_reduced_over_all_devices(step, tmp_path, mesh):
    found = read_program(partition_program(step, mesh, tmp_path / "step.mlir")).program
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
    # Which way sharded parameters and the batch meet is up to the partitioner.
    if mesh == "dp=4":
        assert reduced == weights
