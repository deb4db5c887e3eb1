"""Datasets of kernel latencies: measured, estimated by a compiler, or published.

``zoo`` holds model families, ``programs`` single ops and random programs; ``profile`` runs them on
any device that JAX supports. Requires only jax, numpy, pandas, pyarrow and PyYAML (the zoo also
flax and optax); ``campaign`` requires only jax or torch, so that it runs on any host.
"""
