"""Measured serving as a teacher: what frameworks cost beyond their operators.

The logarithm of a latency is nearly linear in the logarithms of its costs, whose shares the
simulator gives with it (:mod:`opcast.predict.cluster.serving`). Effects by framework, chip and
format are learned on each class of cost (:mod:`.effects`, :mod:`.fit`), intervals from what was
left out (:mod:`.model`).
"""
