"""What XLA's GPU compiler was seen to do, with bytes computed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.lower import lower

F32, BF16, S32 = jnp.float32, jnp.bfloat16, jnp.int32
H100 = find_device("h100-sxm")


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(function, *arguments, device=H100, donate=()):
    traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
    found = lower(traced.lower(lowering_platforms=("cuda",)).as_text(), "fused", device=device)
    return [k for k in found.kernels if k.takes_time]


def written(table, rows, index):
    return table.at[index].set(rows, mode="drop")


TABLE = spec(8192, 256), spec(64, 256), spec(64, dtype=S32)


def test_an_update_of_an_argument_starts_from_a_copy_of_it():
    copy, update = kernels(written, *TABLE)
    assert (copy.opcode, copy.bytes) == ("copy", 2 * 8192 * 256 * 4)
    assert update.kind == "gather_scatter"


def test_an_update_of_a_donated_argument_is_in_place():
    (update,) = kernels(written, *TABLE, donate=0)
    assert update.kind == "gather_scatter"


def test_the_second_update_of_an_array_has_a_copy_of_its_own():
    def twice(table, rows, index):
        made = table * 2.0
        return written(made, rows, index), written(made, rows, index + 1)

    found = kernels(twice, *TABLE)
    assert [k.opcode for k in found].count("copy") == 1


def test_an_argument_that_is_a_result_is_copied():
    text = """module @m { func.func public @main(%x: tensor<1024xf32>) -> tensor<1024xf32> {
      return %x : tensor<1024xf32> } }"""
    (copy,) = lower(text, "fused", device=H100).kernels
    assert (copy.opcode, copy.bytes) == ("copy", 2 * 1024 * 4)


def test_a_norm_and_the_mean_of_what_it_gives_are_one_kernel():
    def mean(x, scale):
        normal = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return (normal * scale).mean(-1)

    (kernel,) = kernels(mean, spec(4096, 768), spec(768))
    assert (kernel.bytes_in, kernel.bytes_out) == (4 * (4096 * 768 + 768), 4 * 4096)


def test_attention_of_one_token_over_gathered_pages_turns_the_values():
    """As compiled for an H100 (JAX 0.10.2): a reshape is multiplied turned, then summed."""

    def values(shares, pages, table):
        gathered = pages[table].reshape(16, 1024, 16, 128)
        return jnp.einsum("bht,bthd->bhd", shares, gathered)

    shares, pages = spec(16, 16, 1024, dtype=BF16), spec(1024, 16, 16, 128, dtype=BF16)
    turned, total = kernels(values, shares, pages, spec(16, 64, dtype=S32))
    # 2 bytes for each of 16 sequences x 16 heads x 128 channels x 1024 tokens.
    assert turned.bytes_out == total.bytes_in == 2 * 16 * 16 * 128 * 1024
    assert (total.kind, total.bytes_out) == ("reduce", 2 * 16 * 16 * 128)


def test_dimensions_of_size_one_do_not_part_a_softmax():
    (kernel,) = kernels(jax.vmap(jax.nn.softmax), spec(1, 64, 1024))
    assert kernel.bytes == 2 * 4 * 64 * 1024


def test_an_update_that_is_only_read_is_part_of_what_reads_it():
    def total(x, part):
        return jax.lax.dynamic_update_slice(x, part, (0, 64)).sum(-1)

    (kernel,) = kernels(total, spec(4096, 1024), spec(4096, 128))
    # The compiler's kernel selects each element: the argument needs no copy.
    assert (kernel.kind, kernel.bytes_in) == ("reduce", 4 * 4096 * (1024 + 128))


def test_a_kernel_of_rows_does_not_sum_over_the_rows():
    def mean(x):
        normal = x - x.mean(-1, keepdims=True)
        return jnp.square(normal).mean(-1).sum()

    rows, *rest = kernels(mean, spec(128, 5504))
    assert rows.bytes_out == 4 * 128
    assert rest[-1].bytes_out == 4


def test_random_bits_are_no_part_of_a_softmax():
    def sampled(key, x):
        return jax.nn.softmax(x + jax.random.uniform(jax.random.wrap_key_data(key), x.shape))

    *_, bits, softmax = kernels(sampled, spec(2, dtype=jnp.uint32), spec(8192, 1024))
    size = 8192 * 1024 * 4
    # The addition gains the same in either kernel.
    assert (bits.bytes_out, softmax.bytes_out) == (size, size)
    assert bits.bytes_in + softmax.bytes_in == pytest.approx(2 * size, rel=1e-3)


def test_positions_that_are_joined_for_gathers_are_computed_where_they_are_read():
    def corners(x):
        i = jnp.arange(64, dtype=S32)
        pairs = [(a, b) for a in range(4) for b in range(4)]
        return sum(x[i[:, None] + a, i[None] + b] for a, b in pairs)

    assert len(kernels(corners, spec(128, 128, 64))) == 1


@pytest.mark.parametrize(
    ("parts", "large"), [(((1, 4096), (0, 4095)), 1), (((0, 2048), (2048, 4096)), 2)]
)
def test_kernels_of_parts_that_overlap_are_one(parts, large):
    def sums(x):
        return [jnp.exp(x[a:b]) for a, b in parts]

    assert len(kernels(sums, spec(4096, 1024))) == large


@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-80gb"])
def test_all_that_works_on_one_softmax_is_one_kernel(device):
    gradient = jax.grad(lambda x: jnp.sum(jnp.square(jax.nn.softmax(x))))
    (kernel,) = kernels(gradient, spec(1024, 16384), device=find_device(device))
    assert kernel.bytes == 2 * 4 * 1024 * 16384


def test_a_transposed_convolution_multiplies_the_holes_of_its_input():
    def convolve(x, w):
        return jax.lax.conv_transpose(x, w, (2, 2), "SAME")

    found = kernels(convolve, spec(8, 28, 28, 256), spec(2, 2, 256, 128))
    # 28 elements with 27 holes between and one of padding on either side.
    assert found[0].bytes_out == 4 * 8 * 57 * 57 * 256
    assert found[-1].flops == 2 * 8 * 56 * 56 * 128 * 256 * 2 * 2


IMAGES = ("NHWC", "HWIO", "NHWC")


def test_a_transposed_convolution_of_a_transposed_filter_is_an_input_gradient():
    def convolve(x, w):
        return jax.lax.conv_transpose(
            x, w, (2, 2), "SAME", dimension_numbers=IMAGES, transpose_kernel=True
        )

    filters = spec(4, 4, 256, 128, dtype=BF16)
    copy, conv = kernels(convolve, spec(8, 64, 64, 128, dtype=BF16), filters)
    # The library reverses the filter and skips the holes; its channels change places in one copy.
    assert copy.bytes == 2 * 2 * 4 * 4 * 256 * 128
    assert conv.bytes == 2 * (8 * 64 * 64 * 128 + 4 * 4 * 256 * 128 + 8 * 128 * 128 * 256)
    assert conv.flops == pytest.approx(2 * 8 * 64 * 64 * 128 * 256 * 4 * 4, rel=0.02)


def test_an_input_gradient_of_unequal_padding_is_cut_from_a_larger_one():
    def loss(x, w):
        found = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=IMAGES)
        return jnp.sum(jnp.tanh(found))

    found = kernels(jax.grad(loss), spec(8, 56, 56, 64), spec(3, 3, 64, 128))
    # SAME pads one element behind alone. Forward pass and gradient read one copy of the filter.
    assert [k.kind for k in found if k.kind in ("copy", "conv")].count("conv") == 2
    written = sorted(k.bytes_out // 4 for k in found if k.kind == "copy")
    assert written == [3 * 3 * 64 * 128, 8 * 56 * 56 * 64, 8 * 57 * 57 * 64]


@pytest.mark.parametrize(
    "equation, left, right",
    [
        # Two vectors, of any size; a vector with two dimensions of batch, as of a decoded token.
        ("bnd,bnd->bn", (64, 4096, 128), (64, 4096, 128)),
        ("bqhd,bkhd->bqkh", (32, 1, 16, 128), (32, 2048, 16, 128)),
        ("bqkh,bkhd->bqhd", (32, 1, 2048, 16), (32, 2048, 16, 128)),
    ],
)
def test_products_with_a_vector_that_no_kernel_is_generated_for_are_sums(equation, left, right):
    arguments = spec(*left), spec(*right)
    product = lambda x, y: jnp.einsum(equation, x, y)  # noqa: E731
    (kernel,) = kernels(product, *arguments)
    result = jax.eval_shape(product, *arguments)
    assert kernel.kind == "reduce"
    assert kernel.bytes == 4 * sum(a.size for a in (*arguments, result))


def test_positions_that_a_product_reads_are_written_for_every_row():
    def chosen(index, table):
        return jax.nn.one_hot(index, 4096, dtype=BF16) @ table

    iota, product = kernels(chosen, spec(8192, dtype=S32), spec(4096, 512, dtype=BF16))
    assert iota.bytes == 4 * 8192 * 4096
    assert product.bytes_in == 4 * 8192 + 4 * 8192 * 4096 + 2 * 4096 * 512


def test_polygamma_functions_of_a_known_order_are_zeta_functions():
    trigamma = lambda x: jax.scipy.special.polygamma(1, x)  # noqa: E731
    (kernel,) = kernels(trigamma, spec(1024, 1024))
    opcodes = {op.opcode for c in kernel.body.computations.values() for op in c.ops}
    assert "chlo.zeta" in opcodes and "chlo.polygamma" not in opcodes


def _bounded(x):
    return jnp.maximum(jnp.minimum(x, 2.0), -1.0)


def _there_and_back(x):
    return (x + 1.0).astype(BF16).astype(F32) * x


@pytest.mark.parametrize(
    "function, flops",
    [
        (_bounded, 1),
        (_there_and_back, 2),
        (lambda x: jnp.tanh(x) * 2.0 * 3.0, 1),
        (lambda x: -x * 2.0, 1),
        (lambda x: jnp.tanh(x) + -x, 1),
    ],
)
def test_arithmetic_is_simplified_as_the_compiler_does(function, flops):
    (kernel,) = kernels(function, spec(1024, 1024))
    assert kernel.flops == flops * 2**20


@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.uint64, jnp.uint16])
def test_random_bits_are_two_kernels_of_arithmetic(dtype):
    with jax.enable_x64(True):
        draw = lambda s: jax.lax.rng_bit_generator(s, (1000, 128), dtype=dtype)  # noqa: E731
        found = kernels(draw, spec(2, dtype=jnp.uint64))
    large = [k for k in found if k.bytes > 1e4]
    width = jnp.dtype(dtype).itemsize
    made = max(4, width) * 128_000
    assert [k.bytes_out for k in large] == [made, width * 128_000]
    # Ten rounds of two products and four exclusive ors for each block of four words.
    blocks = made / 16
    assert sum(k.flops for k in large) > 10 * (2 + 4) * blocks


@pytest.mark.parametrize("device, expected", [("h100-sxm", 1), ("v100-sxm", 2)])
def test_generated_products_read_batches_that_lie_innermost(device, expected):
    product = lambda a, b: jnp.einsum("mkb,bkn->bmn", a, b)  # noqa: E731
    found = kernels(product, spec(512, 256, 64), spec(64, 256, 512), device=find_device(device))
    assert len(found) == expected


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "parts", "depth"),
    [
        # As compiled for these devices (JAX 0.10). The last are padded to 16 bytes of each part.
        ("h100-sxm", F32, (19, 11264, 2560), 16, 704),
        ("h100-sxm", BF16, (128, 512, 64), 16, 32),
        ("h100-sxm", BF16, (512, 4096, 1024), 4, 1024),
        ("h100-sxm", BF16, (2048, 2048, 2048), 1, 2048),
        ("b200", BF16, (64, 1024, 1024), 8, 128),
        ("a100-sxm-80gb", BF16, (64, 1024, 1024), 4, 256),
        ("a100-sxm-80gb", BF16, (128, 256, 512), 2, 128),
        ("a100-sxm-80gb", F32, (128, 256, 512), 1, 256),
        # Libraries split by themselves.
        ("v100-sxm", F32, (64, 1024, 1024), 1, 1024),
        ("h100-sxm", BF16, (128, 9999, 128), 64, 160),
        ("a100-sxm-80gb", F32, (128, 9999, 128), 32, 316),
    ],
)
def test_products_that_leave_cores_idle_are_split(device, dtype, sizes, parts, depth):
    rows, length, columns = sizes
    found = kernels(
        jnp.matmul,
        spec(rows, length, dtype=dtype),
        spec(length, columns, dtype=dtype),
        device=find_device(device),
    )
    (product,) = [k for k in found if k.kind == "gemm"]
    assert product.op.type.shape == ((parts,) * (parts > 1) + (rows, columns))
    assert product.flops == 2 * rows * parts * depth * columns
    if parts > 1:
        assert product.op.type.dtype == "f32"
        assert [k.bytes_in for k in found if k.kind == "reduce"] == [4 * parts * rows * columns]


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_products_of_nothing_take_nothing(sizes):
    rows, length, columns = sizes
    found = kernels(jnp.matmul, spec(rows, length), spec(length, columns), device=H100)
    assert sum(k.flops for k in found) == 0


@pytest.mark.parametrize(("algorithm", "parts"), [("DEFAULT", 1), ("BF16_BF16_F32_X6", 4)])
def test_products_of_passes_are_split_more(algorithm, parts):
    """As compiled for an H100 and an A100 (JAX 0.10)."""
    found = kernels(
        lambda x, w: jax.lax.dot(x, w, precision=algorithm), spec(1024, 512), spec(512, 512)
    )
    assert (len(found), found[0].op.type.size) == (1 + (parts > 1), parts * 1024 * 512)


def test_cheap_branches_are_both_computed():
    def chosen(flag, x):
        return jax.lax.cond(flag > 0, jnp.tanh, lambda v: v * 0.5, x) + 1.0

    (kernel,) = kernels(chosen, spec(dtype=S32), spec(1024, 1024))
    assert kernel.kind == "fusion"
    assert (kernel.bytes_in, kernel.bytes_out) == (4 + 4 * 2**20, 4 * 2**20)


def test_branches_with_products_stay():
    def chosen(flag, x):
        return jax.lax.cond(flag > 0, lambda v: v @ v, lambda v: v * 0.5, x)

    found = kernels(chosen, spec(dtype=S32), spec(1024, 1024))
    assert [k.kind for k in found if k.scope].count("gemm") == 1


def test_a_complex_exponential_is_computed_with_real_functions():
    (kernel,) = kernels(jnp.exp, spec(1024, dtype=jnp.complex64))
    # e^x, cos y and sin y; XLA's cost analysis counts one more, of a case that it tells apart.
    assert (kernel.transcendentals, kernel.bytes) == (3 * 1024, 2 * 8 * 1024)


def test_volumes_keep_their_channels_outside():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1, 1), "SAME")

    assert [k.kind for k in kernels(convolve, spec(2, 8, 8, 8, 8), spec(8, 8, 3, 3, 3))] == ["conv"]


@pytest.mark.parametrize("dtype, expected", [(F32, 0), (BF16, 3)])
def test_an_a100_has_channels_innermost_in_half_precision_alone(dtype, expected):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    arguments = spec(8, 64, 32, 32, dtype=dtype), spec(64, 64, 3, 3, dtype=dtype)
    found = kernels(convolve, *arguments, device=find_device("a100-sxm-80gb"))
    assert [k.kind for k in found].count("copy") == expected


N = 1 << 20


@pytest.mark.parametrize(
    ("device", "function", "each"),
    [
        # FLOPs of an element, by XLA's count of its own kernels for both devices.
        ("h100-sxm", lambda x, y: x + y, 1),
        ("a100-sxm-80gb", lambda x, y: x + y, 4),
        ("h100-sxm", lambda x, y: x / y, 4),
        ("h100-sxm", lambda x, y: jnp.maximum(x, -y), 2),
        ("h100-sxm", lambda x, y: jnp.exp(x) * y, 1),
    ],
)
def test_arithmetic_that_bf16_lacks_runs_between_conversions(device, function, each):
    arguments = spec(N, dtype=BF16), spec(N, dtype=BF16)
    (kernel,) = kernels(function, *arguments, device=find_device(device))
    assert (kernel.flops, kernel.bytes) == (each * N, 3 * 2 * N)


def test_a_sum_of_bf16_is_one_of_f32_where_bf16_has_no_sums():
    def total(x):
        return jax.lax.reduce(x, jnp.zeros((), BF16), jax.lax.add, (1,))

    flops = {}
    for name in ("h100-sxm", "a100-sxm-80gb"):
        found = kernels(total, spec(1024, 1024, dtype=BF16), device=find_device(name))
        flops[name] = sum(k.flops for k in found)
    # A conversion of each element and result more.
    assert flops["a100-sxm-80gb"] - flops["h100-sxm"] == pytest.approx(N + 1024, abs=1)


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        # Negated once a row; chosen instead of multiplied; indexes compute their row alone.
        (lambda x: (-x).sum(1), 1023 * 1024 + 1024),
        (lambda x: x * (x > 0.0), 2 * N),
        (lambda x: jax.lax.broadcasted_iota(F32, (1024, 1024), 1) * 3.0, 1024),
        (jnp.arccos, 0),
        (jnp.sinh, 0),
        (lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32) >> 3, N),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(F32) + x, N),
    ],
)
def test_flops_are_those_of_the_simplified_kernels(function, flops):
    found = kernels(function, spec(1024, 1024))
    assert sum(k.flops for k in found) == pytest.approx(flops, rel=1e-3)


def read_by_product(narrow, wide=BF16, device="l40s"):
    """Bytes that the kernel of a product of 16 by 4096 by 8192 reads, and the count of kernels."""
    matrix = spec(4096, 8192, dtype=narrow)
    rows = spec(16, 4096, dtype=wide)
    found = kernels(lambda a, b: a @ b.astype(wide), rows, matrix, device=find_device(device))
    (product,) = [k for k in found if k.kind == "gemm"]
    return product.bytes_in - 16 * 4096 * jnp.dtype(wide).itemsize, len(found)


@pytest.mark.parametrize(
    ("narrow", "device", "bits", "alone"),
    [
        ("int8", "l40s", 8, False),
        ("int4", "a100-sxm-80gb", 4, False),
        ("float8_e5m2", "l40s", 8, False),
        ("float8_e4m3fn", "h100-sxm", 8, False),
        # An argument is read as it is even if it is wider.
        ("int32", "b200", 32, False),
        # What Triton cannot convert is converted by a kernel before.
        ("float8_e4m3fn", "l40s", 16, True),
        ("uint8", "h100-sxm", 16, True),
        ("int8", "v100-pcie", 16, True),
    ],
)
def test_a_product_reads_weights_as_they_are_stored(narrow, device, bits, alone):
    wide = jnp.float16 if device == "v100-pcie" else BF16
    read, count = read_by_product(jnp.dtype(narrow), wide, device)
    assert read == 4096 * 8192 * bits / 8
    # The split product of few rows has a sum of its parts; libraries' products are not split.
    assert count == 1 + alone + (device != "v100-pcie")


def test_a_product_converts_a_transposed_matrix_itself():
    matrix = spec(4096, 2048, dtype=jnp.int8)
    rows = spec(4096, 4096, dtype=BF16)
    (product,) = kernels(lambda a, b: b.T.astype(BF16) @ a, rows, matrix)
    assert product.bytes_in == 4096 * (2 * 4096 + 2048)


def test_two_readers_of_a_conversion_convert_each():
    def both(a, b):
        return a @ b.astype(BF16), b.astype(BF16) + 1

    matrix = spec(4096, 4096, dtype=jnp.int8)
    product, *rest = kernels(both, spec(2048, 4096, dtype=BF16), matrix)
    assert product.bytes_in == 2 * 2048 * 4096 + 4096**2
    assert sum(k.bytes for k in rest) == 3 * 4096**2


def test_a_product_of_what_a_kernel_narrowed_reads_the_narrow_array():
    def normed(x, w):
        return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))).astype(BF16) @ w

    norm, product = kernels(normed, spec(1024, 4096), spec(4096, 4096, dtype=BF16))
    assert (norm.bytes_out, product.bytes_in) == (2 * 1024 * 4096, 2 * (1024 + 4096) * 4096)


@pytest.mark.parametrize(
    ("dtype", "device", "width"),
    [
        ("float8_e4m3fn", "h100-sxm", 1),
        ("float8_e4m3fn", "l40s", 1),
        ("float8_e4m3fn", "a100-sxm-80gb", 2),
        ("float8_e4m3fn", "mi300x", 2),
        ("float8_e4m3fn", "mi355x", 1),
        ("float8_e4m3fnuz", "h100-sxm", 2),
        ("float8_e4m3fnuz", "mi300x", 1),
        ("float8_e4m3fnuz", "mi355x", 2),
    ],
)
def test_a_product_of_a_format_that_the_chip_lacks_is_one_of_16_bits(dtype, device, width):
    own = spec(4096, 4096, dtype=jnp.dtype(dtype))
    found = kernels(
        lambda a, b: jax.lax.dot(a, b, preferred_element_type=BF16),
        own,
        own,
        device=find_device(device),
    )
    product = found[-1]
    assert (product.kind, product.bytes_in) == ("gemm", 2 * width * 4096**2)
    # Each operand is widened by a kernel of its own.
    assert len(found) == (1 if width == 1 else 3)


def scaled(b, s):
    return b.astype(BF16) * s


@pytest.mark.parametrize("device", ["l40s", "a100-sxm-80gb", "h100-sxm"])
@pytest.mark.parametrize(
    ("function", "scale", "passes"),
    [
        (lambda a, b, s: a @ scaled(b, s), spec(8192, dtype=BF16), 0),
        (lambda a, b, s: a @ scaled(b, s[:, None]), spec(4096, dtype=BF16), 0),
        (lambda a, b, s: a @ scaled(b, s), spec(dtype=BF16), 0),
        (lambda a, b, s: a @ ((b.astype(BF16) - s) * s), spec(8192, dtype=BF16), 0),
        # A scale of groups, one that a kernel makes, and arithmetic that is narrowed after it.
        (
            lambda a, b, s: a @ scaled(b.reshape(32, 128, 8192), s[:, None]).reshape(4096, 8192),
            spec(32, 8192, dtype=BF16),
            1,
        ),
        (lambda a, b, s: a @ scaled(b, jax.lax.sort(s)), spec(8192, dtype=BF16), 1),
        (lambda a, b, s: a @ (b.astype(F32) * s).astype(BF16), spec(8192), 1),
        # After the product: the scale of a column and an activation, not what widens it.
        (lambda a, b, s: jnp.tanh((a @ b.astype(BF16)) * s), spec(8192, dtype=BF16), 0),
        (lambda a, b, s: (a @ b.astype(BF16)).astype(F32) * s, spec(8192), 1),
    ],
)
def test_a_product_scales_what_it_converts(function, scale, passes, device):
    """As XLA's compilers have it for these functions and devices."""
    rows, matrix = spec(2048, 4096, dtype=BF16), spec(4096, 8192, dtype=jnp.int8)
    found = kernels(function, rows, matrix, scale, device=find_device(device))
    (product,) = [k for k in found if k.kind == "gemm"]
    assert len([k for k in found if k.kind == "fusion"]) == passes
    if not passes:
        vector = jnp.dtype(scale.dtype).itemsize * scale.size
        assert product.bytes_in == 2 * 2048 * 4096 + 4096 * 8192 + vector
        assert product.bytes_out == 2 * 2048 * 8192


