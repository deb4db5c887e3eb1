"""Rewrites before fusion, as XLA makes them: products, convolutions, loops, reductions."""
