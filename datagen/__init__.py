"""Real measurements: workloads and random programs go in, datasets of kernel latencies come out.

``zoo`` holds model families, ``programs`` single ops and random programs; ``profile``
runs them on whatever device JAX sees. Needs jax, numpy, pandas and pyarrow only (the zoo also needs
flax and optax), so that it runs on a bare accelerator host.
"""
