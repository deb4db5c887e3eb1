"""Kernels of XLA on GPUs: kernels and a device in, latencies with intervals and their routes out.

``describe`` says what a kernel is asked as; ``products``, ``attention`` and ``traffic`` answer for
one route each; ``estimator`` joins them and keeps to the roofline; ``correction`` learns from
kernels measured under XLA; ``build`` makes the shipped model from published rows. The registry
knows the estimator as ``gpu-xla`` (docs/gpu.md).
"""

from .estimator import GpuEstimator

__all__ = ["GpuEstimator"]
