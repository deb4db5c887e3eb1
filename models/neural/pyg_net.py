"""The graph network in PyTorch Geometric; imported only where torch is installed and needed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, global_max_pool, global_mean_pool

from ...features.table.kernel_graph import OPCODES
from .batches import GraphRows


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
        # With root weight and bias in one direction only, so that a round has each of them once, as
        # the network in Flax does.
        self.producers = nn.ModuleList(SAGEConv(hidden, hidden) for _ in range(rounds))
        self.users = nn.ModuleList(
            SAGEConv(hidden, hidden, root_weight=False, bias=False) for _ in range(rounds)
        )
        widths = [2 * hidden + columns, *[head] * layers]
        self.head = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.out = nn.Linear(widths[-1], 1)
        # PyTorch's default has standard deviation 1, which would drown the features of a node.
        nn.init.normal_(self.opcode.weight, std=hidden**-0.5)
        # Training starts from the median of the target, which is what the bound gives at 0.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: Data) -> torch.Tensor:
        """Raw output, shape ``(rows,)``, for a batch of :func:`graph_data`."""
        edges, users_to_producers = batch.edge_index, batch.edge_index.flip(0)
        h = functional.silu(self.opcode(batch.opcode) + self.node(batch.features))
        for producers, users in zip(self.producers, self.users, strict=True):
            h = h + functional.silu(producers(h, edges) + users(h, users_to_producers))
        rows = len(batch.x)
        pooled = [pool(h, batch.batch, rows) for pool in (global_mean_pool, global_max_pool)]
        z = torch.cat([*pooled, batch.x], dim=1)
        for layer in self.head:
            z = functional.silu(layer(z))
        out: torch.Tensor = self.out(z)[:, 0]
        return out


def graph_data(rows: GraphRows) -> list[Data]:
    """One graph a row; rows with the same kernel share its tensors."""
    unique, graph_of_row = np.unique(rows.graph, return_inverse=True)
    graphs = rows.packed.take(unique)
    features = torch.from_numpy(rows.nodes(graphs.features))
    opcode = torch.from_numpy(graphs.opcode.astype(np.int64))
    last_node, last_edge = np.cumsum(graphs.nodes), np.cumsum(graphs.uses)
    first_node, first_edge = last_node - graphs.nodes, last_edge - graphs.uses
    # From positions among all packed nodes to positions within each graph, as PyTorch Geometric
    # counts.
    local = graphs.edges - np.repeat(first_node, graphs.uses)
    edges = torch.from_numpy(local.astype(np.int64))
    x, y = torch.from_numpy(rows.x), torch.from_numpy(rows.y)
    data_list = []
    for row, graph in enumerate(graph_of_row.tolist()):
        own = slice(first_node[graph], last_node[graph])
        data = Data(x=x[row : row + 1], y=y[row : row + 1], num_nodes=int(graphs.nodes[graph]))
        data.opcode, data.features = opcode[own], features[own]
        data.edge_index = edges[:, first_edge[graph] : last_edge[graph]]
        data_list.append(data)
    return data_list


def to_arrays(net: nn.Module) -> dict[str, np.ndarray]:
    """Weights as plain arrays by name; copies, since training goes on."""
    return {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}


def from_arrays(net: PygGraphNet, arrays: Mapping[str, np.ndarray]) -> PygGraphNet:
    """Load the weights of :func:`to_arrays` into the network, and return it."""
    net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return net
