"""Bytes touched, against hand-computed values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from opcast.features.cost.flops import Cost, kernel_cost, op_cost
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Program

from ...support.costs import program_cost

F4 = 4  # bytes of f32 and s32


def _kernel(entry: str, called: str = "") -> Program:
    return parse_hlo(f"HloModule m\n\n{called}\n\nENTRY main {{\n{entry}\n}}\n")


def _bytes(entry: str, called: str = "") -> tuple[float, float]:
    cost = kernel_cost(_kernel(entry, called))
    return cost.bytes_in, cost.bytes_out


def test_embedding_lookup_reads_rows_not_the_table() -> None:
    found = _bytes("""
  t = f32[50000,64] parameter(0)
  i = s32[32,1] parameter(1)
  ROOT r = f32[32,64] gather(t, i), offset_dims={1}, collapsed_slice_dims={0}, \
start_index_map={0}, index_vector_dim=1, slice_sizes={1,64}""")
    assert found == (32 * 64 * F4 + 32 * F4, 32 * 64 * F4)


def test_gather_reads_at_most_the_table() -> None:
    found = _bytes("""
  t = f32[10,64] parameter(0)
  i = s32[1000,1] parameter(1)
  ROOT r = f32[1000,64] gather(t, i), offset_dims={1}, collapsed_slice_dims={0}, \
