"""Evaluate, train and calibrate serving models with tables of measured runs."""
