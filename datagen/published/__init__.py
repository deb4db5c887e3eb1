"""Imports published tables of operator latencies as datasets."""
