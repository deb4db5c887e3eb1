"""Adaptation to a device from few samples, and which samples to take next."""
