"""Workflows behind the commands that join several folders: measuring, training, checking, demo."""
