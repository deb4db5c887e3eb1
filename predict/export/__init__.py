"""Plug-ins: opcast as the estimator of other simulators.

Programs and operators of another simulator go in, seconds come out. ``hespas`` needs HESPAS itself
and is imported by nothing else.
"""
