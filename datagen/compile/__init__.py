"""Datasets of kernels labelled with their compiler's estimates."""
