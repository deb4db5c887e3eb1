"""Search for the best way to run a program on a cluster, or to serve a model on it.

It covers meshes and shardings of programs, engines and their plans of served models, and the costs.
"""
