"""Measuring campaigns on an accelerator that is available for half an hour: ``opcast campaign``.

Requires only jax or torch, and records what was observed: optimised modules, events, seconds.
Kernels and their features are derived when the campaign is imported, where opcast is installed.
Tables are Parquet if pyarrow is installed, otherwise gzipped JSON lines.
"""
