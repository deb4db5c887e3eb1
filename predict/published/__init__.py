"""Predictions for published tables of latencies, including whole op graphs."""
