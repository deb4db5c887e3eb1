"""Utilities for every folder: errors, files, paths, parquet, worker processes, units, consoles.

They are independent of programs and devices, and import no other folder of opcast.
"""
