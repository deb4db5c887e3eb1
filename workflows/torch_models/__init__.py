"""Tables of whole PyTorch models, predicted, judged and learned from.

A row names a model of a library, how it is run, and what it took.
"""
