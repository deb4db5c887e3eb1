"""Writes one format version's folders of the estimators that ``write_fixture.py`` leaves out.

Run it once when the format changes, never again for an old version::

    python tests/models/write_learned_fixture.py tests/models/data/v1-learned
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from conftest import synthetic_table
from write_fixture import DEVICE, chain, program_model

from opcast.features.table.kernel_graph import NODE_FEATURES, OPCODE_ID, KernelGraph
from opcast.models.core.base import KernelPrediction
from opcast.models.core.kernel_table import KernelGraphs, KernelTable
from opcast.models.core.registry import make_estimator
from opcast.models.cost_model import CostModel
from opcast.models.estimators.tabular import TabularEstimator
from opcast.models.gpu.estimator import GpuEstimator
from opcast.models.gpu.operator_library import Correction

_TREES = {"rounds": 8, "max_depth": 3}
_NETWORK = {"hidden": 16, "layers": 1, "batch": 64, "epochs": 3}
_GRAPHS = {**_NETWORK, "rounds": 1, "head": 16}
TABULAR: dict[str, dict[str, Any]] = {
    "ensemble": {"member_params": {"forest": {"trees": 3, "min_samples_leaf": 20},
                                   "xgboost": _TREES}},
    "mlp": _NETWORK,
    "gnn-flax": _GRAPHS,
    "gnn-pyg": _GRAPHS,
    "tpu-xgboost": _TREES,
}  # fmt: skip
#: Devices that the correction of ``gpu-xla`` learned from, and one that it never saw.
SEEN, UNSEEN = "h100-sxm", "t4"


def with_graphs(table: KernelTable, seed: int) -> KernelTable:
    """Give every row a chain of one to four additions and exponentials."""
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(len(table)):
        n = int(rng.integers(1, 5))
        opcodes = rng.choice([OPCODE_ID["add"], OPCODE_ID["exponential"]], n).astype(np.int32)
        # Few whole values, so that the file that keeps them is small.
        features = rng.integers(0, 3, (n, len(NODE_FEATURES))).astype(np.float32)
        edges = np.array([(i - 1, i) for i in range(1, n)], np.int32).reshape(-1, 2).T
        graphs.append(KernelGraph(opcodes, features, edges, np.zeros(0)))
    table.graphs = KernelGraphs.of([f"k{i}" for i in range(len(graphs))], graphs)
    return table


def plain(table: KernelTable) -> KernelPrediction:
    """What a correction starts from: the roofline of each row, within a third."""
    words = np.full(len(table), "memory", object)
    inside = np.ones(len(table), bool)
    base = table.base_s
    return KernelPrediction(base, base / 1.3, base * 1.3, words, words, inside)


def main(folder: Path) -> None:
    """Write a model folder for every estimator, and what they predict."""
    table, latency = synthetic_table(600, 0)
    held, truth = synthetic_table(300, 2)
    asked, _ = synthetic_table(30, 1)
    tables = [with_graphs(t, seed) for seed, t in enumerate((table, held, asked))]
    expected = {"X": asked.X, "base_s": asked.base_s, "cell": asked.cell}
    packed = tables[2].graphs.packed  # type: ignore[union-attr]
    for part in ("opcode", "features", "edges", "nodes", "uses"):
        expected[f"graph_{part}"] = getattr(packed, part)
    for name, params in TABULAR.items():
        estimator = make_estimator(name, **params)
        assert isinstance(estimator, TabularEstimator)
        estimator.fit_table(table, latency)
        assert estimator.domain is not None
        estimator.calibrate(held, truth, estimator.point(held), estimator.domain.score(held))
        model = CostModel(estimator, program_model(), {DEVICE.name: DEVICE}, {"metrics": {}})
        model.save(folder / name)
        # What is saved is predicted with: compact trees keep fewer digits than those in memory.
        saved = CostModel.load(folder / name, schema=asked.schema)
        assert isinstance(saved.estimator, TabularEstimator)
        found = saved.estimator.predict_table(asked)
        for part in ("latency", "lo", "hi", "in_domain"):
            expected[f"{name}_{part}"] = getattr(found, part)
    gpu = GpuEstimator()
    gpu.correction = Correction.fit(
        table, table.base_s * 1.1, latency, np.arange(len(table)) % 8, [SEEN], **_TREES
    )
    CostModel(gpu, program_model(), {DEVICE.name: DEVICE}, {"metrics": {}}).save(folder / gpu.name)
    for device in (SEEN, UNSEEN):
        found = gpu.correction.apply(plain(asked), asked, device)
        for part in ("latency", "lo", "hi", "in_domain"):
            expected[f"{gpu.name}_{device}_{part}"] = getattr(found, part)
    expected["program"] = np.array(program_model().predict(np.full(5, 1e-5), chain(5), DEVICE))
    np.savez_compressed(folder / "expected.npz", **expected)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
