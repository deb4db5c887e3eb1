"""Evaluate and train with tables of whole PyTorch models and their measured times and memory."""
