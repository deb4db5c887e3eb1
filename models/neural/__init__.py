"""Neural estimators: map a feature table or graphs to a bounded log-ratio to the roofline.

``mlp`` and ``gnn-flax`` run in JAX, ``gnn-pyg`` in PyTorch; all three are
:class:`~opcast.models.estimators.tabular.TabularEstimator` with the same target, loss, early
stopping and model folder. :mod:`opcast.models.core.registry` creates them by name.
"""
