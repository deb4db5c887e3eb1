"""Fusion rules of this project: StableHLO in, kernels like those of XLA's GPU pipeline out.

``graph`` inlines a program into plain graphs; ``simplify``, ``products``, ``convolutions``,
``reductions`` and ``loops`` rewrite them into the form from which the GPU compiler starts fusing;
``epilogues``, ``priority`` and ``multi_output`` fuse their ``clusters``, and ``emit`` writes the
result as a scheduled HLO program. ``lower`` runs all of them in order.
"""
