"""Formulas of collective algorithms over a topology."""
