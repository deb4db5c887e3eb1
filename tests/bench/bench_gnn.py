"""An epoch of training the graph networks, beside a plain loop over graphs in PyTorch Geometric.

All three train the same network on the same kernels, on one core. An epoch of the estimators is
what a longer training takes beyond a shorter one, all preparation of batches included; compiling
and reading graphs happen in a first training that is not counted. The loop takes a step of the
optimiser for every graph. Seconds are of processor time: on
one core, what it takes when nothing else runs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if hasattr(os, "sched_setaffinity"):  # before JAX and PyTorch count the cores
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import show
from opcast.features.dataset import Dataset
from opcast.models.core.kernel_table import KernelTable
from opcast.models.core.registry import estimator_class
from opcast.models.neural.batches import assemble
from opcast.models.neural.estimators import GraphEstimator, PygGraphEstimator
from opcast.models.training_data.prepared import PreparedDataset, prepare
from opcast.workflows.reports.accuracy import COMMITTED

ROWS = 4096
EPOCHS = 4
FASTER = 5.0


def samples(data: PreparedDataset) -> tuple[KernelTable, np.ndarray]:
    """Kernels of the committed dataset with their labels, in one group: nothing is held back."""
    rows = np.random.default_rng(0).permutation(data.kernel_rows())[:ROWS]
    return data.table.take(data.entry[rows]), data.latency_s[rows]


def epoch_seconds(name: str, table: KernelTable, latency_s: np.ndarray) -> float:
    """Seconds of one epoch of an estimator."""

    def seconds(epochs: int) -> float:
        model = estimator_class(name)(epochs=epochs)
        assert isinstance(model, GraphEstimator)
        start = time.process_time()
        model.fit_table(table, latency_s, np.zeros(len(table)))
        return time.process_time() - start

    seconds(1 + EPOCHS)
    return (seconds(1 + EPOCHS) - seconds(1)) / EPOCHS


def loop_seconds(table: KernelTable, latency_s: np.ndarray) -> float:
    """Seconds of one epoch of a loop that passes one graph at a time through the network."""
    import torch

    model = PygGraphEstimator(epochs=1).fit_table(table.take(np.arange(256)), latency_s[:256])
    torch.set_num_threads(1)
    target = np.log(latency_s / table.base_s).astype(np.float32)
    rows = model._rows(table, target)
    graphs = [assemble(rows.take(np.array([row])), 1) for row in range(len(table))]
    network = model._network()
    start = time.process_time()
    for graph in graphs:
        network.step(graph, np.float32(1e-3))
    return time.process_time() - start


def main() -> None:
    table, latency_s = samples(prepare(Dataset.load(COMMITTED), programs=False))
    loop = loop_seconds(table, latency_s)
    batched = epoch_seconds("gnn-pyg", table, latency_s)
    flax = epoch_seconds("gnn-flax", table, latency_s)
    print(f"     PyG, a loop over {ROWS} graphs: {loop:.3g} s; PyG in batches: {batched:.3g} s")
    note = f"{loop / flax:.1f} times the PyG loop, {batched / flax:.1f} times PyG in batches"
    show(f"train gnn-flax, one epoch of {ROWS} graphs", flax, loop / FASTER, note)


if __name__ == "__main__":
    main()
