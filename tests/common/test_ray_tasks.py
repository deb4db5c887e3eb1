"""Tasks on two Ray nodes of one machine: the same results, though a worker and a node die."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, OpcastError
from opcast.common.ray_tasks import run_tasks
from opcast.models.operators import OpModel
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.published import tables

ITEMS = list(range(12))


def _work(shared, item):
    """A task that takes a while; which one kills its worker, the shared folder says."""
    folder, slow = shared
    flag = Path(folder) / "died"
    if item == 3 and not flag.exists():
        flag.touch()
        os._exit(1)
    time.sleep(slow)
    return float(np.sin(item + 0.1))


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray", reason="the extra 'scale' is not installed")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.slow
def test_tasks_survive_the_death_of_a_worker_and_of_a_node(tmp_path, cluster):
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    found = {}
    for place, result in run_tasks(_work, (str(tmp_path), 0.5), ITEMS, cluster.address):
        found[place] = result
        if len(found) == 3:
            cluster.remove_node(second)
    assert (tmp_path / "died").exists()
    # To the bit, and in the places of their items.
    assert [found[i] for i in ITEMS] == [float(np.sin(i + 0.1)) for i in ITEMS]


def _refuse(shared, item):
    raise DatasetError("no such row", where=f"item {item}")


@pytest.mark.slow
def test_errors_of_tasks_are_those_of_opcast(cluster):
    with pytest.raises(DatasetError, match="item 0: no such row"):
        list(run_tasks(_refuse, None, [0], cluster.address))


@pytest.mark.slow
def test_tables_are_predicted_as_here_though_a_node_dies(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 5)
    rows = [
        {"id": f"T{i}", "op": "linear", "family": "linear", "dtype": "bf16", "device": device,
         "source": "aiconfigurator", "backend": "vllm", "b": 1, "m": 2**i, "n": 4096, "k": 4096,
         "latency_us": 10.0 + i, "split": "val"}
        for i in range(8) for device in ("h100-sxm", "b200")
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "ops_mine.parquet")
    model = OpModel.load(find_model(OPERATOR_MODEL))
    here = tables.predict_published(tmp_path, model)
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def losing_a_node(*arguments):
        for place, found in enumerate(run_tasks(*arguments)):
            yield found
            if place == 0:
                cluster.remove_node(second)

    monkeypatch.setattr(tables, "run_tasks", losing_a_node)
    there = tables.predict_published(tmp_path, model, ray=cluster.address)
    pd.testing.assert_frame_equal(here.frame, there.frame, check_exact=True)
    pd.testing.assert_frame_equal(here.judged, there.judged, check_exact=True)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OpcastError, match="Ray is not installed") as refused:
        list(run_tasks(_work, None, [1], "local"))
    assert "scale" in str(refused.value)
