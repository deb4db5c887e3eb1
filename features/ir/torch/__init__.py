"""PyTorch modules as programs: ``torch.export``'s core ATen graph, translated to JAX op by op.

PyTorch is imported only inside the functions that need it.
"""
