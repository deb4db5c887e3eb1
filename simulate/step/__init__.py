"""One training step under a parallel plan: durations and bytes go in, time and memory come out.

``plan`` and ``workload`` say what is trained and how it is spread; ``layer_ops`` and ``traffic``
list what one rank of a stage computes and sends; ``schedules`` and ``pipeline`` order the
micro-batches, ``overlap`` hides communication, ``memory`` counts bytes, ``compose`` puts all of it
together. Ranks that do the same are never simulated one by one.
"""
