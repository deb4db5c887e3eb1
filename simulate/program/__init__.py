"""Timelines of programs: list scheduling of kernels and collectives on streams."""
