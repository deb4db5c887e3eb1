from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import ModelError
from opcast.features.dataset import Dataset, sample_frame
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.kernel_graph import NODE_FEATURES, OPCODE_ID, KernelGraph
from opcast.models.core.base import KernelPrediction
from opcast.models.core.kernel_table import KernelGraphs, KernelTable
from opcast.models.core.registry import make_estimator
from opcast.models.cost_model import CostModel
from opcast.models.neural.batches import assemble, cuts, node_bucket, row_bucket
from opcast.models.neural.estimators import FlaxGraphEstimator, GraphEstimator, PygGraphEstimator

from ...support.cases import later

Tables = Callable[..., tuple[KernelTable, np.ndarray]]
SMALL = {"hidden": 16, "rounds": 1, "head": 32, "layers": 1, "batch": 64}
BOTH = [FlaxGraphEstimator, PygGraphEstimator]
CHEAP, DEAR = OPCODE_ID["add"], OPCODE_ID["exponential"]


def random_graph(rng: np.random.Generator) -> KernelGraph:
    """A chain of one to eight operations, cheap or dear, some with a second operand."""
    n = int(rng.integers(1, 9))
    edges = [(i - 1, i) for i in range(1, n)]
    edges += [(int(rng.integers(0, i)), i) for i in range(2, n) if rng.random() < 0.3]
    features = rng.normal(size=(n, len(NODE_FEATURES))).astype(np.float32)
    opcodes = rng.choice([CHEAP, DEAR], n).astype(np.int32)
    return KernelGraph(opcodes, features, np.array(edges, np.int32).reshape(-1, 2).T, np.zeros(0))


def permuted(graph: KernelGraph, rng: np.random.Generator) -> KernelGraph:
    order = rng.permutation(len(graph.node_opcode))
    place = np.argsort(order)
    edges = place[graph.edges].astype(np.int32)[:, rng.permutation(graph.edges.shape[1])]
    return KernelGraph(
        graph.node_opcode[order], graph.node_features[order], edges, graph.kernel_features
    )


def with_graphs(table: KernelTable, graphs: list[KernelGraph]) -> KernelTable:
    table.graphs = KernelGraphs.of([f"k{i}" for i in range(len(graphs))], graphs)
    return table


def dear_share(graph: KernelGraph) -> float:
    return float(np.mean(graph.node_opcode == DEAR))


@pytest.fixture(scope="module")
def make_law(make_table: Tables) -> Callable[[int, int], tuple[KernelTable, np.ndarray]]:
    """Latencies that depend on the share of dear operations, which the table does not show."""

    def make(n: int, seed: int) -> tuple[KernelTable, np.ndarray]:
        rng = np.random.default_rng(seed)
        table, latency = make_table(n, seed)
        graphs = [random_graph(rng) for _ in range(n)]
        dear = np.array([dear_share(graph) for graph in graphs])
        return with_graphs(table, graphs), latency * np.exp(2.0 * dear)

    return make


@pytest.fixture(scope="module", params=[later(BOTH[0]), BOTH[1]], ids=lambda cls: cls.name)
def fitted(request: pytest.FixtureRequest, make_law: Any) -> GraphEstimator:
    model = request.param(**SMALL, epochs=12)
    return model.fit_table(*make_law(1500, 0))


def test_learns_what_only_the_graph_shows(fitted: GraphEstimator, make_law: Any) -> None:
    table, latency = make_law(300, 1)
    error = np.abs(np.log(fitted.point(table) / latency)).mean()
    physics = np.abs(np.log(table.base_s / latency)).mean()
    assert error < 0.3 * physics
    # Whatever sees the table alone is left with the spread of the dear operations' share.
    dear = 2.0 * np.array([dear_share(g) for g in graphs_of(table)])
    assert error < 0.6 * np.abs(dear - np.median(dear)).mean()


def graphs_of(table: KernelTable) -> list[KernelGraph]:
    assert table.graphs is not None
    return list(table.graphs.store.sources.values())


def test_order_of_the_nodes_does_not_matter(fitted: GraphEstimator, make_law: Any) -> None:
    table, _ = make_law(60, 2)
    rng = np.random.default_rng(0)
    shuffled = [permuted(graph, rng) for graph in graphs_of(table)]
    before = fitted.point(table)
    np.testing.assert_allclose(fitted.point(with_graphs(table, shuffled)), before, rtol=1e-5)


