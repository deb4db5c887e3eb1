"""Search for the best way to run a program on a cluster: meshes, shardings, and what they cost."""
