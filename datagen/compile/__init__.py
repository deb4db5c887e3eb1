"""Datasets of kernels labelled with their compiler's own estimates."""
