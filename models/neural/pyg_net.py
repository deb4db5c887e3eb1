"""The graph network in PyTorch Geometric; imported only if torch is installed and needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv, global_max_pool, global_mean_pool

from ...features.table.kernel_graph import OPCODES
from .base import CLIP_NORM, Bound
from .batches import GraphBatch

_POOLS = (global_mean_pool, global_max_pool)


class PygGraphNet(nn.Module):
    """The same network as :class:`.flax_nets.FlaxGraphNet`: equal weights give equal outputs.

    Args:
        columns: Features of a kernel.
        node_columns: Features of a node.
        hidden: Width of a node.
        rounds: Rounds of message passing.
        head: Width of the perceptron.
        layers: Hidden layers of the perceptron.
    """

    def __init__(
        self, columns: int, node_columns: int, hidden: int, rounds: int, head: int, layers: int
    ) -> None:
        super().__init__()
        self.opcode = nn.Embedding(len(OPCODES), hidden)
        self.node = nn.Linear(node_columns, hidden)
        # Root weight and bias in one direction only, so that a round has each once, as in Flax.
        self.producers = nn.ModuleList(SAGEConv(hidden, hidden) for _ in range(rounds))
        self.users = nn.ModuleList(
            SAGEConv(hidden, hidden, root_weight=False, bias=False) for _ in range(rounds)
        )
        widths = [2 * hidden + columns, *[head] * layers]
        self.head = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.out = nn.Linear(widths[-1], 1)
        # PyTorch's default standard deviation of 1 would dominate the features of a node.
        nn.init.normal_(self.opcode.weight, std=hidden**-0.5)
        # Training starts from the median of the target, the bound's value at 0.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: GraphBatch) -> torch.Tensor:
        """Raw output, shape ``(rows,)``."""
        edges = torch.stack([_tensor(batch.source), _tensor(batch.target)])
        graph, graphs = _tensor(batch.graph), len(batch.graph_of_row) + 1
        h = functional.silu(self.opcode(_tensor(batch.opcode)) + self.node(_tensor(batch.features)))
        for producers, users in zip(self.producers, self.users, strict=True):
            h = h + functional.silu(producers(h, edges) + users(h, edges.flip(0)))
        pooled = torch.cat([pool(h, graph, graphs) for pool in _POOLS], dim=1)
        z = torch.cat([pooled[_tensor(batch.graph_of_row)], _tensor(batch.x)], dim=1)
        for layer in self.head:
            z = functional.silu(layer(z))
        out: torch.Tensor = self.out(z)[:, 0]
        return out


class PygNetwork:
    """A graph network with its weights and optimizer: a :class:`.base.Network`.

    Args:
        layers: The network.
        bound: Bounds of the log-ratios.
        delta: Errors of the log-ratio below this count quadratically.
        weight_decay: Weight decay of AdamW.
        weights: Result of :meth:`arrays`; ``None`` keeps those of the layers.
    """

    def __init__(
        self,
        layers: PygGraphNet,
        bound: Bound,
        delta: float,
        weight_decay: float,
        weights: Mapping[str, np.ndarray] | None,
    ) -> None:
        self._layers, self._bound, self._delta = layers, bound, delta
        if weights is not None:
            layers.load_state_dict({n: torch.from_numpy(a) for n, a in weights.items()})
        self._optimiser = torch.optim.AdamW(layers.parameters(), weight_decay=weight_decay)

    def step(self, batch: GraphBatch, rate: np.float32) -> None:
        """Train on one batch."""
        residual = self._bound(self._layers(batch), torch.sigmoid) - _tensor(batch.y)
        weight = _tensor(batch.weight)
        # sqrt(r² + δ²): the same loss as in Flax, so that both learn the same.
        loss = (weight * torch.sqrt(residual**2 + self._delta**2)).sum() / weight.sum()
        self._optimiser.param_groups[0]["lr"] = float(rate)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._layers.parameters(), CLIP_NORM)
        self._optimiser.step()

    def ratio(self, batch: GraphBatch) -> np.ndarray:
        """Log-ratios of the batch's rows, shape ``(rows,)``."""
        with torch.no_grad():
            found: np.ndarray = self._bound(self._layers(batch), torch.sigmoid).numpy()
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the weights by name."""
        return {n: t.numpy().copy() for n, t in self._layers.state_dict().items()}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generator, and restore the user's afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _tensor(values: np.ndarray) -> torch.Tensor:
    """A tensor; integers become 64 bits wide, as PyTorch requires for indices."""
    return torch.from_numpy(values.astype(np.int64) if values.dtype == np.int32 else values)
