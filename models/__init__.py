"""Estimators: a dataset goes in, a model folder comes out that predicts kernel and program latency.

``train`` fits and evaluates, ``cost_model`` is the saved bundle (estimator, intervals, domain,
program model), ``tracking`` logs to MLflow. Called by ``predict`` and the command line.
"""
