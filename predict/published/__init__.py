"""Predictions for tables that others published, whole op graphs included."""
