"""Serving of decoder models: the operators of a forward pass, and continuous batching.

:mod:`.served` describes a model and an engine, :mod:`.forward` lists the operators of a forward
pass, :mod:`.engine` simulates continuous batching event by event, :mod:`.fleet` runs several
engines behind a router, and :mod:`.floor` gives lower bounds on the latencies.
"""
