"""Programs that the lowerings ``fused`` and ``xla`` are compared on: every op, and compositions.

A case is known by its name alone, from which it is drawn again. Ops are drawn by the samplers of
:mod:`opcast.datagen.programs`, where those have one, and written here where not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opcast.datagen.programs.random_program import random_program
from opcast.datagen.programs.single_op import OPCODES, sample_op

#: Most bytes and work: what an accelerator does in some ten milliseconds.
LIMITS = {"max_bytes": 2e9, "max_flops": 1e12}
#: Bytes or FLOPs that an op has at least, so that its launch does not hide the rest.
LEAST_BYTES, LEAST_FLOPS = 2e7, 5e9
_ATTEMPTS = 12
#: Random compositions, and draws of every op that has a sampler.
COMPOSITIONS, DRAWS = 500, 2
F32, BF16, S32, S8, C64 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.complex64


class Case(NamedTuple):
    """A program to lower in two ways.

    Attributes:
        name: What it is drawn by: ``random/17``, ``sort/1``, ``eigh``.
        kind: Class of op, a row of the table.
    """

    name: str
    kind: str


#: Classes of the ops that have a sampler, those of element-wise ones left out.
_KINDS = {
    "products": "dot_general linear gated one_hot",
    "convolutions": "convolution conv_input_grad conv_filter_grad",
    "reductions": "reduce moments argmax",
    "windows and scans": "reduce_window select_and_scatter cumulative associative_scan",
    "sorts": "sort top_k",
    "gathers and scatters": "gather scatter",
    "moves": "broadcast_in_dim transpose reshape slice dynamic_slice dynamic_update_slice pad "
    "concatenate reverse iota tile",
    "softmax, norms, losses": "softmax layer_norm batch_norm cross_entropy",
    "attention": "attention rope",
    "loops": "while",
    "random bits": "rng_bit_generator threefry dropout",
    "library calls": "fft cholesky triangular_solve",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def cases() -> list[Case]:
    """All of them, ops first."""
    found = [Case(f"{op}/{n}", _KIND_OF.get(op, "element-wise"))
             for op in OPCODES for n in range(DRAWS)]  # fmt: skip
    found += [Case(name, kind) for kind, own in WRITTEN.items() for name in own]
    return found + [Case(f"random/{n}", "compositions") for n in range(COMPOSITIONS)]


def text_of(name: str, platform: str = "cuda") -> str:
    """StableHLO of a case for a platform of JAX; the same for the same name and platform."""
    for own in WRITTEN.values():
        if name in own:
            function, arguments = own[name]
            traced = jax.jit(function).trace(*arguments)
            return traced.lower(lowering_platforms=(platform,)).as_text()
    op, _, number = name.partition("/")
    rng = np.random.default_rng([zlib.crc32(op.encode()), int(number)])
    if op == "random":
        return random_program(rng, **LIMITS, platform=platform).mlir
    for _ in range(_ATTEMPTS):
        drawn = sample_op(rng, op, **LIMITS, platform=platform)
        if drawn.est_bytes >= LEAST_BYTES or drawn.est_flops >= LEAST_FLOPS:
            break
    return drawn.mlir


def spec(*shape: int, dtype: object = F32) -> jax.ShapeDtypeStruct:
    """An argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


Written = tuple[Callable[..., object], tuple[jax.ShapeDtypeStruct, ...]]


def _conv(
    strides: tuple[int, ...], names: tuple[str, str, str], **options: object
) -> Callable[..., object]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, "SAME", dimension_numbers=names, **options
    )