def test_a_product_adds_an_argument_to_what_it_scales():
    def added(a, b, s, r):
        return r + (a @ b.astype(BF16)) * s

    arguments = spec(2048, 4096, dtype=BF16), spec(4096, 8192, dtype=jnp.int8)
    vector, matrix = spec(8192, dtype=BF16), spec(2048, 8192, dtype=BF16)
    (product,) = kernels(added, *arguments, vector, matrix)
    read = 2 * 2048 * 4096 + 4096 * 8192 + 2 * 8192 + 2 * 2048 * 8192
    assert (product.bytes_in, product.bytes_out) == (read, 2 * 2048 * 8192)


SQUARE = spec(4096, 4096)
#: Bytes of such an array, of f32.
WHOLE = 4 * 4096**2
WIDE = spec(8, 16, 2048, 128, dtype=BF16)


@pytest.mark.parametrize(
    ("function", "arguments", "moved"),
    [
        # Tiles are turned in shared memory, whatever elementwise ops stand before and behind.
        (lambda x, y: x.T + y, (SQUARE, SQUARE), [3 * WHOLE]),
        (lambda x, y: jnp.where(y > 0, jnp.tanh(x * 2).T, y), (SQUARE, SQUARE), [3 * WHOLE]),
        (lambda x, y: (x.T + y, x.T * y), (SQUARE, SQUARE), [4 * WHOLE]),
        # One transpose each.
        (lambda x, y, z: x.T + y + z.T * 3, (SQUARE,) * 3, [3 * WHOLE, 3 * WHOLE]),
        # Behind anything else elements would be read one by one.
        (lambda x, y: jnp.concatenate([x.T, y]), (SQUARE, SQUARE), [2 * WHOLE, 4 * WHOLE]),
        # Rows of four make no tiles, and then nothing is read as neighbours.
        (lambda x, y: x.T + y, (spec(4, 2**22), spec(2**22, 4)), [2 * WHOLE, 3 * WHOLE]),
        # Transposes of all operands move below the op, and a sum takes their place in.
        (lambda x, y: x.T + y.T, (SQUARE, SQUARE), [3 * WHOLE]),
        (lambda x: jnp.exp(2 * x.T - 1).sum(0), (SQUARE,), [WHOLE + 4 * 4096]),
        # Keys of a decoded token, by the dimension of a head.
        (
            lambda q, k: jnp.einsum("bhd,bhdk->bhk", q, k.transpose(0, 1, 3, 2)),
            (spec(8, 16, 128, dtype=BF16), WIDE),
            [2 * 8 * 16 * (128 + 2048 * 128 + 2048)],
        ),
    ],
)
def test_transposes_are_fused_by_the_order_that_they_leave(function, arguments, moved):
    found = kernels(function, *arguments)
    assert [k.bytes for k in found] == moved


