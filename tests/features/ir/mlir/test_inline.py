"""Functions in place of their calls."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.mlir.bindings import parse_module, walk_ops, write_bytecode
from opcast.features.ir.mlir.shardings import inline_calls
from opcast.features.ir.reader import read_program


@jax.jit
def inner(x):
    return jnp.tanh(x) + 1.0


@jax.jit
def outer(x, y):
    return inner(x) * inner(y)


def step(x):
    # The second call is in a loop, which captures what the first one made.
    first = outer(x, 2.0 * x)
    return jax.lax.fori_loop(0, 3, lambda i, y: outer(y, first), x)


def test_calls_are_replaced_wherever_they_are():
    lowered = jax.jit(step).lower(jnp.ones(5))
    module = parse_module(lowered.as_text(debug_info=True))
    assert [op.name for op in walk_ops(module)].count("func.call") >= 4
    inlined = inline_calls(module)
    names = [op.name for op in walk_ops(inlined)]
    assert "func.call" not in names and names.count("func.func") == 1
    x = np.linspace(-1.0, 1.0, 5, dtype=np.float32)
    (found,) = execute(compile_module(inlined, 1, 1), [x], 1)
    np.testing.assert_allclose(found, jax.jit(step)(x), rtol=1e-6)


def test_lines_of_the_functions_are_kept():
    module = parse_module(jax.jit(step).lower(jnp.ones(5)).as_text(debug_info=True))
    program = read_program(write_bytecode(inline_calls(module))).program
    first = inspect.getsourcelines(inner)[1]
    lines = {
        op.source.line
        for own in program.computations.values()
        for op in own.ops
        if op.opcode == "tanh" and op.source is not None
    }
    # Below the decorator and the ``def``.
    assert lines == {first + 2}
