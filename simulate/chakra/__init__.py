"""Chakra execution traces: the work of each rank of a program, for ASTRA-sim and other tools.

``messages`` implements the format, ``ranks`` turns the nodes of a program into one trace per rank,
``step_ranks`` does so for a training step, ``folder`` writes and reads a folder with all that
ASTRA-sim needs, and ``timeline`` runs traces.
"""
