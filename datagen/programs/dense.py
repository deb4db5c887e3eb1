"""Matrix products and convolutions of every layout."""

from __future__ import annotations

import math

import jax
from jax import lax

from .draws import (
    BATCHES,
    CHANNELS,
    HEAD_WIDTHS,
    HEADS,
    IMAGES,
    LENGTHS,
    VOCABULARIES,
    WIDTHS,
    Draft,
    Draws,
    Function,
    struct,
    values,
)
from .source import Arg, numpy_dtype

#: Smallest product or convolution aimed at: a 13 x 13 x 13 product, below any device's floor.
_FEW_FLOPS = 4e3
#: Layouts of input, filter and result by spatial dimensions: XLA's and TensorFlow's (channels
#: last), of PyTorch (channels first), and of TFLite's filters.
_LAYOUTS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OHWI", "NHWC")),
    3: (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
}
Dims = tuple[int, int, int, int]


def _bound(draws: Draws, b: int, m: int, n: int, k: int) -> float:
    """Return the FLOPs, or infinity where operands and result need too much memory."""
    need = 4.0 * b * (m * k + k * n + m * n)
    return 2.0 * b * m * n * k if need <= draws.max_bytes else math.inf


def _model_dims(draws: Draws, form: str) -> Dims:
    batch, length = draws.choice(BATCHES), draws.choice(LENGTHS)
    width, other = draws.choice(WIDTHS), draws.choice(WIDTHS)
    if form == "attention":
        count, head = batch * draws.choice(HEADS), draws.choice(HEAD_WIDTHS)
        # One query row is a decoding step.
        query = 1 if draws.flip(0.15) else length
        return (count, query, length, head) if draws.flip() else (count, query, head, length)
    if form == "batched":
        return (draws.choice(BATCHES), draws.choice((batch, length)), width, other)
    if form == "vector":
        return (1, 1, width, other) if draws.flip() else (1, other, 1, width)
    if draws.flip(0.1):
        other = draws.choice(VOCABULARIES)
    if draws.flip(0.2):  # a weight gradient contracts the tokens
        return (1, width, other, batch * length)
    return (1, draws.choice((batch, length, batch * length)), other, width)


def _random_dims(draws: Draws, form: str, flops: float) -> Dims:
    if form == "vector":
        n, k = draws.split(flops / 2, 2, 4.0)
        return (1, 1, n, k) if draws.flip() else (1, n, 1, k)
    batch = 1 if form == "plain" else draws.size(2, max(2, int(min(512, flops / 256))))
    m, n, k = draws.split(max(1.0, flops / 2 / batch), 3, 3.0)
    return (batch, m, n, k)


def _product_dims(draws: Draws, form: str) -> Dims:
    flops = draws.log_uniform(_FEW_FLOPS, draws.max_flops)
    if draws.flip():
        nearest = draws.closest(
            lambda: _model_dims(draws, form), lambda d: _bound(draws, *d), flops
        )
        if nearest is not None:
            return nearest
    # Terminates: halving ends at a product that fits.
    while True:
        dims = _random_dims(draws, form, flops)
        if _bound(draws, *dims) <= draws.max_flops:
            return dims
        flops /= 2


def dot_general(draws: Draws) -> Draft:
    """Draw a product ``(b, m, k) × (b, k, n)`` with any order of its operands' dimensions."""
    form = draws.weighted({"plain": 0.5, "attention": 0.2, "batched": 0.15, "vector": 0.15})
    b, m, n, k = _product_dims(draws, form)
    batch = b > 1 or (form == "batched" and draws.flip(0.3))
    left, left_axes = _operand(draws, b if batch else 0, m, k)
    right, right_axes = _operand(draws, b if batch else 0, n, k)
    if not batch and draws.flip(0.1):
        # Splitting the rows gives the shapes of layers that keep (batch, length) apart.
        left, left_axes = _split_rows(draws, left, left_axes)
    numbers = (
        ((left_axes[1],), (right_axes[1],)),
        ((left_axes[0],), (right_axes[0],)) if batch else ((), ()),
    )
    # A few products are quantised; 16-bit ones often keep their f32 accumulator as the result.
    dtype = "s8" if draws.flip(0.04) else draws.dtype()
    result: str | None = None
    if dtype == "s8":
        result = "s32"
    elif dtype != "f32" and draws.flip(0.3):
        result = "f32"

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        preferred = None if result is None else numpy_dtype(result)
        return lax.dot_general(x, y, numbers, preferred_element_type=preferred)

    return Draft(function, (values(left, dtype), values(right, dtype, 1 / math.sqrt(k))), form)


