"""Compilers for GPUs and TPUs that are not attached: installed apart, run in their own process."""
