"""Real measurements: workloads and random programs go in, datasets of kernel latencies come out.

``zoo`` holds model families, ``sampler`` single ops, ``randomprog`` random programs; ``profiler``
runs them on whatever device JAX sees. Needs jax, numpy, pandas and pyarrow only (the zoo also needs
flax and optax), so that it runs on a bare accelerator host.
"""
