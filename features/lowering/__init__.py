"""Lower programs to the kernels that a target runs: by its compiler, fusion rules, or op by op."""
