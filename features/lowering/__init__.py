"""From a program to the kernels that a target runs: by its compiler, by our rules, or op by op."""
