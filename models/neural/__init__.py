"""Neural estimators: a table or graphs go in, a bounded log-ratio to the roofline comes out.

``mlp`` and ``gnn-flax`` run in JAX, ``gnn-pyg`` in PyTorch; all three are
:class:`~opcast.models.estimators.tabular.TabularEstimator` with the same target, loss, early
stopping and model folder. The registry of :mod:`opcast.models.core.registry` makes them by name.
"""
