"""Composes kernel latencies into a program's time: overlap, overhead, context of a kernel."""
