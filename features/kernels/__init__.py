"""Kernels of a compiled, scheduled module, with kind, canonical text and memory."""
