"""Latencies of XLA's kernels on GPUs, with intervals, from published operators.

``routes`` decides which published operator a kernel resembles; ``products``, ``attention`` and
``memory_passes`` predict one route each; ``estimator`` joins them and enforces the roofline as a
lower bound; ``operator_library`` holds those operators, corrected by kernels measured under XLA;
``memory_passes_fit`` builds the shipped model from published rows. The registry lists the estimator
as ``gpu-xla`` (docs/gpu.md).
"""

from .estimator import GpuEstimator

__all__ = ["GpuEstimator"]