def _operand(
    draws: Draws, batch: int, rows: int, inner: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Draw an operand's layout; return its shape and its (batch, contracting) dimensions."""
    labels = [("r", rows), ("k", inner)]
    if draws.flip(0.4):
        labels.reverse()
    if batch:
        labels.insert(0 if draws.flip(0.7) else draws.integer(0, 2), ("b", batch))
    names = [name for name, _ in labels]
    return tuple(n for _, n in labels), (names.index("b") if batch else -1, names.index("k"))


def _split_rows(
    draws: Draws, shape: tuple[int, ...], axes: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    row = 1 - axes[1]
    factors = [f for f in (2, 4, 8, 16, 32) if shape[row] % f == 0]
    if not factors:
        return shape, axes
    factor = draws.choice(factors)
    split = (*shape[:row], factor, shape[row] // factor, *shape[row + 1 :])
    return split, (-1, axes[1] + (1 if row < axes[1] else 0))


def convolve(
    x: jax.Array,
    w: jax.Array,
    layout: tuple[str, str, str],
    *,
    stride: int,
    padding: str,
    groups: int,
    dilation: int = 1,
) -> jax.Array:
    """Convolve with one stride and one dilation of the filter for all spatial dimensions."""
    spatial = x.ndim - 2
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * spatial,
        padding,
        rhs_dilation=(dilation,) * spatial,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


def convolution(draws: Draws) -> Draft:
    """Draw a forward convolution: plain, strided, dilated, grouped, depthwise, or of patches."""
    conv, x, w, note = _conv_case(draws)
    return Draft(conv, (x, w), note)


def conv_input_grad(draws: Draws) -> Draft:
    """Draw the gradient of a convolution with respect to its input."""
    conv, x, w, note = _conv_case(draws)
    like = struct(x.shape, x.dtype)
    out = _conv_result(conv, x, w)

    def function(grad: jax.Array, weight: jax.Array) -> object:
        return jax.linear_transpose(lambda v: conv(v, weight), like)(grad)[0]

    return Draft(function, (out, w), note)


def conv_filter_grad(draws: Draws) -> Draft:
    """Draw the gradient of a convolution with respect to its filter."""
    conv, x, w, note = _conv_case(draws)
    like = struct(w.shape, w.dtype)
    out = _conv_result(conv, x, w)

    def function(image: jax.Array, grad: jax.Array) -> object:
        return jax.linear_transpose(lambda v: conv(image, v), like)(grad)[0]

    return Draft(function, (x, Arg(out.shape, out.dtype, high=0.05)), note)


def _conv_result(conv: Function, x: Arg, w: Arg) -> Arg:
    result = jax.eval_shape(conv, struct(x.shape, x.dtype), struct(w.shape, w.dtype))
    return Arg(tuple(result.shape), x.dtype)


def _conv_sizes(draws: Draws, spatial: int) -> tuple[int, int, int, int]:
    """Draw batch, side, and channels in and out."""
    if draws.flip():
        sides = {1: LENGTHS, 2: IMAGES, 3: IMAGES[:5]}[spatial]
        channels = CHANNELS if spatial < 3 else CHANNELS[:7]
        return (
            draws.choice(BATCHES),
            draws.choice(sides),
            draws.choice(channels),
            draws.choice(channels),
        )
    top = {1: 4096, 2: 256, 3: 32}[spatial]
    return (
        round(draws.log_uniform(1, 64)),
        round(draws.log_uniform(4, top)),
        round(draws.log_uniform(1, 768)),
        round(draws.log_uniform(1, 768)),
    )


def _conv_case(draws: Draws) -> tuple[Function, Arg, Arg, str]:
    spatial = draws.weighted({1: 0.15, 2: 0.75, 3: 0.10})
    form = draws.weighted(
        {
            "plain": 0.4,
            "strided": 0.2,
            "depthwise": 0.13,
            "grouped": 0.09,
            "dilated": 0.09,
            "patches": 0.09,
        }
    )
    # 1 and 3 dominate image models; audio models such as Conformer use windows of about 31.
    kernel = draws.choice({1: (1, 3, 5, 7, 9, 31), 2: (1, 1, 3, 3, 3, 5, 7), 3: (1, 3)}[spatial])
    stride = draws.choice((2, 2, 3)) if form == "strided" else 1
    dilation = draws.choice((2, 4)) if form == "dilated" else 1
    # Patch embeddings of vision transformers: windows side by side, of 14 or 16 in most models.
    if form == "patches":
        kernel = stride = draws.choice((2, 4, 8, 14, 16) if spatial < 3 else (2, 4))
    dtype = draws.dtype()
    flops = draws.log_uniform(_FEW_FLOPS, draws.max_flops)

    def propose() -> tuple[int, int, int, int]:
        return _conv_sizes(draws, spatial)

    def cost(sizes: tuple[int, int, int, int]) -> float:
        batch, side, c_in, c_out = sizes
        outputs = batch * (side / stride) ** spatial
        c_in_work = 1 if form == "depthwise" else c_in
        # Half of the memory: gradients need the same again.
        need = 4.0 * (batch * side**spatial * c_in + outputs * c_out)
        if need > draws.max_bytes / 2 or side < kernel:
            return math.inf
        return 2 * outputs * c_out * c_in_work * float(kernel) ** spatial

    sizes = draws.closest(propose, cost, flops)
    batch, side, c_in, c_out = sizes or (1, max(4, kernel), 4, 4)
    groups = 1
    if form == "depthwise":
        groups, c_out = c_in, c_in * draws.choice((1, 1, 1, 2))
    elif form == "grouped":
        groups = draws.choice((2, 4, 8, 32))
        c_in, c_out = (max(1, c // groups) * groups for c in (c_in, c_out))
    padding = draws.choice(("SAME", "SAME", "VALID")) if form != "patches" else "VALID"
    # Without padding a filter wider than the image would leave no result.
    if side < (kernel - 1) * dilation + 1:
        padding = "SAME"
    layout = draws.choice(_LAYOUTS[spatial])
    sizes_of = {"N": batch, "C": c_in, "I": c_in // groups, "O": c_out}
    x_shape = tuple(sizes_of.get(c, side) for c in layout[0])
    w_shape = tuple(sizes_of.get(c, kernel) for c in layout[1])
    fan_in = c_in // groups * kernel**spatial

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return convolve(
            x, w, layout, stride=stride, padding=padding, groups=groups, dilation=dilation
        )

    # Weights of variance 1 / fan_in keep results of the size of the input (Glorot and Bengio 2010).
    scale = 1 / math.sqrt(fan_in)
    return conv, Arg(x_shape, dtype), Arg(w_shape, dtype, high=scale), f"{form}-{spatial}d"


def matrix_sizes(draws: Draws) -> tuple[int, int, int]:
    """Draw rows, columns and inner size of a plain product."""
    _, m, n, k = _product_dims(draws, "plain")
    return m, n, k
