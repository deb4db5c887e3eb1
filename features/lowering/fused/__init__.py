"""Our own fusion rules: StableHLO in, kernels like those of XLA's GPU pipeline out.

``graph`` inlines a program into plain dataflow graphs, ``simplify`` and the other ``rewrites``
bring them into the form in which the GPU compiler starts to fuse, ``priority`` and ``multi_output``
fuse, ``emit`` writes the result as a scheduled HLO program. ``features/lowering/fused_lowering.py``
calls them in turn.
"""
