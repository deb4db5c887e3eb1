"""Closed-form costs of collective algorithms over a topology."""
