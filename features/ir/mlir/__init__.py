"""Reader of MLIR: StableHLO modules in; operations, attributes, types and locations out.

``worker`` parses in a process of its own, so that a crash of native code stays there.
"""
