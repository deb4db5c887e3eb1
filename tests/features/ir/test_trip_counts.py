from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from opcast.common.errors import ProgramError
from opcast.features.ir.hlo_printer import print_hlo
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Program
from opcast.features.ir.reader import read_program

from ...support.stablehlo import func, only, ops_of, read_mlir

X = jax.ShapeDtypeStruct((4,), "float32")


def lowered(function: Any, *args: Any) -> Program:
    text = jax.jit(function).lower(*args).as_text()
    return read_mlir(text, "f.mlir")


def trips(program: Program) -> list[int | None]:
    return sorted((op.attrs["trip_count"] for op in ops_of(program, "while")), key=str)


def test_trip_count_of_scan() -> None:
    program = lowered(lambda x: jax.lax.scan(lambda c, _: (c * 2, c.sum()), x, length=7), X)
    assert trips(program) == [7]


def test_trip_count_with_bound_and_step_captured_from_outside() -> None:
    # Exporting hoists constants out of loops.
    exported = export.export(
        jax.jit(lambda x: jax.lax.scan(lambda c, _: (c * 2, c.sum()), x, length=7))
    )(X)
    program = read_mlir(bytes(exported.mlir_module_serialized))
    assert len(only(program, "while").operands) > len(only(program, "while").results)
    assert trips(program) == [7]


def test_trip_count_of_reverse_scan_over_inputs() -> None:
    def f(x: jax.Array, xs: jax.Array) -> Any:
        return jax.lax.scan(lambda c, a: (c + a, c), x, xs, reverse=True)

    program = lowered(f, X, jax.ShapeDtypeStruct((9, 4), "float32"))
    assert trips(program) == [9]


def test_trip_count_of_fori_loop() -> None:
    assert trips(lowered(lambda x: jax.lax.fori_loop(3, 14, lambda i, c: c * i, x), X)) == [11]


def test_trip_count_of_nested_loops() -> None:
    def f(x: jax.Array) -> jax.Array:
        def outer(i: jax.Array, c: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 5, lambda j, d: d + i * j, c)

        return jax.lax.fori_loop(0, 3, outer, x)

    assert trips(lowered(f, X)) == [3, 5]


def test_trip_count_of_loop_with_its_bound_in_the_state() -> None:
    def f(x: jax.Array) -> Any:
        def body(state: Any) -> Any:
            i, n, c = state
            return i + 2, n, c * 2

        return jax.lax.while_loop(lambda s: s[0] < s[1], body, (jnp.int8(1), jnp.int8(12), x))

    # 1, 3, 5, 7, 9, 11
    assert trips(lowered(f, X)) == [6]


@jax.jit
def repeated_sine(x: jax.Array, n: jax.Array) -> Any:
    def body(state: Any) -> Any:
        return state[0] + 1, jnp.sin(state[1])

    return jax.lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]


def test_trip_count_of_loop_with_captured_bound_in_a_jitted_function() -> None:
    program = lowered(lambda x: repeated_sine(x, 6) + repeated_sine(x * 2, 6), X)
    assert trips(program) == [6]


def test_trip_count_of_hlo_loop_whose_bound_an_outer_loop_carries() -> None:
    """The bound is element 2 of the outer state, which is one tuple, and of the inner."""

    def function(x: Any, bound: int) -> Any:
        def outer(state: Any) -> Any:
            i, x, bound = state
            inner = jax.lax.while_loop(
                lambda s: s[0] < s[2], lambda s: (s[0] + 1, jnp.sin(s[1]), s[2]), (0, x, bound)
            )
            return i + 1, inner[1], inner[2]

        return jax.lax.while_loop(lambda s: s[0] < s[2], outer, (0, x, bound))[1]

    made = jax.jit(lambda x: function(x, 6)).lower(X)
    assert trips(parse_hlo(made.as_text("hlo"))) == [6, 6]
    assert trips(read_mlir(made.as_text(), "f.mlir")) == [6, 6]


BRANCH = """
next_{n} {{
  i = s32[] parameter(0)
  one = s32[] constant(1)
  ROOT sum = s32[] add(i, one)
}}

less_{n} {{
  i = s32[] parameter(0)
  bound = s32[] constant({n})
  ROOT less = pred[] compare(i, bound), direction=LT
}}

branch_{n} {{
  start = s32[] parameter(0)
  ROOT loop = s32[] while(start), condition=less_{n}, body=next_{n}
}}
"""
BRANCHES = """
ENTRY main {
  p = pred[] parameter(0)
  three = s32[] constant(3)
  five = s32[] constant(5)
  ROOT c = s32[] conditional(p, three, five), branch_computations={branch_10, branch_20}
}
"""


