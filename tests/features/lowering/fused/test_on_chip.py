"""Which values the lowering ``fused`` leaves on a TPU's chip."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from opcast.features.cost.bytes import array_traffic
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import TensorType
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import Kernel
from opcast.features.lowering.fused.on_chip import OnChip, on_chip_of, place_on_chip
from opcast.features.lowering.lower import lower

MIB = 2**20


def _kernels(device: str, size: int = 512) -> list[Kernel]:
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ w

    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    source = read_program(jax.jit(chain).lower(shape, shape).as_text())
    found = lower(source, "fused", device=find_device(device), cache=False)
    return [k for k in found.kernels if k.takes_time and not k.async_role]


def _borders(kernel: Kernel) -> tuple[list[int], list[int]]:
    entry = kernel.body.entry_computation
    return [op.type.memory_space for op in entry.ops[:-1]], [
        t.memory_space for t in kernel.op.results
    ]


@pytest.mark.parametrize(("device", "space"), [("tpu-v5e", 1), ("tpu-v4", 3)])
def test_a_value_between_two_kernels_stays_and_arguments_are_fetched_beside_the_first(
    device: str, space: int
) -> None:
    first, *_, last = _kernels(device)
    assert _borders(first) == ([0, 0], [space])
    assert _borders(last)[0] == [space, space]
    assert _borders(last)[1] == [0]


@pytest.mark.parametrize("device", ["tpu-v3", "a100-sxm-80gb"])
def test_elsewhere_everything_is_in_main_memory(device: str) -> None:
    for kernel in _kernels(device):
        before, after = _borders(kernel)
        assert not any(before + after)


def test_where_values_are_placed() -> None:
    assert on_chip_of(find_device("tpu-v4")) == OnChip(3, 128 * MIB)
    assert on_chip_of(find_device("tpu-v5p")) == OnChip(1, 64 * MIB)
    assert on_chip_of(find_device("tpu-v3")) is None
    assert on_chip_of(None) is None


MODULE = """HloModule m, is_scheduled=true

body {
  s = (f32[64], f32[64]) parameter(0)
  a = f32[64] get-tuple-element(s), index=0
  b = f32[64] get-tuple-element(s), index=1
  c = f32[64] add(a, b)
  d = f32[64] multiply(c, b)
  ROOT t = (f32[64], f32[64]) tuple(d, b)
}

condition {
  u = (f32[64], f32[64]) parameter(0)
  ROOT v = pred[] constant(false)
}

ENTRY main {
  p0 = f32[64] parameter(0)
  p1 = f32[256] parameter(1)
  small = f32[64] negate(p0)
  view = f32[8,8] bitcast(small)
  wide = f32[256] negate(p1)
  other = f32[256] exponential(wide)
  x = f32[8,8] add(view, view)
  flat = f32[64] bitcast(x)
  pair = (f32[64], f32[64]) tuple(flat, p0)
  loop = (f32[64], f32[64]) while(pair), condition=condition, body=body
  y = f32[64] get-tuple-element(loop), index=0
  z = f32[256] negate(other)
  ROOT r = (f32[64], f32[256]) tuple(y, z)
}
"""


def _spaces(capacity: float) -> dict[str, int]:
    program = parse_hlo(MODULE)
    place_on_chip(program, OnChip(1, capacity))
    return {
        op.name: op.type.memory_space for comp in program.computations.values() for op in comp.ops
    }


def test_views_lie_where_their_value_lies_and_large_values_do_not_stay() -> None:
    # 256 bytes are 64 numbers: the small values are a seventh of the memory, the wide ones 4/7.
    found = _spaces(7 * 256)
    near = {name for name, space in found.items() if space}
    assert near == {"small", "view", "x", "flat", "pair", "c"}
    # With more room the wide ones stay, too; the program's results never do.
    assert {name for name, space in _spaces(64 * 256).items() if space} == near | {"wide", "other"}


def test_a_value_that_finds_the_memory_full_does_not_stay() -> None:
    lines = "\n".join(f"  v{i} = f32[64] negate(p)" for i in range(6))
    names = ", ".join(f"v{i}" for i in range(6))
    text = f"""HloModule m, is_scheduled=true

ENTRY main {{
  p = f32[64] parameter(0)
{lines}
  all = f32[384] concatenate({names}), dimensions={{0}}
  late = f32[384] negate(all)
  last = f32[64] slice(late), slice={{[0:64]}}
  ROOT r = f32[64] negate(last)
}}
"""
    program = parse_hlo(text)
    place_on_chip(program, OnChip(1, 6 * 256))
    spaces = {op.name: op.type.memory_space for op in program.entry_computation.ops}
    # Three quarters of the memory hold four of the six; later there is room again.
    assert [spaces[f"v{i}"] for i in range(6)] == [1, 1, 1, 1, 0, 0]
    assert (spaces["all"], spaces["late"], spaces["last"], spaces["r"]) == (0, 0, 1, 0)
    assert program.entry_computation.ops[0].type == TensorType("f32", (64,))


def _lowered(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[Kernel]:
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    source = read_program(jax.jit(function).lower(*given).as_text())
    found = lower(source, "fused", device=find_device("tpu-v5e"), cache=False)
    return [k for k in found.kernels if k.takes_time and not k.async_role]


def test_a_tpus_product_takes_in_what_is_around_it() -> None:
    (one,) = _lowered(
        lambda x, w, b: jnp.tanh((2 * x).T @ w + b), (512, 256), (512, 1024), (256, 1024)
    )
    assert one.kind == "gemm"
    # Both operands, the residual and the result once; the transpose moves nothing of its own.
    assert one.bytes == 4 * (512 * 256 + 512 * 1024 + 2 * 256 * 1024)


def test_a_tpus_products_of_one_operand_stay_apart() -> None:
    found = _lowered(lambda x, v, w: (x @ v, x @ w), (512, 256), (256, 128), (256, 128))
    assert [k.kind for k in found] == ["gemm", "gemm"]


def test_a_tpus_product_takes_in_what_reads_and_sums_its_result_but_no_other_product() -> None:
    # As compiled: one kernel with two results.
    (one,) = _lowered(lambda x, w: (jnp.sin(x @ w), jnp.cos(x @ w).sum(0)), (512, 512), (512, 512))
    assert one.kind == "gemm"
    assert one.bytes == 4 * (3 * 512**2 + 512)
    chain = _lowered(lambda x, w: (x @ w) @ w, (512, 512), (512, 512))
    assert [k.kind for k in chain] == ["gemm", "gemm"]


def test_a_product_reads_what_was_fetched_while_the_kernel_before_it_ran() -> None:
    def two(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ v) @ w

    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    text = jax.jit(two).lower(shape, shape, shape).as_text()
    found = lower(text, "fused", device=find_device("tpu-v5e"), cache=False).kernels
    start, first, done, second = [k for k in found if k.takes_time or k.async_role]
    assert (start.opcode, done.opcode) == ("copy-start", "copy-done")
    assert first.kind == second.kind == "gemm"
    # HBM is read once; what a start repeats of its operand is not written.
    (read,), (written,) = array_traffic(start.op, start.body.entry_computation, start.body)
    assert (read[0].memory_space, written[0].memory_space) == (0, 1)
    assert read[1] == written[1] == 4 * 512**2