start_index_map={0}, index_vector_dim=1, slice_sizes={1,64}""")
    assert found == (10 * 64 * F4 + 1000 * F4, 1000 * 64 * F4)


def test_scatter_runs_in_place() -> None:
    found = _bytes(
        """
  t = f32[50000,64] parameter(0)
  i = s32[32,1] parameter(1)
  u = f32[32,64] parameter(2)
  ROOT r = f32[50000,64] scatter(t, i, u), update_window_dims={1}, inserted_window_dims={0}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add""",
        "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT s = f32[] add(x, y)\n}",
    )
    assert found == (32 * 64 * F4 + 32 * F4, 32 * 64 * F4)


def test_slices_and_updates() -> None:
    head = (
        "  a = f32[1000,64] parameter(0)\n  i = s32[] parameter(1)\n  u = f32[2,64] parameter(2)\n"
    )
    two_rows = float(2 * 64 * F4)
    sliced = _bytes(head + "  ROOT r = f32[2,64] slice(a), slice={[0:2], [0:64]}")
    assert sliced == (two_rows, two_rows)
    dynamic = "  ROOT r = f32[2,64] dynamic-slice(a, i, i), dynamic_slice_sizes={2,64}"
    assert _bytes(head + dynamic) == (two_rows + 2 * F4, two_rows)
    update = "  ROOT r = f32[1000,64] dynamic-update-slice(a, u, i, i)"
    assert _bytes(head + update) == (two_rows + 2 * F4, two_rows)


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("reshape(a)", 0, 0),
        ("bitcast(a)", 0, 0),
        ("add(a, a)", 2 * 128, 128),
        ("copy(a)", 128, 128),
        ("reverse(a), dimensions={0}", 128, 128),
        ("exponential(a)", 128, 128),
    ],
)
def test_plain_ops(line: str, read: int, written: int) -> None:
    found = _bytes(f"  a = f32[8,4] parameter(0)\n  ROOT r = f32[8,4] {line}")
    assert found == (read, written)


def test_data_movement_counts_real_bytes() -> None:
    a = "  a = f32[8,4] parameter(0)\n  z = f32[] parameter(1)\n"
    assert _bytes(a + "  ROOT r = f32[10,4] pad(a, z), padding=1_1x0_0") == (128 + 4, 160)
    assert _bytes(a + "  ROOT r = f32[16,4] concatenate(a, a), dimensions={0}") == (256, 256)
    assert _bytes(a + "  ROOT r = f32[4,8] transpose(a), dimensions={1,0}") == (128, 128)
    assert _bytes(a + "  ROOT r = f32[9,8,4] broadcast(a), dimensions={1,2}") == (128, 9 * 128)
    assert _bytes("  ROOT r = f32[8,4] iota(), iota_dimension=0") == (0, 128)


def test_transpose_that_only_renames_dimensions_is_free() -> None:
    entry = (
        "  a = f32[8,4]{1,0} parameter(0)\n  ROOT r = f32[4,8]{0,1} transpose(a), dimensions={1,0}"
    )
    assert _bytes(entry) == (0, 0)


def test_fusion_reads_only_the_slice_of_a_parameter() -> None:
    found = _bytes(
        """
  a = f32[12,128,256] parameter(0)
  i = s32[] parameter(1)
  b = f32[128,256] parameter(2)
  ROOT r = f32[128,256] fusion(a, i, b), kind=kLoop, calls=f""",
        """f {
  p = f32[12,128,256] parameter(0)
  q = s32[] parameter(1)
  z = s32[] constant(0)
  s = f32[1,128,256] dynamic-slice(p, q, z, z), dynamic_slice_sizes={1,128,256}
  v = f32[128,256] bitcast(s)
  c = f32[128,256] parameter(2)
  ROOT m = f32[128,256] multiply(v, c)
}""",
    )
    layer = 128 * 256 * F4
    assert found == (layer + F4 + layer, layer)


def test_fusion_slices_through_elementwise_ops() -> None:
    found = _bytes(
        "  a = bf16[100,64] parameter(0)\n  ROOT r = f32[10,64] fusion(a), kind=kLoop, calls=f",
        """f {
  p = bf16[100,64] parameter(0)
  w = f32[100,64] convert(p)
  e = f32[100,64] exponential(w)
  x = f32[100,64] add(w, e)
  ROOT s = f32[10,64] slice(x), slice={[0:10], [0:64]}
}""",
    )
    assert found == (10 * 64 * 2, 10 * 64 * F4)


def test_fusion_that_needs_a_parameter_twice_reads_it_once() -> None:
    found = _bytes(
        "  a = f32[100,64] parameter(0)\n  ROOT r = f32[100,64] fusion(a), kind=kLoop, calls=f",
        """f {
  p = f32[100,64] parameter(0)
  s = f32[10,64] slice(p), slice={[0:10], [0:64]}
  t = f32[100,64] pad(s, s), padding=0_90x0_0
  ROOT m = f32[100,64] multiply(p, t)
}""",
    )
    assert found == (100 * 64 * F4, 100 * 64 * F4)


UPDATE = """f {
  p = f32[6,128,256] parameter(0)
  u = f32[128,256] parameter(1)
  i = s32[] parameter(2)
  z = s32[] constant(0)
  t = f32[128,256] tanh(u)
  b = f32[1,128,256] bitcast(t)
  d = f32[6,128,256] dynamic-update-slice(p, b, i, z, z)
  ROOT %s
}"""


@pytest.mark.parametrize(
    "root",
    [
        ("r", "f32[6,128,256]", "r = f32[6,128,256] bitcast(d)", 0),
        (
            "t",
            "(f32[6,128,256], f32[128,256])",
            "r = (f32[6,128,256], f32[128,256]) tuple(d, t)",
            1,
        ),
    ],
)
def test_fusion_updates_in_place(root: tuple[str, str, str, int]) -> None:
    _, result, line, more = root
    entry = f"""
  a = f32[6,128,256] parameter(0)
  b = f32[128,256] parameter(1)
  i = s32[] parameter(2)
  ROOT r = {result} fusion(a, b, i), kind=kLoop, calls=f"""
    row = 128 * 256 * F4
    assert _bytes(entry, UPDATE % line) == (row + F4, row + more * row)


def test_update_of_a_computed_array_writes_all_of_it() -> None:
    found = _bytes(
        "  u = f32[2] parameter(0)\n  i = s32[] parameter(1)\n"
        "  ROOT r = f32[100] fusion(u, i), kind=kLoop, calls=f",
        """f {
  z = f32[] constant(0)
  t = f32[100] broadcast(z), dimensions={}
  u = f32[2] parameter(0)
  i = s32[] parameter(1)
  ROOT d = f32[100] dynamic-update-slice(t, u, i)
}""",
    )
    assert found == (2 * F4 + F4, 100 * F4)


def test_fusion_broadcast_counts_the_small_operand() -> None:
    found = _bytes(
        "  a = f32[100,64] parameter(0)\n  b = f32[64] parameter(1)\n"
        "  ROOT r = f32[100,64] fusion(a, b), kind=kLoop, calls=f",
        """f {
  a = f32[100,64] parameter(0)
  b = f32[64] parameter(1)
  c = f32[100,64] broadcast(b), dimensions={1}
  ROOT m = f32[100,64] add(a, c)
}""",
    )
    assert found == (100 * 64 * F4 + 64 * F4, 100 * 64 * F4)


def test_loop_carries_are_free() -> None:
    entry = """
  a = f32[1000,1000] parameter(0)
  z = s32[] constant(0)
  t = (s32[], f32[1000,1000]) tuple(z, a)
  ROOT w = (s32[], f32[1000,1000]) while(t), condition=cond, body=body, \
