"""Slow, exact simulators that the fast ones are checked against."""
