"""Measuring kernels and programs on the local device, in a worker that may die."""
