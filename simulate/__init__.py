"""Composition: kernels with durations go in, the time of a whole program comes out.

``schedule`` places kernels on a device's workers in schedule order. ``collective`` estimates what
goes over ``links``: the time of all-reduces and their like, with intervals. ``topology`` describes
how devices are joined, ``cluster_catalogue`` finds that by name, ``algorithms`` has the formulas of
collectives over it. Parallel plans build on all of them.
"""
