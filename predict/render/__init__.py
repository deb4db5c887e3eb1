"""Predictions as text for people."""
