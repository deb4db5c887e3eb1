"""Shrunken random effects on classes of cost, learned from measured steps and served requests.

``effects`` holds the learned factors of each level (names and priors are data: ``*.yaml``), and
``linear`` fits them.
"""
