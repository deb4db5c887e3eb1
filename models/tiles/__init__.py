"""Kernels with tile configurations: times of Pallas, Triton and XLA implementations, ranked.

:mod:`.rows` reads rows of (device, op, arguments, implementation, configuration); :mod:`.model`
predicts their times with intervals.
"""
