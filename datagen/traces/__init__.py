"""Users' traces: executions on a device, matched to kernels and operators, as a dataset.

Readers of profiles of JAX, PyTorch and Nsight Systems return a :class:`~.trace.Trace`; :mod:`.xla`
matches its kernels to a program's, :mod:`.aten` to operators of libraries.
"""
