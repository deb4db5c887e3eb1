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
from .batches import GraphRows, cuts
from .fitting import CLIP_NORM, best_epoch, learning_rates
from .gnn import GraphEstimator


class PygGraphEstimator(GraphEstimator):
    """Message passing in PyTorch Geometric, for those who build on PyTorch.

    Network, target and loss are ``gnn-flax``'s, which trains about twice as fast on a CPU
    (docs/models.md).

    Args:
        hidden: Width of a node.
        rounds: Rounds of message passing.
        head: Width of the perceptron behind it.
        layers: Hidden layers of the perceptron.
        epochs: Most passes over the rows; early stopping may end sooner.
        batch: Rows of a step.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of AdamW.
        delta: Errors of the log-ratio below this count quadratically.
        stop_epochs: Epochs without improvement before stopping.
        seed: Seed of weights, order and held-back groups.
        n_jobs: Threads.

    Raises:
        ModelError: PyTorch or PyTorch Geometric is not installed.
    """

    name = "gnn-pyg"

    def __init__(
        self,
        hidden: int = 64,
        rounds: int = 2,
        head: int = 192,
        layers: int = 3,
        epochs: int = 30,
        batch: int = 256,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        delta: float = 0.1,
        stop_epochs: int = 8,
        seed: int = 0,
        n_jobs: int = 1,
    ) -> None:
        # Asked for without importing, which takes seconds.
        missing = [name for name in ("torch", "torch_geometric") if find_spec(name) is None]
        if missing:
            raise ModelError(
                f"estimator 'gnn-pyg' needs {' and '.join(missing)}",
                hint=f"{extra_hint('gnn')}, or take gnn-flax",
            )
        super().__init__(
            hidden=hidden,
            rounds=rounds,
            head=head,
            layers=layers,
            epochs=epochs,
            batch=batch,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            delta=delta,
            stop_epochs=stop_epochs,
            seed=seed,
        )
        self.params["n_jobs"] = n_jobs

    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        rows = self._rows(table, target)
        fitting, held = rows.take(~stop), rows.take(stop)
        error = (lambda weights: self._error(weights, held)) if stop.any() else None
        with self._torch():
            best: dict[str, np.ndarray] = best_epoch(
                self._epochs(fitting), error, self.params["stop_epochs"]
            )
        return best

    def _epochs(self, rows: GraphRows) -> Iterator[dict[str, np.ndarray]]:
        """Weights after every epoch over the rows."""
        import torch
        from torch_geometric.loader import DataLoader

        from .pyg_net import graph_data, to_arrays

        p, net = self.params, self._network()
        size = min(p["batch"], len(rows.y))
        order = torch.Generator().manual_seed(p["seed"])
        loader = DataLoader(graph_data(rows), size, True, drop_last=True, generator=order)
        optimiser = torch.optim.AdamW(net.parameters(), weight_decay=p["weight_decay"])
        rates = iter(learning_rates(p["epochs"] * len(loader), p["learning_rate"]).tolist())
        for _ in range(p["epochs"]):
            for batch in loader:
                optimiser.param_groups[0]["lr"] = next(rates)
                self._step(net, optimiser, batch)
            yield to_arrays(net)

    def _step(self, net: Any, optimiser: Any, batch: Any) -> None:
        import torch

        residual = self.bound(net(batch), torch.sigmoid) - batch.y
        loss = torch.sqrt(residual**2 + self.params["delta"] ** 2).mean()
        # sqrt(r² + δ²): the loss of the networks in Flax, so that both learn the same.
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        optimiser.step()

    def _error(self, weights: dict[str, np.ndarray], held: GraphRows) -> float:
        """Mean absolute error of the log-ratio."""
        return float(np.abs(self._predicted(weights, held) - held.y).mean())

    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        with self._torch():
            return self._predicted(self.weights, self._rows(table))

    def _predicted(self, weights: dict[str, np.ndarray], rows: GraphRows) -> np.ndarray:
        import torch
        from torch_geometric.data import Batch

        from .pyg_net import from_arrays, graph_data

        net, data, parts = from_arrays(self._network(), weights), graph_data(rows), []
        with torch.no_grad():
            for start, stop in cuts(rows.packed.nodes[rows.graph], self.params["batch"]):
                raw = net(Batch.from_data_list(data[start:stop]))
                parts.append(self.bound(raw, torch.sigmoid).numpy())
        return np.concatenate(parts)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        from .pyg_net import to_arrays

        return {name: array.shape for name, array in to_arrays(self._network()).items()}

    def _network(self) -> Any:
        import torch

        from .pyg_net import PygGraphNet

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        # The seed is set in a fork of the generator: a library does not seed the user's global one.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(p["seed"])
            return PygGraphNet(
                inputs.width, nodes.width, p["hidden"], p["rounds"], p["head"], p["layers"]
            )

    @contextmanager
    def _torch(self) -> Iterator[None]:
        """Use :attr:`n_jobs` threads, and as many as before afterwards."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.params["n_jobs"])
        try:
            yield
        finally:
            torch.set_num_threads(before)
