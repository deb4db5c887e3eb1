"""Compilers of GPUs and TPUs that are not here: installed apart, run in processes of their own."""