backend_config={"known_trip_count":{"n":"5"}}"""
    called = """cond {
  s = (s32[], f32[1000,1000]) parameter(0)
  k = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(k, n), direction=LT
}

body {
  s.1 = (s32[], f32[1000,1000]) parameter(0)
  k.1 = s32[] get-tuple-element(s.1), index=0
  v = f32[1000,1000] get-tuple-element(s.1), index=1
  one = s32[] constant(1)
  k.2 = s32[] add(k.1, one)
  ROOT t.1 = (s32[], f32[1000,1000]) tuple(k.2, v)
}"""
    # Each time: compare reads 8 bytes and writes 1, add reads 8 bytes and writes 4.
    assert _bytes(entry, called) == (5 * 16, 5 * 5)


def test_unknown_custom_call_is_not_free() -> None:
    cost = kernel_cost(
        _kernel(
            "  a = f32[8,4] parameter(0)\n  b = bf16[6] parameter(1)\n"
            '  ROOT r = (f32[8,4], u8[100]) custom-call(a, b), custom_call_target="mystery"'
        )
    )
    assert cost == Cost(0, 0, 8 * 4 * F4 + 6 * 2, 8 * 4 * F4 + 100)


def test_annotations_are_free() -> None:
    line = '  ROOT r = f32[8,4] custom-call(a), custom_call_target="Sharding"'
    assert kernel_cost(_kernel("  a = f32[8,4] parameter(0)\n" + line)) == Cost()


@pytest.mark.parametrize(
    ("start", "done", "read", "written"),
    [
        ("(f32[8,4], f32[16,4]) all-gather-start(a), replica_groups={{0,1}}, dimensions={0}",
         "f32[16,4] all-gather-done(s)", 128, 256),
        ("f32[8,4] all-reduce-start(a), replica_groups={{0,1}}, to_apply=add",
         "f32[8,4] all-reduce-done(s)", 128, 128),
        ("(f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(a), "
         "source_target_pairs={{0,1},{1,0}}", "f32[8,4] collective-permute-done(s)", 128, 128),
        ("(f32[8,4], f32[8,4], u32[]) copy-start(a)", "f32[8,4] copy-done(s)", 128, 128),
        ("((f32[8,4]), f32[2,4], u32[]) slice-start(a), slice={[0:2], [0:4]}",
         "f32[2,4] slice-done(s)", 32, 32),
        ("((f32[8,4]), f32[8,4], s32[]) async-start(a), calls=wrapped",
         "f32[8,4] async-done(s)", 128, 128),
    ],
)  # fmt: skip
def test_async_pairs_count_once(start: str, done: str, read: int, written: int) -> None:
    program = _kernel(
        f"  a = f32[8,4] parameter(0)\n  s = {start}\n  ROOT d = {done}",
        "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n"
        "  ROOT s = f32[] add(x, y)\n}\n\n"
        "wrapped {\n  p = f32[8,4] parameter(0)\n"
        '  ROOT c = f32[8,4] custom-call(p), custom_call_target="f"\n}',
    )
    entry = program.entry_computation
    begin, end = (op_cost(op, entry, program) for op in entry.ops[1:])
    assert (begin.bytes_in, begin.bytes_out) == (read, written)
    assert end == Cost()


def test_embedding_program_does_not_charge_the_table() -> None:
    def loss(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(table[ids])

    struct: Any = jax.ShapeDtypeStruct
    args = (
        struct((100_000, 64), jnp.float32),
        struct((16,), jnp.int32),
    )
    lowered = jax.jit(loss).lower(*args)
    for text in (lowered.as_text(dialect="hlo"), lowered.compile().as_text()):
        # The table has 25.6 MB; 16 rows have 4 kB.
        assert program_cost(parse_hlo(text or "")).bytes < 50_000
