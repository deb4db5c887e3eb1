"""Reader of MLIR: StableHLO modules in; operations, attributes, types and locations out.

``bindings`` is all that is used of jaxlib's MLIR. ``worker`` parses in a separate process, so that
a crash of native code stays there.
"""
