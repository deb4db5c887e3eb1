"""Kernels with a compiler's own estimates as a dataset."""
