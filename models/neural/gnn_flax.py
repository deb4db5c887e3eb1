"""The graph network in Flax."""

from __future__ import annotations

from .gnn import GraphEstimator, GraphNetwork, Weights


class FlaxGraphEstimator(GraphEstimator):
    """Message passing in Flax.

    Batches are padded to few different sizes (:mod:`.batches`), so that XLA compiles a handful of
    functions. The parameters are the same as :class:`.gnn.GraphEstimator`'s.
    """

    name = "gnn-flax"

    def _network(self, weights: Weights | None = None) -> GraphNetwork:
        from .flax_nets import FlaxGraphNet, TrainedNetwork, compiled, example_batch

        p, inputs, nodes = self.params, self._known(self.inputs), self._known(self.nodes)
        layers = FlaxGraphNet(p["hidden"], p["rounds"], p["head"], p["layers"])
        functions = compiled(layers, p["delta"], p["weight_decay"])
        bound = self.bound.to_array()
        if weights is not None:
            return TrainedNetwork.restored(functions, weights, bound)
        example = example_batch(inputs.width, nodes.width)
        return TrainedNetwork(functions, functions.init(p["seed"], example), bound)
