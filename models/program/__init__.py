"""From kernel latencies to a program's time: overlap, overhead, context of a kernel."""
