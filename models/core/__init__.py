"""Common parts of estimators: protocols, registry, model folders, tables and graphs of kernels."""
