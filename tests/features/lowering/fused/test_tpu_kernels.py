"""Kernels of TPUs as their compiler (libtpu of JAX 0.10, v5e) formed them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program import TensorType
from opcast.features.kernels.kernel import Kernel
from opcast.features.lowering.fused.orders import Order, turned_before
from opcast.features.lowering.lower import lower
from opcast.features.table.columns import INDEX
from opcast.features.table.row import rows

_F32 = jnp.float32


def _shape(*shape: int, dtype: object = _F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _kernels(
    function: Callable[..., object], *arguments: jax.ShapeDtypeStruct, least: float = 1e5
) -> list[Kernel]:
    """Kernels that move more than so many bytes, asynchronous copies left out."""
    text = jax.jit(function).lower(*arguments).as_text()
    lowered = lower(text, "fused", device=find_device("tpu-v5e"))
    return [k for k in lowered.kernels if k.takes_time and not k.async_role and k.bytes > least]


def _opcodes(kernel: Kernel) -> set[str]:
    return {op.opcode for comp in kernel.body.computations.values() for op in comp.ops}


def _group_norm(x: jax.Array) -> jax.Array:
    groups = x.reshape(*x.shape[:3], 32, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    scale = lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    return ((groups - mean) * scale).reshape(x.shape)


def test_a_group_norm_runs_on_the_image_as_it_is_stored() -> None:
    image = 4 * 8 * 64 * 64 * 256
    kernels = _kernels(_group_norm, _shape(8, 64, 64, 256))
    # Sums of a channel, those of squares, and the result: as compiled, each reads the image.
    assert [round(k.bytes / image) for k in kernels] == [1, 1, 2]
    assert [k.kind for k in kernels[:2]] == ["reduce", "reduce"]


def test_joined_arrays_are_maxima_of_padded_ones_that_take_nothing_in() -> None:
    def joined(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.tanh(x), y * 2], 1)

    *parts, whole = _kernels(joined, _shape(2048, 1024), _shape(2048, 1024))
    assert [{"tanh", "multiply"} & _opcodes(k) for k in parts] == [{"tanh"}, {"multiply"}]
    assert {"pad", "maximum"} <= _opcodes(whole)
    assert not {"tanh", "multiply", "concatenate"} & _opcodes(whole)


def test_what_several_slices_read_is_computed_once() -> None:
    def halves(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return y[:, :512] * y[:, 512:]

    first, second = _kernels(halves, _shape(2048, 1024))
    assert "tanh" in _opcodes(first)
    assert "tanh" not in _opcodes(second)
    # One slice reads what it needs.
    (only,) = _kernels(lambda x: jnp.tanh(x)[:, :512] * 2, _shape(2048, 1024))
    assert {"tanh", "slice"} <= _opcodes(only)


def test_slices_with_strides_within_tiles_are_kernels_of_their_own() -> None:
    def strided(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)[:, ::2] * 2

    assert len(_kernels(strided, _shape(2048, 1024))) == 3
    # Not along outer dimensions.
    assert len(_kernels(lambda x: x[:, ::2] * 2, _shape(4, 512, 16, 128))) == 1


@pytest.mark.parametrize(("shape", "count"), [((16, 512, 512), 1), ((2048, 1024), 3)])
def test_softmax_is_one_kernel_from_three_dimensions_on(shape: tuple[int, ...], count: int) -> None:
    assert len(_kernels(lambda x: jax.nn.softmax(x, -1), _shape(*shape))) == count


def test_attention_sums_beside_its_first_product_and_divides_in_the_second() -> None:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k).astype(_F32)
        return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores).astype(q.dtype), v)

    heads = _shape(4, 16, 1024, 64, dtype=jnp.bfloat16)
    # The compiler's kernels: 2 x 8.4 MB in, 268.4 MB of exponentials out; these and 8.4 MB in.
    first, second = _kernels(attention, heads, heads, heads, least=1e8)
    assert {"convolution", "exponential", "reduce"} <= _opcodes(first)
    assert {"convolution", "divide"} <= _opcodes(second)
    assert first.bytes == pytest.approx(285.5e6, rel=0.01)
    assert second.bytes == pytest.approx(285.5e6, rel=0.01)


def test_a_product_is_reduced_beside_being_written() -> None:
    def log_of_sums(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(x @ w, -1)

    product, total = _kernels(log_of_sums, _shape(2048, 512), _shape(512, 8192), least=1e6)
    assert {"convolution", "reduce"} <= _opcodes(product)
    assert "exponential" in _opcodes(total)


def test_windows_run_along_other_dimensions_than_lanes() -> None:
    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    # The argument has its width in lanes, which 64 channels fill by half.
    copy, window = _kernels(pooled, _shape(32, 112, 112, 64))
    assert copy.opcode == "copy"
    assert "reduce-window" in _opcodes(window)


def test_the_gradient_of_one_element_of_each_row_is_a_choice() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x * x, y[:, None], 1).sum()

    (kernel,) = _kernels(
        jax.grad(loss), _shape(4096, 1000), _shape(4096, dtype=jnp.int32), least=1e6
    )
    assert "select" in _opcodes(kernel)
    assert "scatter" not in _opcodes(kernel)


@pytest.mark.parametrize(
    ("dtype", "shape", "result", "orders"),
    [
        ("bf16", (4, 2048, 16, 128), (4, 2048, 16, 64, 2), ((1, 2, 3, 0), (1, 2, 4, 3, 0))),
        ("f32", (8, 32, 32, 320), (8, 32, 32, 32, 10), ((2, 1, 3, 0), (2, 1, 4, 3, 0))),
        ("bf16", (4, 1024, 1024), (4, 1024, 16, 64), ((1, 2, 0), (1, 3, 2, 0))),
        # Whole lanes are moved tile by tile.
        ("f32", (2048, 1024), (2048, 8, 128), None),
    ],
)
def test_split_lanes_are_named_after_a_copy_that_turns_them(
    dtype: str, shape: tuple[int, ...], result: tuple[int, ...], orders: tuple[Order, Order] | None
) -> None:
    minor = tuple(reversed(range(len(shape))))
    assert turned_before(TensorType(dtype, shape), minor, TensorType(dtype, result)) == orders


def test_the_gradient_of_weights_is_written_as_they_are_stored_with_their_update() -> None:
    def update(
        x: jax.Array, w: jax.Array, mean: jax.Array, square: jax.Array, error: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        gradient = jax.grad(lambda w: ((x @ w) * error).sum())(w)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient * gradient
        return w - mean * lax.rsqrt(square + 1e-8), mean, square

    # As compiled in a training step: the product's kernel reads both operands and the three arrays
    # to update, which it writes; the gradient itself is never stored.
    (kernel,) = _kernels(update, *[_shape(1024, 1024)] * 5)
    assert {"convolution", "rsqrt"} <= _opcodes(kernel)
    assert kernel.bytes == pytest.approx(8 * 4 * 1024**2, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "count", "sorted_whole"),
    [
        ((256, 2048), 5, False),
        ((256, 2048), 16, False),
        ((256, 2048), 32, True),
        ((256, 1024), 8, False),
        ((256, 512), 8, True),
        ((128, 64), 2, True),
        ((256, 16384), 128, False),
        ((256, 32768), 256, True),
        ((64, 32000), 50, False),
        ((8, 32, 2048), 5, True),
        ((2048,), 5, True),
    ],
)
def test_few_elements_of_long_rows_have_a_kernel(
    shape: tuple[int, ...], count: int, sorted_whole: bool
) -> None:
    kernels = _kernels(lambda x: lax.top_k(x, count), _shape(*shape), least=0.0)
    assert ("sort" in {k.op.opcode for k in kernels}) == sorted_whole
    assert any("topk" in _opcodes(k) for k in kernels) != sorted_whole


@pytest.mark.parametrize(
    ("function", "operands", "compared"),
    [
        # Each value: zeros and NaNs replaced (4), then as an integer (4); the comparison both ways,
        # whether they are equal, positions, the choice.
        (jnp.sort, 2, 2 * 8 + 5),
        # Positions are operands already.
        (jnp.argsort, 2, 2 * 8 + 5),
        (lambda x: lax.top_k(x, 300), 2, 2 * 4 + 5),
    ],
)
def test_comparisons_of_sorts_are_those_of_integers_with_ties_by_position(
    function: Callable[[jax.Array], object], operands: int, compared: int
) -> None:
    """Counted in what libtpu compiles for a v5e."""
    kernels = _kernels(function, _shape(256, 2048))
    (own,) = (k for k in kernels if k.kind == "sort")
    assert len(own.op.operands) == operands
    row = rows([own])[0]
    assert row[INDEX["sort_comparator"]] == compared


@pytest.mark.parametrize(
    ("length", "factors"),
    [(64, (64,)), (1000, (1000,)), (1024, (128, 8)), (8192, (128, 64)), (65536, (256, 256))],
)
def test_fourier_transforms_are_products_of_their_factors(
    length: int, factors: tuple[int, ...]
) -> None:
    """With the factors of libtpu's products; three real ones for a complex one."""
    rows = 2**20 // length
    kernels = _kernels(jnp.fft.fft, _shape(rows, length, dtype=jnp.complex64))
    assert not any("fft" in _opcodes(k) for k in kernels)
    flops = 3 * 2 * rows * length * sum(factors)
    products = [k.flops for k in kernels if "convolution" in _opcodes(k)]
    assert len(products) == 3 * len(factors)
    assert sum(products) == pytest.approx(flops, rel=0.15)


def test_a_transform_of_a_real_image_keeps_half_of_its_columns() -> None:
    kernels = _kernels(lambda x: jnp.abs(jnp.fft.rfft2(x)), _shape(8, 256, 256))
    full, half = 2 * 8 * 256**3, 2 * 8 * 256**2 * 129
    found = sorted(k.flops for k in kernels if "convolution" in _opcodes(k))
    assert found == pytest.approx([half] * 3 + [full] * 3, rel=0.05)
    back = _kernels(jnp.fft.irfft, _shape(1024, 1025, dtype=jnp.complex64))
    # The other half of the spectrum is the first, reversed and conjugate.
    assert any("reverse" in _opcodes(k) for k in back)
    assert any("maximum" in _opcodes(k) for k in back)
    assert back[-1].op.type.size == 1024 * 2048
