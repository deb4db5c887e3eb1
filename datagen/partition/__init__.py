"""Programs of one device spread over a mesh, with XLA's own partitioner."""
