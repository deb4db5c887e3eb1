"""Traces that people have: imported as datasets, and compared with predictions."""
