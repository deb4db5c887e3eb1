"""Predictions of single library operators."""
