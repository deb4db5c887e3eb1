"""Exports for other tools: estimators for HESPAS, Chakra traces, Vidur's tables, latency tables.

``hespas.py`` imports HESPAS, so nothing but ``hespas_run.py`` imports it, and only on demand.
"""
