"""Generators of programs to measure: single operations, composites and random programs."""
