"""Predictions: a program, a device and a model go in; latency with intervals and reasons comes out.

``predictor`` is the public entry (``opcast.load``); ``render`` prints a prediction for people;
``published`` composes published op graphs from the latencies of their operations.
"""
