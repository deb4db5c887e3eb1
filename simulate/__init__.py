"""Composition: from kernels with durations to the time of a whole program or step.

``program`` places kernels on a device's workers, and its collectives beside them. ``clusters`` says
how devices are joined, ``collectives`` has the formulas of all-reduces and their like over that.
``step`` (parallel plans) and ``serving`` build on both; ``chakra`` reads and writes traces.
"""
