"""Explanations of predictions: contributions of groups of features."""
