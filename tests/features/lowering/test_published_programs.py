"""Published programs of whole models lower with ``fused`` and ``op``, and the two agree."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

import opcast
from opcast.features.ir.program_check import program_fault
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower

FOLDER = Path(opcast.__file__).resolve().parent.parent / "shared/data/published-programs/programs"
#: Small ones: loops over layers with dense and routed layers, with a cache, no loop at all,
#: training on several devices, and convolutions.
FEW = (
    "qwen3-14b-inference-prefill-1gpu",
    "mixtral-8x7b-inference-prefill-1gpu-0036",
    "llama3-8b-inference-decode-8gpu",
    "mlp-mixer-inference-forward-1gpu",
    "llama3-8b-train-step-8gpu",
    "resnet50-inference-forward-1gpu",
)
#: Products of fewer than 8 rows in 16 bits are padded to 8, as cuBLAS has them: decoding one token.
MOST_PADDING = 8.0


def judge(name: str) -> None:
    path = FOLDER / f"{name}.hlo.gz"
    if not path.is_file():
        pytest.skip(f"no published programs at {FOLDER}")
    source = read_program(gzip.decompress(path.read_bytes()))
    assert program_fault(source.program) == ("", "")
    by_op, fused = (lower(source, lowering) for lowering in ("op", "fused"))
    # One token has few products: what is folded of its other ops counts for more.
    least, most = (0.94, MOST_PADDING) if "-decode-" in name else (0.98, 1.07)
    # Layers outside of loops are recomputed without a barrier (four of Gemma 3's 34): as in XLA,
    # what they compute twice is merged.
    least -= 0.01 * ("-train-" in name)
    assert least * flops(by_op) <= flops(fused) <= most * flops(by_op)
    # Fusion saves traffic; padding and copies of loops' starts may add some.
    assert 0.05 * traffic(by_op) < traffic(fused) < 1.05 * traffic(by_op)
    for found in (by_op, fused):
        assert flops(found) > 1e9 and traffic(found) > 1e8
        assert 1e7 < found.peak_memory_bytes < math.inf
        assert all(math.isfinite(k.flops + k.bytes) and k.multiplicity > 0 for k in found.kernels)
    # Every loop's trips are known: loops that are not would be noted.
    assert not any("trip" in note for note in (*by_op.notes, *fused.notes))


def flops(found: LoweredProgram) -> float:
    return sum(k.flops * k.multiplicity for k in found.kernels)


def traffic(found: LoweredProgram) -> float:
    return sum(k.bytes * k.multiplicity for k in found.kernels)


@pytest.mark.parametrize("name", FEW)
def test_programs_with_loops_lower(name: str) -> None:
    judge(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    sorted(path.name.removesuffix(".hlo.gz") for path in FOLDER.glob("*.hlo.gz")) or ["none"],
)
def test_all_programs_lower(name: str) -> None:
    judge(name)
