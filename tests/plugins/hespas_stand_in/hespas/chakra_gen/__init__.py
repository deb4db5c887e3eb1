"""Trace generation."""
