"""A block of a decoder in bf16."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention with grouped heads and a gated layer."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 1536), nn.Linear(width, 1536)
        self.down = nn.Linear(1536, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to ``(batch, tokens, width)``."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


model = Block().bfloat16()
example_args = (torch.zeros(4, 256, 512, dtype=torch.bfloat16),)
