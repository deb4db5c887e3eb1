"""Clusters as data: topologies, cluster files and the catalogue."""
