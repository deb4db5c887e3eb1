"""Predictions on clusters: training steps, partitioned programs, serving."""
