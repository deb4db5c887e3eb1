"""Simulation: from the times of kernels to the time of a program, training step or deployment.

``program`` places kernels on a device's workers, and collectives on a second stream. ``clusters``
describes how devices are connected, ``collectives`` has closed forms of collectives over these
topologies. ``step`` (parallel plans) and ``serving`` build on both; ``chakra`` reads and writes
execution traces.
"""
