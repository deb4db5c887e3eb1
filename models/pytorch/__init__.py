"""What measured whole models teach of PyTorch's kernels: factors by class of cost, and ends."""
