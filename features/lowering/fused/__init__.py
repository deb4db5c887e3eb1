"""Our own fusion rules: StableHLO in, kernels like those of XLA's GPU pipeline out.

``dataflow`` inlines a program into plain graphs, ``rewrites`` brings them into the form in which
the GPU compiler starts to fuse, ``fusion`` fuses and writes the result as a scheduled HLO program.
``features/lowering/fused_lowering.py`` calls them in turn.
"""
