"""Files that each version of JAX exports are read, and mean the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from opcast.features.ir.platforms import Platform
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower

from .write_exports import PLATFORMS

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir())


def product_flops(lowered: LoweredProgram) -> float:
    return sum(k.flops * k.multiplicity for k in lowered.kernels if k.kind == "gemm")


def ops(lowered: LoweredProgram) -> Counter[str]:
    return Counter(source.op for k in lowered.kernels for source in k.sources)


def test_the_oldest_and_the_newest_are_there():
    assert "0.4.30" in VERSIONS and "0.9.2" in VERSIONS


@pytest.mark.parametrize("lowering", ["op", "fused"])
@pytest.mark.parametrize("version", VERSIONS)
def test_programs_of_a_version(version: str, lowering: str):
    attention = lower(DATA / version / "attention.mlir", lowering, device="h100-sxm")
    # Two products of 2·b·h·q·k·d each.
    assert product_flops(attention) == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    scan = lower(DATA / version / "scan.mlirbc", lowering, device="h100-sxm")
    # Forward, again forward, and two products of the gradient, in each of three layers.
    assert product_flops(scan) == 4 * 3 * (2 * 4 * 16 * 16)
    lines = {s.line for k in scan.kernels if k.kind == "gemm" for s in k.sources}
    assert lines and all(lines)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_export_for_several_platforms_of_a_version(version: str, platform: str):
    step = lower(read_program(DATA / version / "step.jax", platform=Platform(platform)), "op")
    # x·w1 and its dw; h·w2, its dw and its dx.
    assert product_flops(step) == 2 * (2 * 16 * 32 * 64) + 3 * (2 * 16 * 64 * 8)
    found = ops(step)
    own = {"cpu": "stablehlo.sine", "tpu": "stablehlo.tanh"}
    for name, op in own.items():
        assert bool(found[op]) == (name == platform)
    assert not found["stablehlo.case"] and not any("platform" in note for note in step.notes)


def test_a_module_of_an_export_does_not_say_which_platforms():
    from jax import export

    data = (DATA / VERSIONS[-1] / "step.jax").read_bytes()
    exported = export.deserialize(bytearray(data))
    (note,) = [
        note
        for note in lower(exported.mlir_module_serialized, "op", device="h100-sxm").notes
        if note.startswith("warning: ")
    ]
    assert "exported for several platforms" in note and "for cuda alone" in note
