"""Board power: a law of utilisations, and what measured kernels teach beyond it.

Operators and their predicted times come in, watts with intervals go out (:mod:`.model`); programs
and steps ask the law alone (:mod:`.law`, :mod:`.energy`), which needs no trees.
"""
