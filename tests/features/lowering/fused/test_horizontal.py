"""Kernels of independent work, with and without the compiler's horizontal fusion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from opcast.datagen.zoo.registry import build
from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.fused.multi_output import MAX_ALIKE, MAX_MIXED
from opcast.features.lowering.lower import lower
from opcast.features.lowering.options import HORIZONTAL
from opcast.features.lowering.target_compiler.process import CompileSettings

H100 = find_device("h100-sxm")
F32, BF16 = jnp.float32, jnp.bfloat16
TOGETHER = CompileSettings(flags={HORIZONTAL: True})


def updates(*shapes):
    """StableHLO of ``p - 0.1 g`` for a parameter of each shape."""
    kinds = [f"tensor<{'x'.join(map(str, shape))}xf32>" for shape in shapes]
    arguments = [f"%p{i}: {k}, %g{i}: {k}" for i, k in enumerate(kinds)]
    lines = []
    for i, kind in enumerate(kinds):
        lines += [
            f"%c{i} = stablehlo.constant dense<0.1> : {kind}",
            f"%s{i} = stablehlo.multiply %g{i}, %c{i} : {kind}",
            f"%u{i} = stablehlo.subtract %p{i}, %s{i} : {kind}",
        ]
    results = ", ".join(f"%u{i}" for i in range(len(shapes)))
    body = "\n".join(lines)
    return (
        f"module @step {{ func.func public @main({', '.join(arguments)}) -> ({', '.join(kinds)}) "
        f"{{\n{body}\nreturn {results} : {', '.join(kinds)} }} }}"
    )


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def text_of(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


def kernels(text, settings=TOGETHER):
    found = lower(text, "fused", device=H100, settings=settings)
    return [k for k in found.kernels if k.takes_time]


def results(kernel):
    """Arrays that a kernel writes."""
    root = kernel.inner.ops[kernel.inner.root]
    return len(root.operands) if root.opcode == "tuple" else 1


def test_updates_of_one_shape_are_one_kernel_that_moves_each_array_once():
    (kernel,) = kernels(updates(*[(64, 32)] * 7))
    size = 64 * 32 * 4
    assert (kernel.bytes_in, kernel.bytes_out) == (14 * size, 7 * size)
    assert kernel.flops == 7 * 2 * 64 * 32
    assert results(kernel) == 7


def test_small_updates_of_other_shapes_are_one_kernel_too():
    (kernel,) = kernels(updates((64, 32), (5,), (3, 4, 5)))
    elements = 64 * 32 + 5 + 60
    assert (kernel.bytes_in, kernel.bytes_out) == (8 * elements, 4 * elements)


def test_todays_compiler_runs_a_kernel_for_each_update():
    """XLA of JAX 0.10.2 for an H100 runs seven for shapes like these."""
    shapes = [(64, 64)] * 3 + [(32,)] * 2 + [(128, 64), (7,)]
    assert len(kernels(updates(*shapes), settings=None)) == 7
    off = CompileSettings(flags={HORIZONTAL: False})
    assert len(kernels(updates(*shapes), settings=off)) == 7


def test_a_kernel_of_mixed_shapes_takes_no_more():
    """First three and two of one shape each, then the two single ones; those stay as they are."""
    shapes = [(64, 64)] * 3 + [(32,)] * 2 + [(128, 64), (7,)]
    assert sorted(results(k) for k in kernels(updates(*shapes))) == [2, 2, 3]


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        ([(8192, 8192)] * 2, 1),
        ([(8192, 8193)] * 2, 2),
        ([(MAX_MIXED,), (8,)], 1),
        ([(MAX_MIXED + 1,), (8,)], 2),
    ],
)
def test_large_updates_stay_alone(shapes, count):
    assert MAX_ALIKE == 8192 * 8192
    assert len(kernels(updates(*shapes))) == count


def test_a_kernel_has_fewer_than_32_results_of_loops_and_64_of_single_ops():
    assert sorted(results(k) for k in kernels(updates(*[(16,)] * 40))) == [9, 31]
    pairs = [spec(16) for _ in range(80)]
    text = text_of(lambda *a: [x - y for x, y in zip(a[:40], a[40:], strict=True)], *pairs)
    assert [results(k) for k in kernels(text)] == [40]


def test_updates_that_need_each_other_stay_apart():
    def step(p, g, q, h):
        first = p - 0.1 * g
        return first, q - jnp.sort(first) * h

    found = kernels(text_of(step, *[spec(256)] * 4))
    assert [results(k) for k in found] == [1, 1, 1]


def test_loops_for_different_readers_stay_apart():
    def products(x, y, v, w):
        return jnp.sign(x) @ v, jnp.sign(y) @ w

    shapes = (spec(512, 512), spec(512, 512), spec(512, 512), spec(512, 512))
    found = kernels(text_of(products, *shapes))
    assert sorted(k.kind for k in found) == ["fusion", "fusion", "gemm", "gemm", "reduce"]


def test_loops_for_one_reader_share_a_kernel():
    def product(x, y):
        return jnp.sign(x) @ jnp.sign(y)

    found = kernels(text_of(product, spec(512, 512), spec(512, 512)))
    assert [k.kind for k in found] == ["fusion", "gemm", "reduce"]
    assert results(found[0]) == 2


def test_types_do_not_mix():
    def step(x, y):
        return x * 2, y * 2

    assert len(kernels(text_of(step, spec(64), spec(64, dtype=BF16)))) == 2


def test_loops_of_other_shapes_that_share_an_argument_stay_apart():
    """One that updates it in place could not do so any more."""

    def step(x, y):
        return x + 1.0, jnp.concatenate([x, y]) * 2.0

    assert len(kernels(text_of(step, spec(64), spec(32)))) == 2


def test_reductions_of_one_shape_are_one_kernel():
    def sums(a, b, c):
        return a.sum(1), b.sum(1), c.sum(1)

    found = kernels(text_of(sums, spec(128, 1000), spec(128, 1000), spec(64, 1000)))
    assert [(k.kind, results(k), k.bytes_in) for k in found] == [
        ("reduce", 2, 2 * 128 * 1000 * 4),
        ("reduce", 1, 64 * 1000 * 4),
    ]


def test_reductions_along_other_dimensions_stay_apart():
    text = text_of(lambda a, b: (a.sum(1), b.sum(0)), spec(512, 512), spec(512, 512))
    assert len(kernels(text)) == 2
    assert len(kernels(text_of(lambda a, b: (a.sum(1), b.sum(1)), spec(8, 512), spec(8, 512)))) == 1


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mlp", {"batch": 64, "width": 128, "layers": 2, "mode": "train"}),
        ("lstm", {"layers": 1, "dim": 64, "seq": 4, "batch": 4, "mode": "train"}),
        ("moe", {"layers": 1, "dim": 64, "heads": 2, "kv_heads": 2, "hidden": 64, "seq": 16,
                 "vocab": 128, "experts": 4, "dispatch": "scatter", "mode": "train"}),
    ],
)  # fmt: skip
def test_the_same_arrays_are_written_by_fewer_kernels(family, options):
    text = build(family, **options).mlir()
    apart, together = kernels(text, settings=None), kernels(text)

    def total(found, field):
        return sum(getattr(k, field) * k.multiplicity for k in found)

    assert len(together) < len(apart)
    # Scalars that several updates compute for themselves are computed once in a shared kernel.
    assert total(together, "flops") == pytest.approx(total(apart, "flops"), rel=1e-5)
    assert total(together, "bytes_out") == total(apart, "bytes_out")
    assert total(together, "bytes_in") <= total(apart, "bytes_in")


def test_updates_that_start_from_the_same_zeros_get_an_array_each_from_one_kernel():
    """As XLA of JAX 0.10.2: a ``loop_broadcast_fusion`` with a result for each scatter."""

    def gradients(ids, a, b, c):
        zeros = jnp.zeros((5000, 64))
        return [zeros.at[ids].add(g) for g in (a, b, c)]

    rows = [spec(512, 64)] * 3
    found = kernels(text_of(gradients, spec(512, dtype=jnp.int32), *rows), settings=None)
    assert [k.kind for k in found] == ["copy", *["gather_scatter"] * 3]
    assert (results(found[0]), found[0].bytes_out) == (3, 3 * 5000 * 64 * 4)
    assert found[0].bytes_in == 0


def test_zeros_of_other_sizes_or_of_one_update_have_their_own_kernel():
    def gradients(ids, a, b):
        return jnp.zeros((5000, 64)).at[ids].add(a), jnp.zeros((6000, 64)).at[ids].add(b)

    rows = [spec(512, 64)] * 2
    found = kernels(text_of(gradients, spec(512, dtype=jnp.int32), *rows), settings=None)
    fills = [k for k in found if k.kind == "copy"]
    assert sorted(k.bytes_out for k in fills) == [5000 * 64 * 4, 6000 * 64 * 4]


def test_fills_in_a_loop_stay_apart():
    """Copies join a kernel in the entry only."""

    def body(carry, ids):
        a, b = carry
        zeros = jnp.zeros((5000, 64))
        rows = a[:512], b[:512]
        return tuple(zeros.at[ids].add(row) for row in rows), None

    def loop(a, b, ids):
        return jax.lax.scan(body, (a, b), ids)[0]

    text = text_of(loop, spec(5000, 64), spec(5000, 64), spec(8, 512, dtype=jnp.int32))
    fills = [k for k in kernels(text, settings=None) if k.kind == "copy" and k.multiplicity == 8]
    assert [results(k) for k in fills if not k.bytes_in] == [1, 1]


@pytest.mark.parametrize("tables", [7, 12])
def test_sums_of_embeddings_run_in_the_kernel_that_joins_them(tables):
    """As XLA of JAX 0.10.2: for 12 tables 8.266 MB, one kernel beside the product's two."""

    def look(ids, weight, *rows):
        bags = [table[ids[:, i]].sum(1) for i, table in enumerate(rows)]
        return jnp.concatenate(bags, 1) @ weight

    ids, weight = spec(512, tables, 3, dtype=jnp.int32), spec(64 * tables, 64)
    found = kernels(text_of(look, ids, weight, *[spec(5000, 64)] * tables), settings=None)
    assert [k.kind for k in found] == ["reduce", "gemm", "reduce"]
    # What gathers read: three rows of 64 for each of 512 samples, and the indices.
    read, written = 512 * 3 * tables * (64 + 1) * 4, 512 * 64 * tables * 4
    assert (found[0].bytes_in, found[0].bytes_out) == (pytest.approx(read), written)
