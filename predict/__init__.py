"""Predictions: program, device and model in; latency with an interval and an explanation out.

``program/predictor.py`` is the public entry (``opcast.load``), ``cluster/`` predicts steps and
partitioned programs, ``operator/`` single library operators, ``published/`` published tables and
op graphs. ``render/``, ``page/`` and ``export/`` turn predictions into text, HTML and files.
"""
