"""A measuring campaign of an accelerator that someone has for half an hour: ``opcast campaign``.

Needs jax alone, or torch alone, and keeps what was observed: optimised modules, events, seconds.
Kernels and their features are made of that when a campaign is imported, where opcast is installed.
With pyarrow the tables are Parquet, else gzipped JSON lines.
"""
