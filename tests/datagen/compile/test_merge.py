"""Programs side by side in one module: they compute what each computes alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.datagen.compile.plan import merge_programs
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.mlir.bindings import parse_module, walk_ops
from opcast.features.kernels.extract import extract_kernels


def text(function, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*args).as_text()


def programs() -> list[str]:
    # Both call a private function, relu and _where: their names must not clash.
    first = text(lambda x: jax.nn.relu(x) * 2.0, (4, 8))
    second = text(lambda x, y: (jax.nn.relu(x @ y), jnp.sum(y)), (8, 16), (16, 4))
    return [first, second]


def test_results_are_those_of_the_single_programs() -> None:
    merged = merge_programs(programs())
    rng = np.random.default_rng(0)
    x, y, z = (rng.normal(size=s).astype(np.float32) for s in ((4, 8), (8, 16), (16, 4)))
    out = execute(compile_module(parse_module(merged.data), 1, 1), [x, y, z], 1)
    np.testing.assert_allclose(out[0], np.maximum(x, 0) * 2, rtol=1e-6)
    np.testing.assert_allclose(out[1], np.maximum(y @ z, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[2], z.sum(), rtol=1e-4)


def test_kernels_find_their_programs() -> None:
    merged = merge_programs(programs())
    module = parse_module(merged.data)
    hlo = compile_module(module, 1, 1).hlo_modules()[0].to_string()
    kernels = [k for k in extract_kernels(parse_hlo(hlo))[0] if k.kind != "control"]
    owners = merged.owners(kernels)
    by_kind = dict(zip([k.kind for k in kernels], owners, strict=True))
    assert by_kind["gemm"] == 1
    assert sorted(set(owners)) == [0, 1]


def test_starts_are_the_first_ops_of_each_program() -> None:
    merged = merge_programs(programs())
    ops = walk_ops(parse_module(merged.data))
    names = [str(ops[start].attributes["sym_name"].value) for start in merged.starts]
    assert [name.split("_")[0] for name in names] == ["p0", "p1"]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        merge_programs(["no module"])
