"""Predictions of programs on one device, their explanation, and estimators side by side."""
