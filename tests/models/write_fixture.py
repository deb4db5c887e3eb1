"""Writes the model folders of one format version, with predictions, for test_old_versions.py.

Run it once when the format changes, never again for an old version::

    python tests/models/write_fixture.py tests/models/data/v1
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from conftest import synthetic_table

from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.program import Program
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.models.core.registry import make_estimator
from opcast.models.cost_model import CostModel
from opcast.models.estimators.tabular import TabularEstimator
from opcast.models.program.program_model import ProgramModel

SIZES = {
    "roofline": {},
    "ridge": {},
    "forest": {"trees": 3, "min_samples_leaf": 20},
    "xgboost": {"rounds": 8, "max_depth": 3},
}
DEVICE = DeviceSpec(
    "cpu-old", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e10, 1e10),), 1e-6, core_count=2
)


def chain(length: int) -> LoweredProgram:
    """Kernels that each read the one before."""
    kernels = [
        Kernel(f"k{i}", "gemm", Program(), "", f"h{i}", operands=(i - 1,) if i else ())
        for i in range(length)
    ]
    return LoweredProgram(kernels, "xla", "cpu")


def program_model() -> ProgramModel:
    """Fitted to 40 chains whose wall time is 1.4 times the sum of their kernels'."""
    rng = np.random.default_rng(0)
    times = [np.exp(rng.normal(size=2 + i % 9) - 10) for i in range(40)]
    wall = np.array([1.4 * t.sum() * np.exp(0.05 * rng.normal()) for t in times])
    programs = [chain(len(t)) for t in times]
    return ProgramModel().fit(times, programs, [DEVICE] * 40, wall, [f"f{i}" for i in range(40)])


def main(folder: Path) -> None:
    """Write a model folder for every estimator, and what they predict."""
    table, latency = synthetic_table(600, 0)
    asked, _ = synthetic_table(50, 1)
    expected = {"X": asked.X, "base_s": asked.base_s, "cell": asked.cell}
    for name, params in SIZES.items():
        estimator = make_estimator(name, **params)
        assert isinstance(estimator, TabularEstimator)
        estimator.fit_table(table, latency)
        held, truth = synthetic_table(300, 2)
        assert estimator.domain is not None
        scores = estimator.domain.score(held)
        estimator.calibrate(held, truth, estimator.point(held), scores)
        model = CostModel(estimator, program_model(), {DEVICE.name: DEVICE}, {"metrics": {}})
        model.save(folder / name)
        found = estimator.predict_table(asked)
        for part in ("latency", "lo", "hi", "in_domain"):
            expected[f"{name}_{part}"] = getattr(found, part)
        expected["program"] = np.array(
            model.program_model.predict(np.full(5, 1e-5), chain(5), DEVICE)
        )
    np.savez_compressed(folder / "expected.npz", **expected)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