def _loop_of_slices(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        row = jnp.tanh(lax.dynamic_index_in_dim(x, i, keepdims=False) @ w)
        return lax.dynamic_update_index_in_dim(y, row, i, 0)

    return lax.fori_loop(0, x.shape[0], step, jnp.zeros_like(x))


def _until(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 10, lambda _, v: v - 0.1 * (jnp.sin(v) * v.mean()), x)


def _grad(function: Callable[..., jax.Array], wanted: int = 0) -> Callable[..., jax.Array]:
    return jax.grad(lambda *x: jnp.sum(jnp.square(function(*x).astype(F32))), wanted)


_MATRIX = spec(4096, 4096)
_KEY = spec(2, dtype=jnp.uint32)
_LONG = spec(1024, 16384)
_BATCH = spec(64, 128, 128)
_COMPLEX = spec(1024, 1024, dtype=C64)
_HEADS = spec(4, 1024, 16, 64, dtype=BF16)


def _unary(*functions: Callable[[jax.Array], jax.Array]) -> Mapping[str, Written]:
    return {f.__name__: (f, (_MATRIX,)) for f in functions}


#: Ops and idioms without a sampler, by class.
WRITTEN: Mapping[str, Mapping[str, Written]] = {
    "products": {
        "int8-product": (
            lambda a, b: lax.dot(a, b, preferred_element_type=S32),
            (spec(4096, 4096, dtype=S8), spec(4096, 4096, dtype=S8)),
        ),
        "int32-product": (jnp.matmul, (spec(512, 512, dtype=S32), spec(512, 512, dtype=S32))),
        "batched-einsum": (
            lambda a, b: jnp.einsum("bijk,bjlk->bil", a, b),
            (spec(16, 128, 64, 32), spec(16, 64, 96, 32)),
        ),
        "outer": (jnp.outer, (spec(8192), spec(8192))),
        "matrix-vector": (jnp.matmul, (spec(8192, 8192, dtype=BF16), spec(8192, dtype=BF16))),
        "ragged_dot": (
            lax.ragged_dot,
            (spec(2048, 1024, dtype=BF16), spec(8, 1024, 2048, dtype=BF16), spec(8, dtype=S32)),
        ),
        "ragged_dot-gradient": (
            lambda x, w, g: _grad(lambda v, u: lax.ragged_dot(v, u, g), 1)(x, w),
            (spec(2048, 1024, dtype=BF16), spec(8, 1024, 2048, dtype=BF16), spec(8, dtype=S32)),
        ),
        "kron": (jnp.kron, (spec(64, 64), spec(64, 64))),
    },
    "convolutions": {
        "depthwise": (
            _conv((1, 1), ("NHWC", "HWIO", "NHWC"), feature_group_count=256),
            (spec(16, 56, 56, 256), spec(3, 3, 1, 256)),
        ),
        "dilated": (
            _conv((1, 1), ("NCHW", "OIHW", "NCHW"), rhs_dilation=(2, 2)),
            (spec(8, 128, 56, 56, dtype=BF16), spec(128, 128, 3, 3, dtype=BF16)),
        ),
        "transposed": (
            lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
            (spec(8, 28, 28, 256), spec(2, 2, 256, 128)),
        ),
        "volume": (
            _conv((1, 1, 1), ("NDHWC", "DHWIO", "NDHWC")),
            (spec(2, 16, 32, 32, 64), spec(3, 3, 3, 64, 64)),
        ),
        "grouped-gradient": (
            _grad(_conv((1, 1), ("NHWC", "HWIO", "NHWC"), feature_group_count=4), 1),
            (spec(16, 28, 28, 256), spec(3, 3, 64, 256)),
        ),
    },
    "reductions": {
        "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), (_LONG,)),
        "var-all": (jnp.var, (_LONG,)),
        "median": (lambda x: jnp.median(x, -1), (_LONG,)),
        "norm": (jnp.linalg.norm, (_LONG,)),
        "count": (lambda x: jnp.sum(x > 0, 0), (_LONG,)),
        "any": (lambda x: jnp.any(x > 2, 1), (_LONG,)),
        "product-of-rows": (lambda x: jnp.prod(x, 1), (_LONG,)),
        "min-and-max": (lambda x: (x.min(0), x.max(0), jnp.argmin(x, 0)), (_LONG,)),
    },
    "windows and scans": {
        "cumsum": (lambda x: jnp.cumsum(x, -1), (_LONG,)),
        "cumsum-columns": (lambda x: jnp.cumsum(x, 0), (spec(16384, 1024),)),
        "cumsum-flat": (jnp.cumsum, (spec(1_000_000),)),
        "cumprod": (lambda x: jnp.cumprod(x, -1), (_LONG,)),
        "cummax": (lambda x: lax.cummax(x, 1), (_LONG,)),
        "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (_LONG,)),
        "cumsum-int": (lambda x: jnp.cumsum(x, -1), (spec(1024, 16384, dtype=S32),)),
        "cumsum-gradient": (_grad(lambda x: jnp.cumsum(x * x, -1)), (_LONG,)),
        "associative": (
            lambda a, b: lax.associative_scan(
                lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b), axis=1
            ),
            (spec(64, 2048, 64), spec(64, 2048, 64)),
        ),
        "average-pool": (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
            (spec(32, 112, 112, 64),),
        ),
        "max-pool-gradient": (
            _grad(
                lambda x: lax.reduce_window(
                    x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
                )
            ),
            (spec(32, 112, 112, 64),),
        ),
    },
    "sorts": {
        "argsort": (lambda x: jnp.argsort(x, -1), (_LONG,)),
        "sort-flat": (jnp.sort, (spec(4_000_000),)),
        "sort-columns": (lambda x: jnp.sort(x, 0), (_LONG,)),
        "sort-two-keys": (
            lambda a, b, c: lax.sort((a, b, c), num_keys=2),
            (spec(1_000_000, dtype=S32), spec(1_000_000), spec(1_000_000)),
        ),
        "top-8": (lambda x: lax.top_k(x, 8), (_LONG,)),
        "top-100": (lambda x: lax.top_k(x, 100), (_LONG,)),
        "searchsorted": (jnp.searchsorted, (spec(100_000), spec(1_000_000))),
        "permutation": (lambda k: jax.random.permutation(k, 1_000_000), (_KEY,)),
    },
    "gathers and scatters": {
        "segment_sum": (
            lambda x, i: jax.ops.segment_sum(x, i, 4096),
            (spec(65536, 256), spec(65536, dtype=S32)),
        ),
        "take-gradient": (
            lambda t, i: _grad(lambda v: v[i])(t),
            (spec(32000, 512), spec(8192, dtype=S32)),
        ),
        "take_along_axis": (
            lambda x, i: jnp.take_along_axis(x, i, 1),
            (_LONG, spec(1024, 16384, dtype=S32)),
        ),
        "scatter-max": (
            lambda t, i, x: t.at[i].max(x),
            (spec(8192, 256), spec(65536, dtype=S32), spec(65536, 256)),
        ),
        "scatter-set-bf16": (
            lambda t, i, x: t.at[i].set(x),
            (spec(8192, 256, dtype=BF16), spec(4096, dtype=S32), spec(4096, 256, dtype=BF16)),
        ),
        "bincount": (lambda i: jnp.bincount(i, length=1024), (spec(1_000_000, dtype=S32),)),
        "gather-points": (
            lambda x, i, j: x[i, :, j],
            (spec(512, 64, 512), spec(65536, dtype=S32), spec(65536, dtype=S32)),
        ),
    },
    "moves": {
        "roll": (lambda x: jnp.roll(x, 7, 1), (_LONG,)),
        "stack": (lambda a, b: jnp.stack([a, b], -1), (_MATRIX, _MATRIX)),
        "pixel-shuffle": (
            lambda x: x.reshape(16, 64, 64, 64, 2, 2).transpose(0, 1, 4, 2, 5, 3),
            (spec(16, 64, 64, 256),),
        ),
        "tril": (jnp.tril, (_MATRIX,)),
        "repeat": (lambda x: jnp.repeat(x, 4, 1), (_MATRIX,)),
        "flip-transpose": (lambda x: jnp.flip(x, 0).T + 1, (_MATRIX,)),
        "interior-pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 1))), (_MATRIX,)),
        "barrier": (lambda x: jnp.sin(lax.optimization_barrier(jnp.cos(x))), (_MATRIX,)),
    },
    "element-wise": {
        **_unary(
            jnp.arccosh, jnp.arcsinh, jnp.arctanh, jnp.arccos, lax.bessel_i1e, lax.erfc, jnp.cosh,
            jnp.log2, jnp.sinc, jnp.nan_to_num, jax.nn.gelu, jax.nn.softplus, jax.nn.mish,
        ),
        "nextafter": (jnp.nextafter, (_MATRIX, _MATRIX)),
        "polygamma": (lambda x: jax.scipy.special.polygamma(1, x), (spec(1024, 1024),)),
        "zeta": (jax.scipy.special.zeta, (spec(512, 1024), spec(512, 1024))),
        "igamma": (lax.igamma, (spec(1024, 1024), spec(1024, 1024))),
        "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), (_MATRIX,)),
        "integer-arithmetic": (
            lambda a, b: (a * 3 // (abs(b) + 1)) ^ (a >> 2) | (b & 255),
            (spec(4096, 4096, dtype=S32), spec(4096, 4096, dtype=S32)),
        ),
        "divmod": (jnp.divmod, (spec(4096, 4096, dtype=S32), spec(4096, 4096, dtype=S32))),
        "quantise": (
            lambda x: jnp.round(x / jnp.abs(x).max(-1, keepdims=True) * 127).astype(S8),
            (_MATRIX,),
        ),
        "fp8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(F32) * 2, (_MATRIX,)),
        "polynomial": (lambda x: jnp.polyval(jnp.arange(12.0), x), (_MATRIX,)),
    },
    "softmax, norms, losses": {
        "softmax-gradient": (_grad(lambda x: jax.nn.softmax(x, -1)), (_LONG,)),
        "softmax-columns": (lambda x: jax.nn.softmax(x, 0), (_LONG,)),
        "rms-norm": (
            lambda x, g: x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * g,
            (_MATRIX, spec(4096)),
        ),
        "standardize": (lambda x: jax.nn.standardize(x, axis=0), (_MATRIX,)),
        "cross-entropy-gradient": (
            lambda x, y: jax.grad(
                lambda v: -jnp.mean(
                    jnp.take_along_axis(jax.nn.log_softmax(v.astype(F32)), y[:, None], 1)
                )
            )(x),
            (spec(4096, 32000, dtype=BF16), spec(4096, dtype=S32)),
        ),
        "group-norm": (
            lambda x: jax.nn.standardize(x.reshape(8, 64 * 64, 32, 8), axis=(1, 3)),
            (spec(8, 64, 64, 256),),
        ),
    },
    "attention": {
        "attention-causal": (
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (_HEADS,) * 3
        ),
        "attention-gradient": (_grad(jax.nn.dot_product_attention), (_HEADS,) * 3),
        "attention-decode": (
            jax.nn.dot_product_attention,
            (spec(16, 1, 32, 128, dtype=BF16), *[spec(16, 4096, 8, 128, dtype=BF16)] * 2),
        ),
    },
    "complex": {
        "complex-product": (jnp.matmul, (_COMPLEX, _COMPLEX)),
        "complex-products": (
            jnp.matmul, (spec(32, 256, 256, dtype=C64), spec(32, 256, 256, dtype=C64))
        ),
        "complex-chain": (
            lambda a, b: jnp.exp(a) * jnp.conj(b) / (a + 2), (spec(2048, 2048, dtype=C64),) * 2
        ),
        "complex-abs": (lambda a: jnp.abs(a) + jnp.angle(a), (spec(2048, 2048, dtype=C64),)),
        "complex-sum": (lambda a: a.sum(-1), (spec(2048, 2048, dtype=C64),)),
        "complex-of-parts": (
            lambda a, b: lax.complex(jnp.cos(a), jnp.sin(b)) * 2j, (_MATRIX, _MATRIX)
        ),
        "complex-transpose": (lambda a: jnp.conj(a.T), (spec(2048, 2048, dtype=C64),)),
    },
    "loops": {
        "loop-of-slices": (_loop_of_slices, (spec(32, 512, 512), spec(512, 512))),
        "loop-of-means": (_until, (spec(1024, 1024),)),
        "scan": (
            lambda x, w: lax.scan(
                lambda h, t: (jnp.tanh(h @ w + t), h.sum(-1)), jnp.zeros(x.shape[1:]), x
            ),
            (spec(64, 128, 512), spec(512, 512)),
        ),
        "scan-gradient": (
            _grad(
                lambda w, x: lax.scan(
                    lambda h, t: (jnp.tanh(h @ w + t), None), jnp.zeros(x.shape[1:]), x
                )[0]
            ),
            (spec(512, 512), spec(32, 128, 512)),
        ),
        "map": (
            lambda x: lax.map(lambda row: jnp.sort(row)[::2] + row.mean(), x), (spec(64, 16384),)
        ),
        "switch": (
            lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v @ v], x),
            (spec(dtype=S32), spec(2048, 2048)),
        ),
    },
    "random bits": {
        "normal": (lambda k: jax.random.normal(k, (2048, 2048)), (_KEY,)),
        "categorical": (
            lambda k, x: jax.random.categorical(k, x), (_KEY, _LONG)
        ),
        "uniform-bf16": (
            lambda k: jax.random.uniform(k, (4096, 4096), BF16), (_KEY,)
        ),
    },
    "library calls": {
        "fft2": (jnp.fft.fft2, (spec(64, 512, 512, dtype=C64),)),
        "irfft": (jnp.fft.irfft, (spec(4096, 2049, dtype=C64),)),
        "svd": (lambda x: jnp.linalg.svd(x, full_matrices=False), (spec(512, 512),)),
        "eigh": (jnp.linalg.eigh, (spec(512, 512),)),
        "qr": (jnp.linalg.qr, (spec(1024, 512),)),
        "lu": (jax.scipy.linalg.lu, (spec(512, 512),)),
        "solve": (jnp.linalg.solve, (spec(512, 512), spec(512, 64))),
        "inverse-batch": (jnp.linalg.inv, (_BATCH,)),
        "cholesky-gradient": (_grad(lambda x: jnp.linalg.cholesky(x)), (spec(512, 512),)),
        "det": (jnp.linalg.det, (_BATCH,)),
    },
}  # fmt: skip


def drawn() -> Iterator[tuple[Case, str]]:
    """All cases with their programs."""
    for case in cases():
        yield case, text_of(case.name)
