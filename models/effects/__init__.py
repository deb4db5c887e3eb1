"""Shrunken random effects on classes of cost: what measured steps and served requests teach.

``effects`` holds the learned factors of each level, whose names and priors are data (``*.yaml``),
and ``linear`` learns them.
"""
