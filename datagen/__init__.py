"""Datasets of kernel latencies: measured, estimated by a compiler, or published.

``zoo`` holds model families, ``programs`` single ops and random programs; ``profile``
runs them on whatever device JAX sees. Needs jax, numpy, pandas, pyarrow and PyYAML only (the zoo
also needs flax and optax); ``campaign`` needs jax or torch alone, so that it runs on any host.
"""
