"""Import profiler traces as datasets, and compare them with predictions."""
