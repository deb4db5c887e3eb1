"""Compile a repeated layer once: find repeats, excise them, and put the kernels back together."""
