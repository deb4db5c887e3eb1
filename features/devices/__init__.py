"""Devices as data: figures of a chip, the catalogue of device files, rules for missing figures."""
