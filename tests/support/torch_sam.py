"""Segment Anything's image encoder, as its first release writes attention out."""

import torch
from torch import nn
from torch.nn import functional as F

#: Width, layers, heads and layers without windows of the published sizes.
SIZES = {"vit_b": (768, 12, 12, (2, 5, 8, 11)), "vit_h": (1280, 32, 16, (7, 15, 23, 31))}
WINDOW, SIDE = 14, 64


class ChannelNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def with_positions(scores, q, rows, columns, side):
    """Scores with relative positions added; the caller still holds those that it gave."""
    steps = torch.arange(side)
    away = steps[:, None] - steps[None, :] + side - 1
    split = q.reshape(q.shape[0], side, side, -1)
    up = torch.einsum("bhwc,hkc->bhwk", split, rows[away])
    across = torch.einsum("bhwc,wkc->bhwk", split, columns[away])
    whole = scores.view(-1, side, side, side, side)
    scores = whole + up[:, :, :, :, None] + across[:, :, :, None, :]
    return scores.view(-1, side * side, side * side)


class Attention(nn.Module):
    def __init__(self, width, heads, side):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rows = nn.Parameter(torch.zeros(2 * side - 1, width // heads))
        self.columns = nn.Parameter(torch.zeros(2 * side - 1, width // heads))

    def forward(self, x):
        batch, side, _, _ = x.shape
        qkv = self.qkv(x).reshape(batch, side * side, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, batch * self.heads, side * side, -1).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = with_positions(scores, q, self.rows, self.columns, side)
        scores = scores.softmax(dim=-1)
        x = (scores @ v).view(batch, self.heads, side, side, -1).permute(0, 2, 3, 1, 4)
        return self.proj(x.reshape(batch, side, side, -1))


class Block(nn.Module):
    def __init__(self, width, heads, windowed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, WINDOW if windowed else SIDE)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.windowed = windowed

    def forward(self, x):
        before = x
        x = self.norm1(x)
        x = self.in_windows(x) if self.windowed else self.attention(x)
        x = before + x
        return x + self.mlp(self.norm2(x))

    def in_windows(self, x):
        batch, side, _, width = x.shape
        pad = -side % WINDOW
        x = F.pad(x, (0, 0, 0, pad, 0, pad))
        count = (side + pad) // WINDOW
        x = x.view(batch, count, WINDOW, count, WINDOW, width).permute(0, 1, 3, 2, 4, 5)
        x = self.attention(x.contiguous().view(-1, WINDOW, WINDOW, width))
        x = x.view(batch, count, count, WINDOW, WINDOW, width).permute(0, 1, 3, 2, 4, 5)
        x = x.contiguous().view(batch, side + pad, side + pad, width)
        return x[:, :side, :side, :].contiguous()


class ImageEncoder(nn.Module):
    """Takes images of 1,024 × 1,024.

    Args:
        size: A key of :data:`SIZES`.
    """

    def __init__(self, size):
        super().__init__()
        width, depth, heads, whole = SIZES[size]
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, SIDE, SIDE, width))
        self.blocks = nn.ModuleList(Block(width, heads, i not in whole) for i in range(depth))
        self.neck = nn.Sequential(
            *(nn.Conv2d(width, 256, 1, bias=False), ChannelNorm(256)),
            *(nn.Conv2d(256, 256, 3, padding=1, bias=False), ChannelNorm(256)),
        )

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        x = x + self.places
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))