def test_branches_of_hlo_know_their_own_operand() -> None:
    """One counts from 3 to 10, the other from 5 to 20."""
    text = f"HloModule branches\n{BRANCH.format(n=10)}{BRANCH.format(n=20)}{BRANCHES}"
    assert trips(parse_hlo(text)) == [15, 7]


def test_no_trip_count_where_call_sites_disagree_or_data_decides() -> None:
    assert trips(lowered(lambda x: repeated_sine(x, 6) + repeated_sine(x, 7), X)) == [None]

    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x)

    program = lowered(until, X)
    assert trips(program) == [None]
    assert not only(program, "while").is_tuple


def loop(first: int, compare: str, bound: int, step: int, change: str = "add") -> Program:
    return read_mlir(
        func(
            f"""%i0 = stablehlo.constant dense<{first}> : tensor<i32>
        %n = stablehlo.constant dense<{bound}> : tensor<i32>
        %r:2 = stablehlo.while(%i = %i0, %v = %x) : tensor<i32>, tensor<8xf32>
        cond {{
          %c = stablehlo.compare {compare} : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        }} do {{
          %s = stablehlo.constant dense<{step}> : tensor<i32>
          %j = stablehlo.{change} %i, %s : tensor<i32>
          stablehlo.return %j, %v : tensor<i32>, tensor<8xf32>
        }}
        return %r#1 : tensor<8xf32>"""
        )
    )


@pytest.mark.parametrize(
    ("first", "compare", "bound", "step", "change", "count"),
    [
        (0, "LT, %i, %n", 10, 3, "add", 4),  # 0 3 6 9
        (0, "LE, %i, %n", 9, 3, "add", 4),  # 0 3 6 9
        (0, "GT, %n, %i", 10, 3, "add", 4),
        (10, "GT, %i, %n", 0, 3, "subtract", 4),  # 10 7 4 1
        (9, "GE, %i, %n", 0, -3, "add", 4),  # 9 6 3 0
        (0, "NE, %i, %n", 12, 4, "add", 3),  # 0 4 8
        (5, "LT, %i, %n", 5, 1, "add", 0),
        (0, "LT, %i, %n", 5, 0, "add", None),  # never ends
        (0, "NE, %i, %n", 5, 2, "add", None),  # steps over the bound
        (1, "LT, %i, %n", 64, 2, "multiply", None),  # not a counter
    ],
)
def test_trip_count_by_direction_and_step(
    first: int, compare: str, bound: int, step: int, change: str, count: int | None
) -> None:
    assert only(loop(first, compare, bound, step, change), "while").attrs["trip_count"] == count


def test_user_gives_trip_counts() -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x)

    text = jax.jit(until).lower(X).as_text()
    name = only(read_mlir(text, "f.mlir"), "while").name
    for given in (4, {name: 4}, {"f.mlir:3": 4}, {"3": 4}):
        assert trips(read_mlir(text, "f.mlir", trip_counts=given)) == [4]
    with pytest.raises(ProgramError, match=r"no loop is called 'x'.*while\.\d+ \(f.mlir:3\)"):
        read_mlir(text, "f.mlir", trip_counts={"x": 4})


def test_a_count_that_a_loop_cannot_have_is_refused() -> None:
    """It would be ignored: the loop's condition says how often it runs."""
    text = jax.jit(lambda x: jax.lax.fori_loop(3, 14, lambda i, c: c * i, x)).lower(X).as_text()
    (loop,) = ops_of(read_mlir(text, "f.mlir"), "while")
    assert trips(read_mlir(text, "f.mlir", trip_counts={loop.name: 11})) == [11]
    with pytest.raises(ProgramError, match="runs 11 times, as its condition says, not 4"):
        read_mlir(text, "f.mlir", trip_counts={loop.name: 4})
    hlo = print_hlo(read_mlir(text))
    with pytest.raises(ProgramError, match="runs 11 times, as its condition says, not 4"):
        read_program(hlo, trip_counts={loop.name: 4})
