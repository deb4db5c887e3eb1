"""Kernels: what a compiled, scheduled module runs, with kind, canonical text and memory."""