@pytest.mark.parametrize(("batch", "side", "kind"), [(4, 3000, "reduce"), (2, 3400, "gemm")])
def test_small_products_with_a_vector_are_sums_however_many_there_are(batch, side, kind):
    (found,) = kernels(jax.vmap(jnp.dot), spec(batch, side, side), spec(batch, side))
    assert found.kind == kind


def test_the_order_of_the_first_of_two_products_goes_on():
    """Where they meet, the other one is turned, as in the gradient of attention."""

    def scored(k, q, g, v):
        scores = jnp.einsum("bkhd,bqhgd->bhgqk", k, q)
        given = jnp.einsum("bqhgd,bkhd->bhgqk", g, v)
        return jnp.einsum("bhgqk,bkhd->bqhgd", jnp.exp(scores) * given, k)

    keys, queries = spec(2, 2048, 16, 128, dtype=BF16), spec(2, 2048, 16, 1, 128, dtype=BF16)
    found = kernels(scored, keys, queries, queries, keys)
    # Two products of copies, a third of what one kernel makes of both, and its result turned.
    opcodes = [k.kind for k in found]
    assert opcodes == [*["copy"] * 2, "gemm"] * 2 + ["fusion", "gemm", "copy"]


@pytest.mark.parametrize(
    ("equation", "copies"), [("bij,bjk->kbi", 0), ("bij,bjk->ikb", 0), ("aibj,bajk->aibk", 3)]
)
def test_products_are_written_in_any_order_of_batch_rows_and_columns(equation, copies):
    sizes = {"a": 4, "b": 16, "i": 512, "j": 512, "k": 512}
    words = equation.partition("->")[0].split(",")
    arrays = [spec(*map(sizes.__getitem__, word), dtype=BF16) for word in words]
    kinds = [k.kind for k in kernels(lambda x, y: jnp.einsum(equation, x, y), *arrays)]
    assert (kinds.count("gemm"), kinds.count("copy")) == (1, copies)


