"""The graph network in PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...common.errors import ModelError
from ...common.extras import extra_hint
from ..core.kernel_table import KernelTable
from .gnn import GraphEstimator, GraphNetwork, Weights


class PygGraphEstimator(GraphEstimator):
    """Message passing in PyTorch Geometric, for those who build on PyTorch.

    Network, batches, target and loss are ``gnn-flax``'s, which trains faster on a CPU
    (docs/models.md).

    Args:
        seed: Seed of weights, order and held-back groups.
        n_jobs: Threads.
        params: The others of :class:`.gnn.GraphEstimator`.

    Raises:
        ModelError: PyTorch or PyTorch Geometric is not installed.
    """

    name = "gnn-pyg"

    def __init__(self, *, seed: int = 0, n_jobs: int = 1, **params: Any) -> None:
        # Asked for without importing, which takes seconds.
        missing = [name for name in ("torch", "torch_geometric") if find_spec(name) is None]
        if missing:
            raise ModelError(
                f"estimator 'gnn-pyg' needs {' and '.join(missing)}",
                hint=f"{extra_hint('gnn')}, or take gnn-flax",
            )
        super().__init__(seed=seed, **params)
        self.params["n_jobs"] = n_jobs

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        with self._threads():
            return super()._train(table, target, stop)

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        with self._threads():
            return super()._network_ratio(table)

    def _network(self, weights: Weights | None = None) -> GraphNetwork:
        from .pyg_net import PygGraphNet, TrainedNetwork, seeded

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        with seeded(p["seed"]):
            layers = PygGraphNet(
                inputs.width, nodes.width, p["hidden"], p["rounds"], p["head"], p["layers"]
            )
        return TrainedNetwork(layers, self.bound, p["delta"], p["weight_decay"], weights)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use :attr:`n_jobs` threads, and as many as before afterwards."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.params["n_jobs"])
        try:
            yield
        finally:
            torch.set_num_threads(before)
