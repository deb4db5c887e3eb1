"""Reader of MLIR: StableHLO modules in; operations, attributes, types and locations out.

``worker`` parses in a separate process, so that a crash of native code stays there.
"""
