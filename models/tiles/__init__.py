"""Kernels with tile configurations: times of Pallas, Triton and XLA implementations, ranked.

Rows of (device, op, arguments, implementation, configuration) come in (:mod:`.rows`), times with
intervals go out (:mod:`.model`).
"""
