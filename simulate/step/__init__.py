"""One training step under a parallel plan: durations and bytes in, time and memory out.

``workload`` and ``plan`` say what is trained and how it is spread; ``layer_ops`` and ``traffic``
list what one rank of a stage computes and sends; ``schedules`` and ``pipeline`` order the
micro-batches, ``overlap`` hides communication, ``memory`` counts bytes, and ``compose`` puts it all
together. Ranks that do the same work are never simulated one by one.
"""
