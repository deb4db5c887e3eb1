"""Reliability of predictions: conformal intervals, training domain, nearest measured kernels."""
