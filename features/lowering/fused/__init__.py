"""Our own fusion rules: StableHLO in, kernels like those of XLA's GPU pipeline out.

``graph`` inlines a program into plain graphs; ``simplify``, ``products``, ``convolutions``,
``reductions`` and ``loops`` bring them into the form in which the GPU compiler starts to fuse;
``epilogues``, ``priority`` and ``multi_output`` fuse their ``clusters``, and ``emit`` writes the
result as a scheduled HLO program. ``lower`` calls them in turn.
"""
