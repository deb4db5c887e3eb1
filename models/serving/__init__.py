"""Learns from measured serving what frameworks cost beyond their operators.

The logarithm of a latency is nearly linear in the logarithms of its cost classes, whose shares the
simulator returns with it (:mod:`opcast.predict.cluster.serving`). :mod:`.effects` learns effects by
framework, chip and format on each class of cost; :mod:`.model` adds intervals calibrated on
held-out rows (:mod:`.ends`).
"""
