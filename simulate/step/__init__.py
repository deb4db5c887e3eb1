"""One training step under a parallel plan: durations and bytes in, time and memory out.

``workload`` and ``plan`` describe the model and its parallelism; ``layer_ops`` and ``traffic`` list
what one rank of a stage computes and sends, and ``blocks`` puts it in order; ``stage_times`` times
a stage, ``pipeline`` orders the micro-batches, ``memory`` counts bytes, and ``compose`` combines
them. Ranks that do the same work are never simulated individually.
"""
