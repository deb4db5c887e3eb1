"""Shared by all estimators: protocol, registry, folders on disk, tables and graphs of kernels."""
