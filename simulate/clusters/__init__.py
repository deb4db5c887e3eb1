"""Clusters as data: topologies, their files and the catalogue."""
