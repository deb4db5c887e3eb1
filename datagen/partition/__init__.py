"""Spreads programs over devices with XLA's partitioner, which runs in a separate process."""
