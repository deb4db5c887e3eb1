"""One training step under a parallel plan: durations and bytes in, time and memory out.

``workload`` and ``plan`` say what is trained and how it is spread; ``layer_ops`` and ``traffic``
list what one rank of a stage computes and sends, and ``blocks`` in what order; ``stage_times``
times a stage, ``pipeline`` orders the micro-batches, ``memory`` counts bytes, and ``compose`` puts
it all together. Ranks that do the same work are never simulated one by one.
"""
