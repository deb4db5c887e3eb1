"""Traces that people have: what a device ran, matched to kernels and operators, as a dataset.

Readers of profiles of JAX, PyTorch and Nsight Systems give a :class:`~.trace.Trace`; :mod:`.xla`
matches its kernels to a program's, :mod:`.aten` to operators of libraries.
"""