def test_alone_or_in_a_batch_is_the_same(fitted: GraphEstimator, make_law: Any) -> None:
    table, _ = make_law(150, 3)
    together = fitted.point(table)
    alone = [fitted.point(table.take(np.array([row])))[0] for row in range(0, 150, 25)]
    np.testing.assert_allclose(alone, together[::25], rtol=1e-5)


def test_saved_model_predicts_the_same(
    fitted: GraphEstimator, make_law: Any, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "m")
    again = type(fitted).load(tmp_path / "m", schema=fitted.schema)
    table, _ = make_law(100, 4)
    np.testing.assert_array_equal(again.point(table), fitted.point(table))
    assert again.params == fitted.params


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("graph_schema_hash", "other", "graph schema other"),
        ("schema_hash", "other", "feature schema other"),
        ("params", {**SMALL, "hidden": 8}, "do not fit its parameters"),
        ("params", {"depth": 8}, "incomplete"),
    ],
)
def test_wrong_manifest_is_refused(
    fitted: GraphEstimator, tmp_path: Path, key: str, value: object, message: str
) -> None:
    fitted.save(tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelError, match=message):
        type(fitted).load(tmp_path / "m", schema=fitted.schema)


def test_table_without_graphs_is_refused(fitted: GraphEstimator, make_table: Tables) -> None:
    with pytest.raises(ModelError, match="graphs=True"):
        fitted.point(make_table(5, 0)[0])


@pytest.mark.parametrize("cls", BOTH, ids=lambda cls: cls.name)
def test_equal_seeds_give_equal_models(cls: type[GraphEstimator], make_law: Any) -> None:
    data, asked = make_law(200, 0), make_law(40, 1)[0]
    first, same, other = (cls(seed=s, epochs=1, **SMALL).fit_table(*data) for s in (3, 3, 4))
    np.testing.assert_array_equal(first.point(asked), same.point(asked))
    assert not np.array_equal(first.point(asked), other.point(asked))


def test_both_libraries_compute_the_same_network(make_law: Any) -> None:
    data, (asked, _) = make_law(200, 0), make_law(100, 5)
    deep = {**SMALL, "rounds": 2, "layers": 2}
    pyg = PygGraphEstimator(**deep, epochs=1).fit_table(*data)
    flax = FlaxGraphEstimator(**deep)
    flax.inputs, flax.nodes, flax.bound = pyg.inputs, pyg.nodes, pyg.bound
    flax.trained = pyg.trained
    flax.weights = flax_weights(pyg.weights)
    assert {n: a.shape for n, a in flax.weights.items()} == {
        n: a.shape for n, a in flax._network().arrays().items()
    }
    np.testing.assert_allclose(flax.point(asked), pyg.point(asked), rtol=1e-4)


