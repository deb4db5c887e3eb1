"""Layouts of a TPU: orders and copies as its compiler (libtpu of JAX 0.10) chose them."""

import jax
import jax.numpy as jnp
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program import TensorType
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.fused.orders import default_order, reshaped
from opcast.features.lowering.lower import lower


@pytest.mark.parametrize(
    ("dtype", "shape", "order"),
    [
        ("f32", (16384, 64), (0, 1)),
        ("f32", (4096, 4096), (1, 0)),
        ("f32", (8, 197, 1024), (2, 0, 1)),
        ("u8", (17824, 10, 2266), (0, 2, 1)),
        ("f32", (25833, 1, 7, 79), (0, 1, 3, 2)),
        ("bf16", (1, 8, 8, 3), (2, 1, 3, 0)),
        # Rows of 16 bits pack in pairs, so that one row is padded to two; those of 32 bits are not.
        ("bf16", (1, 77, 320), (2, 1, 0)),
        ("f32", (1, 77, 380), (2, 0, 1)),
        ("s8", (4, 1, 32), (2, 0, 1)),
        ("f32", (7, 32, 7, 4), (1, 3, 2, 0)),
    ],
)
def test_arguments_get_the_order_that_pads_least(
    dtype: str, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    assert default_order(TensorType(dtype, shape)) == order


@pytest.mark.parametrize(
    ("shape", "order", "result", "derived"),
    [
        # Rows of 128 lanes by eights keep their tiles, whatever is above them.
        ((16384, 1024), (1, 0), (128, 128, 1024), (2, 1, 0)),
        ((8, 23, 46), (2, 1, 0), (184, 46), None),
        ((8, 24, 46), (2, 1, 0), (192, 46), (1, 0)),
        # A vector is stored as rows of 128.
        ((131072,), (0,), (1024, 128), (1, 0)),
        ((300,), (0,), (6, 50), None),
        ((1024, 16384), (1, 0), (1024, 128, 128), None),
        ((64, 32), (0, 1), (2048,), None),
        ((8, 32), (1, 0), (1, 8, 32, 1), (2, 1, 3, 0)),
    ],
)
def test_reshapes_that_keep_their_tiles_move_nothing(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    result: tuple[int, ...],
    derived: tuple[int, ...] | None,
) -> None:
    assert reshaped(shape, order, result) == derived


def _lowered(function: object, *shapes: tuple[int, ...]) -> LoweredProgram:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).as_text()  # type: ignore[arg-type]
    return lower(text, "fused", device=find_device("tpu-v5e"))


def test_a_transpose_is_a_copy_only_where_the_order_of_the_result_differs() -> None:
    # The argument is stored with the long dimension in lanes, which its transpose wants, too.
    narrow = _lowered(lambda x: x.T, (16384, 64))
    assert [k for k in narrow.kernels if k.takes_time] == []
    square = _lowered(lambda x: x.T, (4096, 4096))
    (copy,) = [k for k in square.kernels if k.takes_time]
    assert copy.opcode == "copy"
    assert copy.bytes == 2 * 4 * 4096**2


def test_elementwise_ops_follow_the_order_of_what_they_read() -> None:
    lowered = _lowered(lambda x, y: jnp.tanh(x) + y, (10000, 48), (10000, 48))
    (kernel,) = [k for k in lowered.kernels if k.takes_time]
    assert kernel.body.entry_computation.root_op.type.layout == (0, 1)


def test_a_product_with_a_vector_is_a_sum() -> None:
    # As compiled for a v5e: one fusion, multiply and reduce; the matrix is read once.
    lowered = _lowered(lambda x, v: x @ v, (8192, 8192), (8192,))
    (kernel,) = [k for k in lowered.kernels if k.takes_time]
    assert kernel.kind == "reduce"
    assert kernel.bytes == 4 * (8192**2 + 2 * 8192)


def test_gathered_rows_are_rows_in_memory() -> None:
    # As compiled: the table is stored column by column, and copied before its rows are read.
    def rows(x: jax.Array, i: jax.Array) -> jax.Array:
        return x[i.astype(jnp.int32)]

    lowered = _lowered(rows, (32000, 96), (1024,))
    copies = [k for k in lowered.kernels if k.opcode == "copy"]
    assert next(k.bytes for k in copies) == 2 * 4 * 32000 * 96
