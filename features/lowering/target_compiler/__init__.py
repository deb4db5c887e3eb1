"""Compilers for GPUs and TPUs that are not attached: installed separately, run in a subprocess."""
