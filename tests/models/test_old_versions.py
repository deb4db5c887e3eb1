"""Model folders of every format ever released load and predict what they did then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.features.ir import Program
from opcast.features.kernel import Kernel, LoweredProgram
from opcast.models.cost_model import CostModel
from opcast.models.tables import KernelTable
from opcast.models.tabular import TabularEstimator

DATA = Path(__file__).parent / "data"
FOLDERS = sorted(p.parent for p in DATA.glob("v*/*/manifest.json"))


def test_there_is_a_folder_of_every_estimator() -> None:
    assert {f.name for f in FOLDERS} == {"roofline", "ridge", "forest", "xgboost"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_loads_and_predicts_as_before(folder: Path) -> None:
    model = CostModel.load(folder, schema="synthetic")
    assert isinstance(model.estimator, TabularEstimator)
    with np.load(folder.parent / "expected.npz") as expected:
        names = tuple(f"f{i}" for i in range(expected["X"].shape[1]))
        bound = np.full(len(expected["X"]), "memory", object)
        table = KernelTable(
            expected["X"], names, expected["base_s"], bound, expected["cell"], "synthetic"
        )
        found = model.estimator.predict_table(table)
        for part in ("latency", "lo", "hi"):
            # Sums of floats may differ in the last bit between machines, not more.
            np.testing.assert_allclose(
                getattr(found, part), expected[f"{folder.name}_{part}"], rtol=1e-6
            )
        np.testing.assert_array_equal(found.in_domain, expected[f"{folder.name}_in_domain"])
        program = model.program_model.predict(np.full(5, 1e-5), chain(5), model.devices["cpu-old"])
        np.testing.assert_allclose(program, expected["program"], rtol=1e-9)


def chain(length: int) -> LoweredProgram:
    kernels = [
        Kernel(f"k{i}", "gemm", Program(), "", f"h{i}", operands=(i - 1,) if i else ())
        for i in range(length)
    ]
    return LoweredProgram(kernels, "xla", "cpu")
