"""Reader of MLIR: converts operations, attributes, types and locations of StableHLO modules.

``bindings`` wraps all used parts of jaxlib's MLIR. ``worker`` parses in a separate process, so that
crashes of native code do not spread.
"""
