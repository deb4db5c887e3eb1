"""Estimators: turn a dataset into a model folder that predicts kernel and program latency.

``training`` fits and evaluates, ``cost_model`` is the saved bundle (estimator, intervals, domain,
program model), ``tracking`` logs to MLflow. ``predict`` and the command line call it.
"""
