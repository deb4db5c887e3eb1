"""Kernels of XLA on GPUs: routes to published operators, passes over memory, intervals, guards."""
