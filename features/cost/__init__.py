"""FLOPs and bytes of operations and kernels, by the counting rules of XLA's own analysis."""
