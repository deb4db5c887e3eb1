"""Compile repeated layers once: find repeats, remove them, and reassemble the kernels."""
