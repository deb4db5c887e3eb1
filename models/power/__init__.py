"""Board power: a law of utilizations, and learned corrections on measured kernels.

:mod:`.model` predicts watts with intervals from operators and their predicted times; programs and
steps only use the law (:mod:`.law`, :mod:`.energy`), which needs no trees.
"""