def test_dimensions_that_lie_apart_are_summed_one_after_the_other():
    """Group norm's sums, as compiled for an H100: pixels first, then the channels of a group."""
    sums = kernels(lambda x: x.sum((1, 3)), spec(16, 4096, 32, 8))
    whole, part, total = 16 * 4096 * 32 * 8 * 4, 16 * 32 * 8 * 4, 16 * 32 * 4
    assert [(k.bytes_in, k.bytes_out) for k in sums] == [(whole, part), (part, total)]


def test_functions_of_a_sum_alone_are_in_its_kernel():
    """The logarithm is, as compiled for an H100; a factor, which is an array to XLA, is not."""
    x = spec(2048, 8192)
    assert len(kernels(lambda x: jnp.log(jnp.exp(x).sum(0)), x)) == 1
    assert len(kernels(lambda x: jnp.exp(x).sum(0) * 0.5, x)) == 2


@pytest.mark.parametrize(("rows", "count"), [(1024, 4), (256, 4)])
def test_code_that_is_emitted_again_and_again_is_limited(rows, count):
    """Kernels of an associative scan, as compiled for an H100 (JAX 0.10)."""

    def join(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    found = kernels(lambda a, b: jax.lax.associative_scan(join, (a, b)), *[spec(rows, 512)] * 2)
    assert len(found) == count


CACHE, TOKEN = spec(8, 1024, 4, 64, dtype=BF16), spec(8, 1, 4, 64, dtype=BF16)
QUERY, PLACE = spec(8, 4, 8, 64, dtype=BF16), spec(dtype=S32)
MOVED = 2 * 8 * 1024 * 4 * 64 * 2  # a cache, read and written


def scores(cache, token, query, place):
    cache = jax.lax.dynamic_update_slice(cache, token, (0, place, 0, 0))
    return cache, jnp.einsum("bhqd,bthd->bhqt", query, cache)


def test_a_cache_is_updated_in_the_order_of_the_product_that_reads_it():
    # Compiled: two transposes of the cache, the one back with the update inside, for the argument
    # and the result have their own order; the update comes last.
    found = kernels(scores, CACHE, TOKEN, QUERY, PLACE, donate=0)
    assert len(found) == 4
    whole = [k for k in found if k.bytes >= MOVED]
    assert [k.bytes // MOVED for k in whole] == [1, 1]
    assert not [k for k in found if k.opcode == "copy"]


def test_a_cache_that_a_reshape_makes_keeps_its_order():
    def flat(cache, token, query, place):
        cache = jax.lax.dynamic_update_slice(cache, token, (0, place, 0))
        apart = cache.reshape(CACHE.shape)
        return cache, jnp.einsum("bhqd,bthd->bhqt", query, apart)

    flats = spec(8, 1024, 256, dtype=BF16), spec(8, 1, 256, dtype=BF16)
    found = kernels(flat, *flats, QUERY, PLACE, donate=0)
    assert len([k for k in found if k.bytes >= MOVED]) == 1


def test_a_scatter_into_a_cache_has_the_order_of_the_product_too():
    def scattered(cache, rows, query, places):
        cache = cache.at[jnp.arange(8), places].set(rows)
        return cache, jnp.einsum("bhqd,bthd->bhqt", query, cache)

    rows, places = spec(8, 4, 64, dtype=BF16), spec(8, dtype=S32)
    found = kernels(scattered, CACHE, rows, QUERY, places, donate=0)
    # No update inside of the transpose back, which therefore reads what the scatter wrote.
    assert [k.bytes for k in found].count(MOVED) == 2


def test_caches_of_keys_and_values_are_copied_where_that_saves_memory():
    # Compiled: both go back to their own order at the end, so each update starts from a copy.
    def attend(keys, values, key, value, query, place):
        keys, s = scores(keys, key, query, place)
        values = jax.lax.dynamic_update_slice(values, value, (0, place, 0, 0))
        return keys, values, jnp.einsum("bhqt,bthd->bhqd", s, values)

    found = kernels(attend, CACHE, CACHE, TOKEN, TOKEN, QUERY, PLACE, donate=(0, 1))
    assert [k.opcode for k in found].count("copy") == 2
    assert len([k for k in found if k.bytes >= MOVED]) == 6


def test_caches_that_a_loop_carries_are_transposed_before_and_after_it():
    # Compiled: four transposes of all layers, none of one layer; no copies of donated caches.
    layers = 4
    stack = spec(layers, *CACHE.shape, dtype=BF16)
    token = spec(layers, *TOKEN.shape, dtype=BF16)

    def attend(keys, values, tokens, query, place):
        def layer(carry, inputs):
            query, *caches = carry
            index, token = inputs
            start = (index, 0, place, 0, 0)
            caches = [jax.lax.dynamic_update_slice(c, token[None], start) for c in caches]
            keys, values = (jax.lax.dynamic_index_in_dim(c, index, 0, False) for c in caches)
            scores = jnp.einsum("bhqd,bthd->bhqt", query, keys)
            return (jnp.einsum("bhqt,bthd->bhqd", scores, values), *caches), None

        inputs = (jnp.arange(layers), tokens)
        return jax.lax.scan(layer, (query, keys, values), inputs)[0]

    found = kernels(attend, stack, stack, token, QUERY, PLACE, donate=(0, 1))
    assert [k.bytes for k in found].count(layers * MOVED) == 4
    layer = [k.ir for k in found if MOVED <= k.bytes < layers * MOVED]
    assert layer and not [ir for ir in layer if " transpose(" in ir]


def test_an_update_of_a_value_that_a_later_kernel_reads_has_a_copy():
    def read(x, part, place):
        values = jnp.sort(x, axis=1)
        made = jax.lax.dynamic_update_slice(values, part, (place, 0))
        return made, values * made[0, 0]

    arguments = spec(1024, 4096), spec(8, 4096), PLACE
    assert [k.opcode for k in kernels(read, *arguments)].count("copy") == 1
    early = kernels(lambda x, part, place: read(x, part, place)[0], *arguments)
    assert "copy" not in [k.opcode for k in early]


def test_a_small_sum_inside_of_a_scatter_does_not_name_it():
    def combined(rows, groups, counts):
        start = jnp.cumsum(counts) - counts
        return jnp.zeros((8192, 256)).at[start[groups]].add(rows)

    *_, scatter = kernels(combined, spec(4096, 256), spec(4096, dtype=S32), spec(16, dtype=S32))
    codes = {op.opcode for c in scatter.body.computations.values() for op in c.ops}
    assert {"reduce-window", "scatter"} <= codes
    assert scatter.sources[0].op == "stablehlo.scatter"
