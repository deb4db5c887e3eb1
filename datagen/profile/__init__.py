"""Measures kernels and programs on the local device, in a worker process that may die."""
