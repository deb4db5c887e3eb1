"""Adaptation to a device from few samples, and choice of the next samples."""
