"""What all estimators share: protocol, registry, folders on disk, tables and graphs of kernels."""
