"""Modules as XLA's compiler makes them for a GPU: what a campaign keeps gives the same kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import pytest

from opcast.common.errors import CompilerError
from opcast.datagen.campaign.jax_cases import _function, anonymous
from opcast.datagen.campaign.plan import load_plan
from opcast.datagen.profile.runner import wide_types
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.install import find_compiler


@pytest.mark.exhaustive
def test_every_program_and_operation_has_a_module_for_cuda() -> None:
    seen = set()
    for case in load_plan("gpu").cases:
        spec = {k: v for k, v in case.spec.items() if k != "seconds"}
        one = f"{spec['op']}-{spec['dtype']}-{len(spec['shape'])}" if "op" in spec else str(spec)
        if case.kind != "traced" or one in seen:
            continue
        seen.add(one)
        flat, structs, donated, _, _ = _function(spec)
        with wide_types() if "op" in spec else nullcontext():
            traced = jax.jit(flat, donate_argnums=donated, keep_unused=True).trace(*structs)
            lowered = traced.lower(lowering_platforms=("cuda",))
            assert "func.func public @main" in lowered.as_text()
    assert len(seen) > 130


@pytest.mark.parametrize(
    "spec",
    [
        {"op": "rows.softmax_grad", "shape": [2048, 1024], "dtype": "bfloat16"},
        {"op": "movement.scatter_add", "shape": [16384, 4096], "dtype": "bfloat16"},
        {"op": "convolution.conv_filter_grad", "shape": [64, 56, 64, 64, 3, 1, 1],
         "dtype": "bfloat16"},
        {"op": "products.ragged_dot", "shape": [4096, 2048, 1024, 8], "dtype": "bfloat16"},
    ],
    ids=lambda spec: spec["op"],
)  # fmt: skip
def test_kernels_are_those_of_the_whole_module(spec: dict[str, Any]) -> None:
    try:
        find_compiler("gpu")
    except CompilerError:
        pytest.skip("the GPU compiler is not installed: make compilers")
    flat, structs, donated, _, _ = _function(spec)
    flat.__name__ = "case0"
    jitted = jax.jit(flat, donate_argnums=donated, keep_unused=True)
    text = jitted.trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    whole = lower(read_program(text), "xla", device=find_device("h200-sxm"))
    kept = anonymous(whole.hlo)
    assert "metadata=" in whole.hlo
    assert "metadata=" not in kept
    assert "stack_frame" not in kept
    again = lower(read_program(kept), cache=False)
    assert [k.name for k in again.kernels] == [k.name for k in whole.kernels]
    assert [k.hash for k in again.kernels] == [k.hash for k in whole.kernels]
