"""Composes kernel latencies into a program's time: overlap, overheads, context of kernels."""