def flax_weights(torch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PyTorch's names and layouts to Flax's."""
    found = {"opcode/embedding": torch["opcode.weight"]}
    names = {"node": "node", "out": "head/out", "head.0": "head/dense_0", "head.1": "head/dense_1"}
    for number in (0, 1):
        names[f"producers.{number}.lin_l"] = f"producers_{number}"
        found[f"own_{number}/kernel"] = torch[f"producers.{number}.lin_r.weight"].T
        found[f"users_{number}/kernel"] = torch[f"users.{number}.lin_l.weight"].T
    for theirs, ours in names.items():
        found[f"{ours}/kernel"] = torch[f"{theirs}.weight"].T
        found[f"{ours}/bias"] = torch[f"{theirs}.bias"]
    return found


def test_rows_of_equal_kernels_share_a_graph_in_a_batch(make_law: Any) -> None:
    model = FlaxGraphEstimator(**SMALL)
    table, _ = make_law(3, 0)
    table = table.take(np.array([0, 1, 0, 2, 0]))
    model._look_at(table)
    rows = model._rows(table)
    batch = assemble(rows, 8)
    assert table.graphs is not None
    nodes = int(table.graphs.packed.nodes.sum())
    assert (batch.graph < 3).sum() == nodes and (batch.graph == 8).sum() > 0
    np.testing.assert_array_equal(batch.graph_of_row, [0, 1, 0, 2, 0, 8, 8, 8])
    np.testing.assert_array_equal(batch.weight, [1] * 5 + [0] * 3)
    # Padding edges stay among the padding.
    assert (batch.graph[batch.source] == batch.graph[batch.target]).all()


def test_sizes_come_in_few_steps() -> None:
    assert [node_bucket(n) for n in (1, 8, 9, 33, 65, 600, 1024, 1025)] == [
        8, 8, 16, 40, 80, 640, 1024, 1280,
    ]  # fmt: skip
    assert len({node_bucket(n) for n in range(512, 4096)}) == 13
    assert [row_bucket(n, 64) for n in (1, 9, 64)] == [8, 16, 64]


def test_a_graph_too_large_for_a_batch_is_one_of_its_own() -> None:
    nodes = np.array([10, 10, 20_000, 5, 16_379, 5])
    assert list(cuts(nodes, 4)) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert list(cuts(np.ones(5, int), 2)) == [(0, 2), (2, 4), (4, 5)]
    assert list(cuts(np.zeros(0, int), 2)) == []


HLO = """HloModule net, is_scheduled=true

ENTRY main {
  x = f32[ROWS,512] parameter(0)
  w = f32[512,256] parameter(1)
  y = f32[ROWS,256] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  e = f32[ROWS,256] exponential(y)
  ROOT z = f32[ROWS,256] add(e, y)
}
"""


def kernels_of(rows: int) -> list[Kernel]:
    return extract_kernels(parse_hlo(HLO.replace("ROWS", str(rows))))[0]


@pytest.fixture(scope="module")
def dataset(cpu: DeviceSpec) -> Dataset:
    """Kernels of 20 sizes; labels are 1.5 × (1 µs + bytes / 10 GB/s)."""
    kernels = [kernel for size in range(20) for kernel in kernels_of(64 + 32 * size)]
    columns: dict[str, Any] = {
        "sample_id": [f"s{i}" for i in range(len(kernels))],
        "kernel_hash": [k.hash for k in kernels],
        "kernel_ir": [k.ir for k in kernels],
        "kind": [k.kind for k in kernels],
        "bytes": [k.bytes for k in kernels],
        "latency_us_p50": [1.5 * (1.0 + k.bytes / 10e9 * 1e6) for k in kernels],
    }
    same = {
        "level": "kernel", "dtype": "f32", "device": cpu.name, "run_id": "r0", "repeats": 5,
        "source": "measured:trace", "family": "random", "program": "", "flops": 0.0,
        "latency_us_p10": 0.0, "latency_us_p90": 0.0,
    }  # fmt: skip
    rows = pd.DataFrame(columns).assign(**same).to_dict("records")
    return Dataset(sample_frame(rows), {"r0": {"device": json.loads(cpu.to_json())}})


@pytest.mark.parametrize("name", [later("mlp"), later("gnn-flax"), "gnn-pyg"])
def test_from_a_dataset_to_a_saved_cost_model(
    name: str, dataset: Dataset, cpu: DeviceSpec, tmp_path: Path
) -> None:
    sizes = {"hidden": 8, "epochs": 4, "batch": 16, "layers": 1}
    rounds = {"rounds": 1} if name.startswith("gnn") else {}
    estimator = make_estimator(name, **sizes, **rounds).fit(dataset)
    kernels = [*kernels_of(100), kernels_of(100)[0]]
    CostModel(estimator, devices={cpu.name: cpu}).save(tmp_path / "m")
    found = CostModel.load(tmp_path / "m").predict_kernels(kernels, cpu)
    before = estimator.predict(kernels, cpu)
    assert found.unclamped is None and before.unclamped is None
    for field in set(KernelPrediction.__slots__) - {"unclamped"}:
        assert getattr(found, field).shape == (4,)
        np.testing.assert_array_equal(getattr(found, field), getattr(before, field))
    assert set(found.source) == {"learned"}
    assert found.latency[0] == found.latency[3]
    assert (found.lo <= found.latency).all() and (found.latency <= found.hi).all()
    manifest = json.loads((tmp_path / "m" / "estimator" / "manifest.json").read_text())
    assert ("graph_schema_hash" in manifest) == name.startswith("gnn")


@pytest.mark.parametrize("name", ["mlp", "gnn-flax", "gnn-pyg"])
def test_unfitted_is_told(name: str, make_law: Any, tmp_path: Path) -> None:
    model = make_estimator(name)
    with pytest.raises(ModelError, match="not fitted"):
        model.predict_table(make_law(5, 0)[0])  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="not fitted"):
        model.save(tmp_path / "m")


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match=r"pip install '\.\[gnn\]'"):
        make_estimator("gnn-pyg")
    make_estimator("gnn-flax")
