"""Chakra execution traces: what each rank of a partitioned program does, for ASTRA-sim and others.

``messages`` implements the format, ``ranks`` turns the nodes of a program into one trace per rank,
``folder`` writes and reads a folder with all that ASTRA-sim needs, and ``timeline`` runs traces.
"""
