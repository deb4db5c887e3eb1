"""Composition: kernels with durations go in, the time of a whole program comes out.

``schedule`` places kernels on a device's workers in schedule order. Parallel plans and topologies
build on it.
"""
