"""Model folders of every format ever released load and predict what they did then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.features.ir.program import Program
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.table.kernel_graph import KernelGraph, graph_schema_hash
from opcast.models.core.base import KernelPrediction
from opcast.models.core.kernel_table import KernelGraphs, KernelTable
from opcast.models.core.registry import UNTRAINED, estimator_class, estimator_names
from opcast.models.cost_model import CostModel
from opcast.models.estimators.tabular import TabularEstimator
from opcast.models.gpu.estimator import GpuEstimator

DATA = Path(__file__).parent / "data"
FOLDERS = sorted(p.parent for p in DATA.glob("v*/*/manifest.json"))
TABULAR = [f for f in FOLDERS if f.name != GpuEstimator.name]
#: Sums of floats may differ in the last bits between machines, of networks in a few more.
DIGITS = {"mlp": 1e-4, "gnn-flax": 1e-4, "gnn-pyg": 1e-4}


def label(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def test_there_is_a_folder_of_every_estimator() -> None:
    """Of all of ours but the simulators, which have nothing to save."""
    own = {n for n in estimator_names() if estimator_class(n).__module__.startswith("opcast.")}
    assert {f.name for f in FOLDERS} == own - set(UNTRAINED) | {"roofline"}


@pytest.mark.parametrize("folder", TABULAR, ids=label)
def test_loads_and_predicts_as_before(folder: Path) -> None:
    manifest = json.loads((folder / "estimator/manifest.json").read_text())
    if manifest.get("graph_schema_hash", graph_schema_hash()) != graph_schema_hash():
        with pytest.raises(ModelError, match="graph schema"):  # refused, rather than wrong
            CostModel.load(folder, schema="synthetic")
        return
    model = CostModel.load(folder, schema="synthetic")
    assert isinstance(model.estimator, TabularEstimator)
    with np.load(folder.parent / "expected.npz") as expected:
        agrees(model.estimator.predict_table(saved_table(expected)), expected, folder.name)


@pytest.mark.parametrize("folder", FOLDERS, ids=label)
def test_times_of_programs_are_as_before(folder: Path) -> None:
    manifest = json.loads((folder / "estimator/manifest.json").read_text())
    if manifest.get("graph_schema_hash", graph_schema_hash()) != graph_schema_hash():
        pytest.skip("the estimator beside it has another graph schema")
    model = CostModel.load(folder, schema="synthetic")
    with np.load(folder.parent / "expected.npz") as expected:
        program = model.program_model.predict(np.full(5, 1e-5), chain(5), model.devices["cpu-old"])
        np.testing.assert_allclose(program[:3], expected["program"], rtol=1e-9)


@pytest.mark.parametrize("device", ["h100-sxm", "t4"])
def test_the_correction_of_gpus_is_as_before(device: str) -> None:
    """Of a device that it learned from, and of one that it never saw: wider, and outside."""
    (folder,) = (f for f in FOLDERS if f.name == GpuEstimator.name)
    estimator = CostModel.load(folder, schema="synthetic").estimator
    assert isinstance(estimator, GpuEstimator) and estimator.correction is not None
    with np.load(folder.parent / "expected.npz") as expected:
        table = saved_table(expected)
        words, inside = np.full(len(table), "memory", object), np.ones(len(table), bool)
        base = table.base_s
        start = KernelPrediction(base, base / 1.3, base * 1.3, words, words, inside)
        found = estimator.correction.apply(start, table, device)
        agrees(found, expected, f"{folder.name}_{device}")


def agrees(found: KernelPrediction, expected: Mapping[str, np.ndarray], name: str) -> None:
    for part in ("latency", "lo", "hi"):
        np.testing.assert_allclose(
            getattr(found, part), expected[f"{name}_{part}"], rtol=DIGITS.get(name, 1e-6)
        )
    np.testing.assert_array_equal(found.in_domain, expected[f"{name}_in_domain"])


def saved_table(expected: Mapping[str, np.ndarray]) -> KernelTable:
    names = tuple(f"f{i}" for i in range(expected["X"].shape[1]))
    bound = np.full(len(expected["X"]), "memory", object)
    table = KernelTable(
        expected["X"], names, expected["base_s"], bound, expected["cell"], "synthetic"
    )
    if "graph_nodes" in expected:
        graphs = saved_graphs(expected)
        table.graphs = KernelGraphs.of([f"k{i}" for i in range(len(graphs))], graphs)
    return table


def saved_graphs(expected: Mapping[str, np.ndarray]) -> list[KernelGraph]:
    """Graphs that were packed one after the other."""
    nodes, uses = (np.cumsum(expected[f"graph_{part}"]) for part in ("nodes", "uses"))
    cut = {
        "opcode": np.split(expected["graph_opcode"], nodes[:-1]),
        "features": np.split(expected["graph_features"], nodes[:-1]),
        "edges": np.split(expected["graph_edges"], uses[:-1], axis=1),
    }
    first = np.concatenate([[0], nodes[:-1]]).astype(np.int32)
    return [
        KernelGraph(opcode, features, edges - start, np.zeros(0))
        for opcode, features, edges, start in zip(*cut.values(), first, strict=True)
    ]


def chain(length: int) -> LoweredProgram:
    kernels = [
        Kernel(f"k{i}", "gemm", Program(), "", f"h{i}", operands=(i - 1,) if i else ())
        for i in range(length)
    ]
    return LoweredProgram(kernels, "xla", "cpu")
