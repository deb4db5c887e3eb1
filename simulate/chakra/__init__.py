"""Chakra execution traces: what each rank of a partitioned program does, for ASTRA-sim and others.

``wire`` and ``messages`` are the format, ``ranks`` turns nodes of a program into one trace a rank,
``folder`` writes and reads a folder with all that ASTRA-sim needs, ``timeline`` runs traces.
"""
