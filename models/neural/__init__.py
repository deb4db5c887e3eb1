"""Neural estimators: map a feature table or graphs to a bounded log-ratio to the roofline.

``estimators`` has a perceptron and two graph networks, whose layers are in ``flax_nets`` and
``pyg_net``; inputs (``batches``), target, loss, early stopping and model folder (``base``) are the
same for all. :mod:`opcast.models.core.registry` creates them by name.
"""
