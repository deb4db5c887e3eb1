"""Serving of decoders: what a forward pass runs, and how engines batch requests.

:mod:`.served` describes a model and an engine, :mod:`.forward` lists the operators of a forward
pass, :mod:`.engine` simulates continuous batching event by event, and :mod:`.loop` does so
iteration by iteration, slowly; the fast one is tested against it. :mod:`.floor` has times that no
engine falls below.
"""
